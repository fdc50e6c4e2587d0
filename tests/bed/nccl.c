/* NCCL: a collective is launched at once, and done once every rank has launched it.
 *
 * So a rank that is missing makes the others wait where a card makes them wait: for events, streams, devices and copies to
 * the host. A payload of up to 16 KiB a rank really travels; of a larger one nothing does. Sends and receives do nothing.
 *
 * The ranks of a communicator share memory. Its first rank makes it as a file without a name, which ends with the last
 * process that has it open or mapped, however it ends; the other ranks open it through /proc. */
#include "bed.h"
#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>
#include <time.h>

#define MAX_RANKS 16
#define AT_ONCE 256ul   /* collectives that a communicator has launched and not done; the next launch waits, as on a card */
#define SMALL 16384ul   /* the largest payload that travels */
#define MAX_SPLITS 1024 /* of a communicator; enough, since every one that lives takes one of MAX_COMMUNICATORS */

/* The types and codes of nccl.h, of which the bed has no copy. */
enum { DONE, UNHANDLED_CUDA_ERROR, SYSTEM_ERROR, INTERNAL_ERROR, INVALID_ARGUMENT };
enum { SUM, PROD, MAX, MIN, AVG, MULTIPLIED_SUM };
enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, FLOAT8E4M3, FLOAT8E5M2, TYPES };
static const size_t item_bytes[TYPES] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
typedef struct { int pid, fd; uint64_t number; } Meeting; /* where the shared memory is; the number says that it is this one */
typedef union { Meeting meeting; char bytes[128]; } UniqueId;

typedef enum { ALL_REDUCE, BROADCAST, REDUCE, ALL_GATHER, REDUCE_SCATTER, ALL_TO_ALL } Kind;
typedef struct {
    Kind kind;
    int type, operation, root;
    const void *from;
    void *to;
    size_t bytes, result_bytes; /* a rank's payload and its result; both 0 if nothing travels */
} Collective;

/* What the ranks share. A counter of a rank is written by that rank alone, and never falls. */
typedef enum { JOINED, LAUNCHED, FINISHED, SPLIT, COUNTERS } Counter;
typedef struct {
    uint64_t number;
    int64_t counters[COUNTERS][MAX_RANKS];
    struct { int color, key; Meeting meeting; } splits[MAX_SPLITS][MAX_RANKS]; /* each is used once: none overtakes another */
    char payloads[AT_ONCE][MAX_RANKS][SMALL];
} Shared;

/* Its memory is never freed, since another thread may be waiting in it when it is aborted. */
typedef struct {
    Shared *shared; /* null once it is destroyed or aborted */
    int ranks, rank, device, slot;
    int64_t launched, finished, splits, charged_bytes;
    Collective collectives[AT_ONCE];
} Communicator;

int nccl_in_use; /* has this process ever had a communicator? */
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static Communicator *communicators[MAX_COMMUNICATORS]; /* by slot */
static Tickets launched, finished;                     /* by slot, over all communicators that ever had it */
static __thread char last_error[256];

static int refuse(int error, const char *text) {
    snprintf(last_error, sizeof last_error, "%s", text);
    log_line("NCCL: %s", text);
    return error;
}

static int cuda_failure(int error) {
    char text[128];
    snprintf(text, sizeof text, "Cuda failure %d '%s'", error, error_text(error));
    return refuse(UNHANDLED_CUDA_ERROR, text);
}

static void nap(void) { nanosleep(&(struct timespec){0, 50000}, 0); }

/* ---- what a collective does, once all ranks' payloads are there ---- */

/* A long double holds every number of these types. */
static long double number_at(const void *at, int type, size_t i) {
    switch (type) {
    case INT8: return ((const int8_t *)at)[i];
    case UINT8: return ((const uint8_t *)at)[i];
    case INT32: return ((const int32_t *)at)[i];
    case UINT32: return ((const uint32_t *)at)[i];
    case INT64: return ((const int64_t *)at)[i];
    case UINT64: return ((const uint64_t *)at)[i];
    case FLOAT32: return ((const float *)at)[i];
    case FLOAT64: return ((const double *)at)[i];
    default: { /* BFLOAT16: the upper half of a float */
        union { uint32_t bits; float value; } whole = {(uint32_t)((const uint16_t *)at)[i] << 16};
        return whole.value;
    }
    }
}

static void set_number_at(void *at, int type, size_t i, long double value) {
    switch (type) {
    case INT8: ((int8_t *)at)[i] = value; break;
    case UINT8: ((uint8_t *)at)[i] = value; break;
    case INT32: ((int32_t *)at)[i] = value; break;
    case UINT32: ((uint32_t *)at)[i] = value; break;
    case INT64: ((int64_t *)at)[i] = value; break;
    case UINT64: ((uint64_t *)at)[i] = value; break;
    case FLOAT32: ((float *)at)[i] = value; break;
    case FLOAT64: ((double *)at)[i] = value; break;
    default: {
        union { float value; uint32_t bits; } whole = {value};
        ((uint16_t *)at)[i] = (whole.bits + 0x7fff + (whole.bits >> 16 & 1)) >> 16;
    }
    }
}

static int is_reduced(Kind kind) { return kind == ALL_REDUCE || kind == REDUCE || kind == REDUCE_SCATTER; }
static int can_reduce(int type) { return type != FLOAT16 && type <= BFLOAT16; }

static long double combined(int operation, long double a, long double b) {
    switch (operation) {
    case PROD: return a * b;
    case MAX: return b > a ? b : a;
    case MIN: return b < a ? b : a;
    default: return a + b;
    }
}

static void deliver(Communicator *communicator, const Collective *c, char (*payloads)[SMALL]) {
    int ranks = communicator->ranks, rank = communicator->rank;
    size_t part = c->bytes / ranks, first = c->kind == REDUCE_SCATTER ? rank * part / item_bytes[c->type] : 0;
    if (is_reduced(c->kind))
        for (size_t i = 0; i < c->result_bytes / item_bytes[c->type]; i++) {
            long double value = number_at(payloads[0], c->type, first + i);
            for (int r = 1; r < ranks; r++) value = combined(c->operation, value, number_at(payloads[r], c->type, first + i));
            set_number_at(c->to, c->type, i, c->operation == AVG ? value / ranks : value);
        }
    else if (c->kind == BROADCAST) memcpy(c->to, payloads[c->root], c->bytes);
    else if (c->kind == ALL_GATHER)
        for (int r = 0; r < ranks; r++) memcpy((char *)c->to + r * c->bytes, payloads[r], c->bytes);
    else
        for (int r = 0; r < ranks; r++) memcpy((char *)c->to + r * part, payloads[r] + rank * part, part);
}

/* ---- counting: with the mutex held ---- */

static int all_have(Communicator *communicator, Counter counter, int64_t number) {
    int64_t *of_rank = communicator->shared->counters[counter];
    for (int r = 0; r < communicator->ranks; r++)
        if (__atomic_load_n(&of_rank[r], __ATOMIC_ACQUIRE) < number) return 0;
    return 1;
}

static void count(Communicator *communicator, Counter counter, int64_t number) {
    __atomic_store_n(&communicator->shared->counters[counter][communicator->rank], number, __ATOMIC_RELEASE);
}

static void advance(void) { /* finish the collectives that every rank has launched */
    for (int slot = 0; slot < MAX_COMMUNICATORS; slot++) {
        Communicator *communicator = communicators[slot];
        while (communicator && communicator->finished < communicator->launched &&
               all_have(communicator, LAUNCHED, communicator->finished + 1)) {
            size_t place = ++communicator->finished % AT_ONCE;
            Collective *c = &communicator->collectives[place];
            if (c->result_bytes) deliver(communicator, c, communicator->shared->payloads[place]);
            count(communicator, FINISHED, communicator->finished);
            finished.of[slot]++;
        }
    }
}

/* Without the mutex: wait until every rank's counter has come so far. */
static int wait_for_ranks(Communicator *communicator, Counter counter, int64_t number) {
    for (;; nap()) {
        pthread_mutex_lock(&mutex);
        advance();
        int aborted = !communicator->shared, come = !aborted && all_have(communicator, counter, number);
        pthread_mutex_unlock(&mutex);
        if (aborted) return refuse(INTERNAL_ERROR, "the communicator was aborted");
        if (come) return DONE;
        if (status()) return cuda_failure(status());
    }
}

/* ---- what the other files ask ---- */

void nccl_add(Tickets *to, const Tickets *more) {
    if (!nccl_in_use) return;
    for (int slot = 0; slot < MAX_COMMUNICATORS; slot++)
        if (to->of[slot] < more->of[slot]) to->of[slot] = more->of[slot];
}

int nccl_are_done(const Tickets *tickets) {
    if (!nccl_in_use) return 1;
    int done = 1;
    pthread_mutex_lock(&mutex);
    advance();
    for (int slot = 0; slot < MAX_COMMUNICATORS; slot++) done &= tickets->of[slot] <= finished.of[slot];
    pthread_mutex_unlock(&mutex);
    return done;
}

int nccl_wait(const Tickets *tickets) {
    while (!nccl_are_done(tickets)) {
        if (status()) return status(); /* a fault ends the waiting */
        nap();
    }
    return 0;
}

int nccl_wait_for_device(int device) {
    if (!nccl_in_use) return 0;
    Tickets of_device = {0};
    pthread_mutex_lock(&mutex);
    for (int slot = 0; slot < MAX_COMMUNICATORS; slot++)
        if (communicators[slot] && communicators[slot]->device == device) of_device.of[slot] = launched.of[slot];
    pthread_mutex_unlock(&mutex);
    return nccl_wait(&of_device);
}

static int will_be_written(const void *address, size_t size) {
    for (int slot = 0; slot < MAX_COMMUNICATORS; slot++) {
        Communicator *communicator = communicators[slot];
        for (int64_t i = communicator ? communicator->finished + 1 : 1; communicator && i <= communicator->launched; i++) {
            Collective *c = &communicator->collectives[i % AT_ONCE];
            if (c->result_bytes && (char *)address < (char *)c->to + c->result_bytes && (char *)c->to < (char *)address + size)
                return 1;
        }
    }
    return 0;
}

int nccl_wait_for_data(const void *address, size_t size) {
    for (; nccl_in_use; nap()) {
        pthread_mutex_lock(&mutex);
        advance();
        int awaited = will_be_written(address, size);
        pthread_mutex_unlock(&mutex);
        if (!awaited) break;
        if (status()) return status();
    }
    return 0;
}

/* ---- communicators ---- */

static void forget_in_child(void) { /* after a fork, in a process that has no part in the parent's collectives */
    pthread_mutex_init(&mutex, 0);
    for (int slot = 0; slot < MAX_COMMUNICATORS; slot++) {
        if (communicators[slot]) communicators[slot]->shared = 0;
        communicators[slot] = 0;
    }
    nccl_in_use = 0;
}

static int make_meeting(Meeting *meeting) {
    int fd = memfd_create("cudastub-nccl", MFD_CLOEXEC);
    *meeting = (Meeting){getpid(), fd};
    if (getrandom(&meeting->number, sizeof meeting->number, 0) != sizeof meeting->number || ftruncate(fd, sizeof(Shared)) ||
        pwrite(fd, &meeting->number, sizeof meeting->number, offsetof(Shared, number)) != sizeof meeting->number)
        return refuse(SYSTEM_ERROR, "no shared memory can be made");
    return DONE;
}

static Shared *map_meeting(const Meeting *meeting) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%d/fd/%d", meeting->pid, meeting->fd);
    int fd = open(path, O_RDWR | O_CLOEXEC);
    Shared *mapped = fd < 0 ? MAP_FAILED : mmap(0, sizeof *mapped, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (fd >= 0) close(fd);
    if (mapped == MAP_FAILED) return 0;
    if (mapped->number == meeting->number) return mapped;
    munmap(mapped, sizeof *mapped); /* that of a process which has the pid of one that ended */
    return 0;
}

static int enter(Communicator **made, const Meeting *meeting, int ranks, int rank, int device) {
    static int watching_forks;
    *made = 0;
    if (ranks < 1 || ranks > MAX_RANKS || rank < 0 || rank >= ranks) return refuse(INVALID_ARGUMENT, "at most 16 ranks");
    Shared *shared = map_meeting(meeting);
    if (!shared) return refuse(SYSTEM_ERROR, "the process of the first rank has ended");
    Communicator *communicator = calloc(1, sizeof *communicator);
    communicator->shared = shared, communicator->ranks = ranks, communicator->rank = rank, communicator->device = device;
    pthread_mutex_lock(&mutex);
    while (communicator->slot < MAX_COMMUNICATORS && communicators[communicator->slot]) communicator->slot++;
    int fits = communicator->slot < MAX_COMMUNICATORS;
    if (fits) {
        communicators[communicator->slot] = *made = communicator;
        count(communicator, JOINED, 1);
        nccl_in_use = 1;
        if (!watching_forks++) pthread_atfork(0, 0, forget_in_child);
    }
    pthread_mutex_unlock(&mutex);
    log_line("NCCL: rank %d of %d on %d", rank, ranks, device);
    return fits ? DONE : refuse(INTERNAL_ERROR, "too many communicators in this process");
}

static int join(Communicator **made, const Meeting *meeting, int ranks, int rank) {
    int error = enter(made, meeting, ranks, rank, current_device);
    if (!error) error = wait_for_ranks(*made, JOINED, 1);
    if (meeting->pid == getpid()) close(meeting->fd); /* all have mapped it */
    return error;
}

static int leave(Communicator *communicator) { /* what it has not done is dropped */
    if (!communicator) return INVALID_ARGUMENT;
    pthread_mutex_lock(&mutex);
    Shared *shared = communicator->shared;
    int64_t charged_bytes = shared ? communicator->charged_bytes : 0;
    if (shared) {
        communicator->shared = 0, communicators[communicator->slot] = 0;
        finished.of[communicator->slot] = launched.of[communicator->slot];
        munmap(shared, sizeof *shared);
    }
    pthread_mutex_unlock(&mutex);
    if (charged_bytes) {
        lock();
        refund(communicator->device, charged_bytes);
        unlock();
    }
    return DONE;
}

EXPORT int ncclGetVersion(int *version) {
    *version = 23007;
    return DONE;
}
EXPORT int ncclGetUniqueId(UniqueId *id) {
    memset(id, 0, sizeof *id);
    return make_meeting(&id->meeting);
}
EXPORT int ncclCommInitRank(Communicator **made, int ranks, UniqueId id, int rank) {
    return join(made, &id.meeting, ranks, rank);
}
EXPORT int ncclCommInitRankConfig(Communicator **made, int ranks, UniqueId id, int rank, void *config) {
    return join(made, &id.meeting, ranks, rank);
}
EXPORT int ncclCommInitRankScalable(Communicator **made, int ranks, int rank, int ids, UniqueId *id, void *config) {
    return join(made, &id->meeting, ranks, rank);
}
EXPORT int ncclCommInitAll(Communicator **made, int ranks, const int *devices) { /* all ranks in this process */
    Meeting meeting;
    int error = make_meeting(&meeting);
    for (int r = 0; r < ranks && !error; r++) error = enter(&made[r], &meeting, ranks, r, devices ? devices[r] : r);
    close(meeting.fd);
    return error;
}

/* Each rank makes the shared memory of a communicator and says where; those of a color meet at that of the first of them. */
EXPORT int ncclCommSplit(Communicator *parent, int color, int key, Communicator **made, void *config) {
    Meeting own, chosen;
    *made = 0;
    if (!parent || parent->splits == MAX_SPLITS) return refuse(INVALID_ARGUMENT, "no communicator, or too often split");
    int error = make_meeting(&own), ranks = 0, rank = 0, first = -1;
    if (error) return error;
    int64_t number = parent->splits++;
    pthread_mutex_lock(&mutex);
    if (parent->shared) {
        parent->shared->splits[number][parent->rank].color = color;
        parent->shared->splits[number][parent->rank].key = key;
        parent->shared->splits[number][parent->rank].meeting = own;
        count(parent, SPLIT, number + 1);
    }
    pthread_mutex_unlock(&mutex);
    error = wait_for_ranks(parent, SPLIT, number + 1);
    pthread_mutex_lock(&mutex);
    for (int r = 0; parent->shared && r < parent->ranks; r++) {
        int its_key = parent->shared->splits[number][r].key;
        if (parent->shared->splits[number][r].color != color) continue;
        ranks++, rank += its_key < key || (its_key == key && r < parent->rank);
        if (first < 0) first = r;
    }
    if (parent->shared && !error) chosen = parent->shared->splits[number][first].meeting;
    else error = INTERNAL_ERROR;
    pthread_mutex_unlock(&mutex);
    if (!error && color >= 0) error = join(made, &chosen, ranks, rank);
    if (error || color < 0 || first != parent->rank) close(own.fd);
    return error;
}

EXPORT int ncclCommAbort(Communicator *communicator) { return leave(communicator); }
EXPORT int ncclCommDestroy(Communicator *communicator) { return leave(communicator); }
EXPORT int ncclCommFinalize(Communicator *communicator) {
    return communicator ? wait_for_ranks(communicator, LAUNCHED, communicator->launched) : INVALID_ARGUMENT;
}
EXPORT int ncclCommCount(const Communicator *communicator, int *ranks) {
    *ranks = communicator->ranks;
    return DONE;
}
EXPORT int ncclCommUserRank(const Communicator *communicator, int *rank) {
    *rank = communicator->rank;
    return DONE;
}
EXPORT int ncclCommGetAsyncError(Communicator *communicator, int *error) {
    *error = DONE;
    return DONE;
}
EXPORT const char *ncclGetLastError(Communicator *communicator) { return last_error; }
EXPORT const char *ncclGetErrorString(int error) {
    static const char *const texts[] = {
        "no error", "unhandled cuda error (run with NCCL_DEBUG=INFO for details)",
        "unhandled system error (run with NCCL_DEBUG=INFO for details)",
        "internal error - please report this issue to the NCCL developers",
        "invalid argument (run with NCCL_DEBUG=WARN for details)",
    };
    return error >= 0 && error <= INVALID_ARGUMENT ? texts[error] : "unknown result code";
}

/* ---- collectives ---- */

static int take_memory(Communicator *communicator) { /* CUDASTUB_NCCL, at its first collective */
    if (!settings.nccl_bytes || communicator->charged_bytes) return 0;
    lock();
    int error = charge(communicator->device, settings.nccl_bytes);
    unlock();
    if (!error) communicator->charged_bytes = settings.nccl_bytes;
    log_line("NCCL takes %ld on %d: %s", (long)settings.nccl_bytes, communicator->device, error_text(error));
    return error;
}

static int launch(Communicator *communicator, Collective c, cudaStream_t stream) {
    if (!communicator || c.type < 0 || c.type >= TYPES) return refuse(INVALID_ARGUMENT, "no communicator, or no such type");
    if (c.bytes > SMALL || (is_reduced(c.kind) && !can_reduce(c.type))) c.bytes = c.result_bytes = 0;
    int error = fault_of(LAUNCH);
    if (!error) error = take_memory(communicator);
    if (!error && c.from && c.bytes) error = nccl_wait_for_data(c.from, c.bytes); /* it is another one's result */
    if (error) return cuda_failure(error);
    error = wait_for_ranks(communicator, FINISHED, communicator->launched + 1 - (int64_t)AT_ONCE);
    if (error) return error;
    pthread_mutex_lock(&mutex);
    if (communicator->shared) {
        int64_t number = ++communicator->launched;
        communicator->collectives[number % AT_ONCE] = c;
        if (c.from && c.bytes) memcpy(communicator->shared->payloads[number % AT_ONCE][communicator->rank], c.from, c.bytes);
        count(communicator, LAUNCHED, number);
        tickets_of(stream)->of[communicator->slot] = ++launched.of[communicator->slot];
    }
    pthread_mutex_unlock(&mutex);
    return DONE;
}

static size_t bytes_of(size_t count, int type) { return type >= 0 && type < TYPES ? count * item_bytes[type] : 0; }

EXPORT int ncclAllReduce(const void *from, void *to, size_t count, int type, int operation, Communicator *communicator,
                         cudaStream_t stream) {
    size_t bytes = bytes_of(count, type);
    return launch(communicator, (Collective){ALL_REDUCE, type, operation, 0, from, to, bytes, bytes}, stream);
}
EXPORT int ncclBroadcast(const void *from, void *to, size_t count, int type, int root, Communicator *communicator,
                         cudaStream_t stream) {
    size_t bytes = bytes_of(count, type);
    const void *sent = communicator && communicator->rank == root ? from : 0;
    return launch(communicator, (Collective){BROADCAST, type, 0, root, sent, to, bytes, bytes}, stream);
}
EXPORT int ncclBcast(void *data, size_t count, int type, int root, Communicator *communicator, cudaStream_t stream) {
    return ncclBroadcast(data, data, count, type, root, communicator, stream);
}
EXPORT int ncclReduce(const void *from, void *to, size_t count, int type, int operation, int root, Communicator *communicator,
                      cudaStream_t stream) {
    size_t bytes = bytes_of(count, type), result_bytes = communicator && communicator->rank == root ? bytes : 0;
    return launch(communicator, (Collective){REDUCE, type, operation, root, from, to, bytes, result_bytes}, stream);
}
EXPORT int ncclAllGather(const void *from, void *to, size_t count, int type, Communicator *communicator, cudaStream_t stream) {
    size_t bytes = bytes_of(count, type), result_bytes = communicator ? bytes * communicator->ranks : 0;
    return launch(communicator, (Collective){ALL_GATHER, type, 0, 0, from, to, bytes, result_bytes}, stream);
}
EXPORT int ncclReduceScatter(const void *from, void *to, size_t count, int type, int operation, Communicator *communicator,
                             cudaStream_t stream) {
    size_t result_bytes = bytes_of(count, type), bytes = communicator ? result_bytes * communicator->ranks : 0;
    return launch(communicator, (Collective){REDUCE_SCATTER, type, operation, 0, from, to, bytes, result_bytes}, stream);
}
EXPORT int ncclAlltoAll(const void *from, void *to, size_t count, int type, Communicator *communicator, cudaStream_t stream) {
    size_t bytes = communicator ? bytes_of(count, type) * communicator->ranks : 0;
    return launch(communicator, (Collective){ALL_TO_ALL, type, 0, 0, from, to, bytes, bytes}, stream);
}

EXPORT int ncclRedOpCreatePreMulSum(int *operation, void *factor, int type, int where, Communicator *communicator) {
    *operation = MULTIPLIED_SUM; /* a sum here: the factor, which a kernel may have computed, is not read */
    return DONE;
}
EXPORT int ncclMemAlloc(void **address, size_t size) {
    int error = cudaMalloc(address, size);
    return error ? cuda_failure(error) : DONE;
}
EXPORT int ncclMemFree(void *address) {
    int error = cudaFree(address);
    return error ? cuda_failure(error) : DONE;
}
