/* Streams, events and graphs. Every call completes at once, so streams never wait, except for NCCL's collectives (nccl.c). */
#include "bed.h"
#include <time.h>

typedef struct {
    int priority;
    unsigned long long capture; /* the number of the current one, or 0 */
    Tickets tickets;            /* of the collectives that were launched on it, or that it waits for */
} Stream;
typedef struct {
    struct timespec recorded;
    Tickets tickets; /* the stream's, when it was recorded */
} Event;
static unsigned long long captures;
static Tickets of_own_streams[MAX_DEVICES];

/* Streams 0, 1 and 2 are CUDA's own: the default one, legacy, per thread. */
static Stream *made_stream(cudaStream_t stream) { return (uintptr_t)stream > 2 ? (Stream *)stream : 0; }

Tickets *tickets_of(cudaStream_t stream) {
    return made_stream(stream) ? &made_stream(stream)->tickets : &of_own_streams[current_device];
}

EXPORT cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned flags, int priority) {
    int error = make_context(current_device);
    if (error) return fail_with(error);
    Stream *made = calloc(1, sizeof *made);
    made->priority = priority;
    *stream = (cudaStream_t)made;
    return status();
}
EXPORT cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned flags) {
    return cudaStreamCreateWithPriority(stream, flags, 0);
}
EXPORT cudaError_t cudaStreamCreate(cudaStream_t *stream) { return cudaStreamCreateWithPriority(stream, 0, 0); }
EXPORT cudaError_t cudaStreamDestroy(cudaStream_t stream) {
    free(made_stream(stream));
    return status();
}
EXPORT cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority) {
    *priority = made_stream(stream) ? made_stream(stream)->priority : 0;
    return status();
}
EXPORT cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    RETURN_IF_FAULTY(SYNC);
    return nccl_wait(tickets_of(stream));
}
EXPORT cudaError_t cudaStreamQuery(cudaStream_t stream) {
    return nccl_are_done(tickets_of(stream)) ? status() : fail_with(cudaErrorNotReady);
}
EXPORT cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned flags) {
    nccl_add(tickets_of(stream), &((Event *)event)->tickets);
    return status();
}
EXPORT cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t call, void *data, unsigned flags) {
    call(stream, 0, data);
    return status();
}
EXPORT cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t call, void *data) {
    call(data);
    return status();
}

#define THE_GRAPH ((cudaGraph_t)16) /* torch only passes it to functions that do nothing */

EXPORT cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode) {
    if (made_stream(stream)) made_stream(stream)->capture = ++captures;
    return status();
}
EXPORT cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph) {
    if (made_stream(stream)) made_stream(stream)->capture = 0;
    *graph = THE_GRAPH;
    return status();
}
EXPORT cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *capturing) {
    int is = made_stream(stream) && made_stream(stream)->capture;
    *capturing = is ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return status();
}
#if CUDART_VERSION >= 13000
#define EDGES(edges) edges,
#else
#define EDGES(edges)
#endif
EXPORT cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *capturing, unsigned long long *id,
                                            cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                            EDGES(const cudaGraphEdgeData **edges) size_t *count) {
    if (id) *id = made_stream(stream) ? made_stream(stream)->capture : 0;
    if (graph) *graph = THE_GRAPH;
    if (nodes) *nodes = 0;
    if (count) *count = 0; /* and so no edges */
    return cudaStreamIsCapturing(stream, capturing);
}
EXPORT cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *made, cudaGraph_t graph, unsigned long long flags) {
    *made = (cudaGraphExec_t)16;
    return status();
}
EXPORT cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count) {
    if (!nodes) *count = 1; /* torch warns about graphs without nodes */
    return status();
}

EXPORT cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned flags) {
    *event = calloc(1, sizeof(Event));
    return status();
}
EXPORT cudaError_t cudaEventCreate(cudaEvent_t *event) { return cudaEventCreateWithFlags(event, 0); }
EXPORT cudaError_t cudaEventDestroy(cudaEvent_t event) {
    free(event);
    return status();
}
EXPORT cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream) {
    Event *recorded = (Event *)event;
    clock_gettime(CLOCK_MONOTONIC, &recorded->recorded);
    if (nccl_in_use) recorded->tickets = *tickets_of(stream);
    return status();
}
EXPORT cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned flags) {
    return cudaEventRecord(event, stream);
}
EXPORT cudaError_t cudaEventSynchronize(cudaEvent_t event) {
    RETURN_IF_FAULTY(SYNC);
    return nccl_wait(&((Event *)event)->tickets);
}
EXPORT cudaError_t cudaEventQuery(cudaEvent_t event) {
    return nccl_are_done(&((Event *)event)->tickets) ? status() : fail_with(cudaErrorNotReady);
}
EXPORT cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t begin, cudaEvent_t end) {
    struct timespec *from = &((Event *)begin)->recorded, *to = &((Event *)end)->recorded;
    *ms = (to->tv_sec - from->tv_sec) * 1e3f + (to->tv_nsec - from->tv_nsec) / 1e6f;
    return status();
}
