/* Faults that a test requests, and the names and texts of errors. */
#include "bed.h"

static const char *call_names[CALLS] = {"launch", "sync", "malloc", "memcpy"};
static long calls_made[CALLS];
static struct { int call; long number; int error; } fault; /* the call with this number returns this error */
static volatile int poisoned;
static __thread int last_error;

static void plan_fault(const char *call_name, long number, int error) {
    fault.error = 0;
    for (int call = 0; call < CALLS; call++)
        if (!strcmp(call_name, call_names[call])) fault.call = call, fault.number = number, fault.error = error;
}

void ask_for_fault(const char *text) {
    char call_name[16] = "";
    long number = 0;
    int error = 0;
    if (text) sscanf(text, "%15[a-z]:%ld:%d", call_name, &number, &error);
    memset(calls_made, 0, sizeof calls_made);
    plan_fault(call_name, number, error);
    poisoned = last_error = 0;
}

/* Called by tests through ctypes: the call `in_calls` from now fails. An error of 0 heals the process. */
EXPORT void cudastub_fail(const char *call_name, long in_calls, int error) {
    for (int call = 0; call < CALLS; call++)
        if (!strcmp(call_name, call_names[call])) plan_fault(call_name, calls_made[call] + in_calls, error);
    if (!error) fault.error = poisoned = 0;
}

int fault_of(Call call) {
    long number = __atomic_add_fetch(&calls_made[call], 1, __ATOMIC_RELAXED);
    if (!poisoned && fault.error && fault.call == (int)call && fault.number == number) {
        log_line("%s %ld fails with %d", call_names[call], number, fault.error);
        if (fault.error == cudaErrorMemoryAllocation) return fail_with(fault.error); /* the only error that leaves a process healthy */
        poisoned = fault.error;
    }
    return status();
}

void poison(int error) { poisoned = error; }
int fail_with(int error) { return last_error = error; }
int status(void) { return poisoned ? fail_with(poisoned) : 0; }

/* Called by the functions that build.py generates: all that no file of the bed defines. */
EXPORT int cudastub_missing(const char *name, int is_cuda) {
    log_line("%s: nothing done", name);
    return is_cuda ? status() : 0;
}

EXPORT cudaError_t cudaPeekAtLastError(void) { return poisoned ? poisoned : last_error; }
EXPORT cudaError_t cudaGetLastError(void) {
    int error = cudaPeekAtLastError();
    last_error = 0;
    return error;
}

static const struct { int code; const char *name, *text; } texts[] = {
    {0, "cudaSuccess", "no error"},
    {1, "cudaErrorInvalidValue", "invalid argument"},
    {2, "cudaErrorMemoryAllocation", "out of memory"},
    {3, "cudaErrorInitializationError", "initialization error"},
    {4, "cudaErrorCudartUnloading", "driver shutting down"},
    {46, "cudaErrorDevicesUnavailable", "CUDA-capable device(s) is/are busy or unavailable"},
    {100, "cudaErrorNoDevice", "no CUDA-capable device is detected"},
    {101, "cudaErrorInvalidDevice", "invalid device ordinal"},
    {214, "cudaErrorECCUncorrectable", "uncorrectable ECC error encountered"},
    {600, "cudaErrorNotReady", "device not ready"},
    {700, "cudaErrorIllegalAddress", "an illegal memory access was encountered"},
    {701, "cudaErrorLaunchOutOfResources", "too many resources requested for launch"},
    {702, "cudaErrorLaunchTimeout", "the launch timed out and was terminated"},
    {704, "cudaErrorPeerAccessAlreadyEnabled", "peer access is already enabled"},
    {710, "cudaErrorAssert", "device-side assert triggered"},
    {716, "cudaErrorMisalignedAddress", "misaligned address"},
    {719, "cudaErrorLaunchFailure", "unspecified launch failure"},
    {801, "cudaErrorNotSupported", "operation not supported"},
};

const char *error_text(int error) {
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i].code == error) return texts[i].text;
    return "unknown error";
}

const char *error_name(int error) {
    for (size_t i = 0; i < sizeof texts / sizeof *texts; i++)
        if (texts[i].code == error) return texts[i].name;
    return "cudaErrorUnknown";
}

EXPORT const char *cudaGetErrorString(cudaError_t error) { return error_text(error); }
EXPORT const char *cudaGetErrorName(cudaError_t error) { return error_name(error); }
EXPORT CUresult cuGetErrorString(CUresult error, const char **text) {
    *text = error_text(error);
    return 0;
}
EXPORT CUresult cuGetErrorName(CUresult error, const char **name) {
    *name = error_name(error);
    return 0;
}
