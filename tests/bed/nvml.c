/* NVML: what nvidia-smi shows. The runtime has no header of it, so the few types and codes are defined here.
 * It shows all cards: it does not read CUDA_VISIBLE_DEVICES. */
#include "bed.h"

#define NOT_FOUND 6
#define INSUFFICIENT_SIZE 7

typedef struct { unsigned pid; unsigned long long used_bytes; unsigned gpu_instance, compute_instance; } ProcessInfo;

static void *handle_of(int card) { return (void *)(uintptr_t)(16 + card); }
static int card_of(void *handle) { return (int)(uintptr_t)handle - 16; }

EXPORT int nvmlInit(void) { return 0; }
EXPORT int nvmlInit_v2(void) { return 0; }
EXPORT int nvmlInitWithFlags(unsigned flags) { return 0; }
EXPORT int nvmlShutdown(void) { return 0; }
EXPORT const char *nvmlErrorString(int error) {
    return error == INSUFFICIENT_SIZE ? "Insufficient Size" : error == NOT_FOUND ? "Not Found" : "Unknown Error";
}
EXPORT int nvmlSystemGetDriverVersion(char *into, unsigned room) {
    snprintf(into, room, "580.00");
    return 0;
}
EXPORT int nvmlSystemGetCudaDriverVersion_v2(int *version) { return cudaDriverGetVersion(version); }
EXPORT int nvmlSystemGetProcessName(unsigned pid, char *into, unsigned room) {
    char path[64];
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "r");
    if (!file) return NOT_FOUND;
    into[fread(into, 1, room - 1, file)] = 0;
    fclose(file);
    return 0;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *count) {
    *count = settings.cards;
    return 0;
}
EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned card, void **handle) {
    *handle = handle_of(card);
    return card < (unsigned)settings.cards ? 0 : NOT_FOUND;
}
EXPORT int nvmlDeviceGetHandleByPciBusId_v2(const char *id, void **handle) {
    unsigned domain, bus;
    if (sscanf(id, "%x:%x", &domain, &bus) != 2) return NOT_FOUND;
    return nvmlDeviceGetHandleByIndex_v2(bus - 1, handle);
}
EXPORT int nvmlDeviceGetUUID(void *handle, char *into, unsigned room) { /* the UUID of device.c as text */
    char bytes[16];
    uuid_of(card_of(handle), bytes);
    unsigned end = snprintf(into, room, "GPU-");
    for (int i = 0; i < 16 && end < room; i++) {
        const char *dash = i == 4 || i == 6 || i == 8 || i == 10 ? "-" : "";
        end += snprintf(into + end, room - end, "%s%02x", dash, (unsigned char)bytes[i]);
    }
    return 0;
}
EXPORT int nvmlDeviceGetHandleByUUID(const char *uuid, void **handle) {
    char text[64];
    for (int card = 0; card < settings.cards; card++) {
        *handle = handle_of(card);
        nvmlDeviceGetUUID(*handle, text, sizeof text);
        if (!strcmp(text, uuid)) return 0;
    }
    return NOT_FOUND;
}
EXPORT int nvmlDeviceGetIndex(void *handle, unsigned *card) {
    *card = card_of(handle);
    return 0;
}
EXPORT int nvmlDeviceGetName(void *handle, char *into, unsigned room) {
    snprintf(into, room, "Stub GPU");
    return 0;
}

EXPORT int nvmlDeviceGetMemoryInfo(void *handle, unsigned long long *total_free_used) {
    int card = card_of(handle);
    lock();
    int64_t total = settings.capacity_bytes[card], used = held_by_others(card) + held_by_this_process(card);
    unlock();
    total_free_used[0] = total, total_free_used[1] = total - used, total_free_used[2] = used;
    return 0;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *handle, unsigned *count, ProcessInfo *into) {
    Process found[256];
    lock();
    unsigned there = list_processes(card_of(handle), found, 256), room = into ? *count : 0;
    unlock();
    for (unsigned i = 0; i < there && i < room; i++)
        into[i] = (ProcessInfo){found[i].pid, found[i].held_bytes[card_of(handle)], ~0u, ~0u};
    *count = there;
    return there > room ? INSUFFICIENT_SIZE : 0;
}
EXPORT int nvmlDeviceGetComputeRunningProcesses_v2(void *handle, unsigned *count, ProcessInfo *into) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, into);
}
EXPORT int nvmlDeviceGetComputeRunningProcesses(void *handle, unsigned *count, ProcessInfo *into) {
    return nvmlDeviceGetComputeRunningProcesses_v3(handle, count, into);
}
EXPORT int nvmlDeviceGetGraphicsRunningProcesses_v3(void *handle, unsigned *count, ProcessInfo *into) {
    *count = 0;
    return 0;
}
EXPORT int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *handle, unsigned *count, ProcessInfo *into) {
    *count = 0;
    return 0;
}
