/* The devices: their number, the current one, and their properties. */
#include "bed.h"

__thread int current_device;

EXPORT cudaError_t cudaGetDeviceCount(int *count) {
    if (!was_used()) read_visible_devices();
    note_use();
    *count = settings.devices;
    return *count ? cudaSuccess : fail_with(cudaErrorNoDevice);
}

/* These two succeed in a poisoned process too: torch calls them while it reports the error. */
EXPORT cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return 0;
}
EXPORT cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= settings.devices) return fail_with(cudaErrorInvalidDevice);
    int error = make_context(device);
    current_device = device;
    return error ? fail_with(error) : 0;
}

EXPORT cudaError_t cudaDriverGetVersion(int *version) {
    *version = CUDART_VERSION;
    return 0;
}
EXPORT cudaError_t cudaRuntimeGetVersion(int *version) { return cudaDriverGetVersion(version); }

void uuid_of(int card, char *bytes) {
    memcpy(bytes, "cudastub-device", 15);
    bytes[15] = (char)card;
}

EXPORT cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *p, int device) {
    if (device < 0 || device >= settings.devices) return fail_with(cudaErrorInvalidDevice);
    int card = settings.card_of[device];
    memset(p, 0, sizeof *p);
    snprintf(p->name, sizeof p->name, "Stub GPU");
    uuid_of(card, p->uuid.bytes);
    p->totalGlobalMem = settings.capacity_bytes[card];
    p->major = settings.major, p->minor = settings.minor;
    p->multiProcessorCount = settings.multiprocessors, p->maxThreadsPerMultiProcessor = settings.threads_each;
    p->pciBusID = card + 1;
    p->maxThreadsPerBlock = p->maxThreadsDim[0] = p->maxThreadsDim[1] = 1024, p->maxThreadsDim[2] = 64;
    p->maxGridSize[0] = p->memPitch = 0x7fffffff, p->maxGridSize[1] = p->maxGridSize[2] = 65535;
    p->warpSize = p->maxBlocksPerMultiProcessor = 32;
    p->regsPerBlock = p->regsPerMultiprocessor = p->totalConstMem = 65536;
    p->sharedMemPerBlock = 49152, p->sharedMemPerBlockOptin = 166912, p->sharedMemPerMultiprocessor = 167936;
    p->reservedSharedMemPerBlock = 1024, p->l2CacheSize = 40 << 20;
    p->textureAlignment = 512, p->memoryBusWidth = 5120, p->asyncEngineCount = 3;
    p->canMapHostMemory = p->concurrentKernels = p->unifiedAddressing = p->managedMemory = p->cooperativeLaunch = 1;
    p->streamPrioritiesSupported = p->memoryPoolsSupported = p->hostRegisterSupported = 1;
    return 0;
}

EXPORT cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device) {
    struct cudaDeviceProp p;
    int error = cudaGetDeviceProperties(&p, device);
    if (error) return error;
    switch ((int)attribute) {
    case cudaDevAttrMaxThreadsPerBlock: case cudaDevAttrMaxBlockDimX: case cudaDevAttrMaxBlockDimY: *value = 1024; break;
    case cudaDevAttrMaxBlockDimZ: *value = p.maxThreadsDim[2]; break;
    case cudaDevAttrMaxGridDimX: *value = p.maxGridSize[0]; break;
    case cudaDevAttrMaxGridDimY: case cudaDevAttrMaxGridDimZ: *value = p.maxGridSize[1]; break;
    case cudaDevAttrMaxSharedMemoryPerBlock: *value = p.sharedMemPerBlock; break;
    case cudaDevAttrMaxSharedMemoryPerMultiprocessor: *value = p.sharedMemPerMultiprocessor; break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin: *value = p.sharedMemPerBlockOptin; break;
    case cudaDevAttrReservedSharedMemoryPerBlock: *value = p.reservedSharedMemPerBlock; break;
    case cudaDevAttrWarpSize: *value = p.warpSize; break;
    case cudaDevAttrMaxRegistersPerBlock: case cudaDevAttrMaxRegistersPerMultiprocessor: *value = p.regsPerBlock; break;
    case cudaDevAttrClockRate: case cudaDevAttrMemoryClockRate: *value = 1410000; break;
    case cudaDevAttrMultiProcessorCount: *value = p.multiProcessorCount; break;
    case cudaDevAttrMaxThreadsPerMultiProcessor: *value = p.maxThreadsPerMultiProcessor; break;
    case cudaDevAttrMaxBlocksPerMultiprocessor: *value = p.maxBlocksPerMultiProcessor; break;
    case cudaDevAttrComputeCapabilityMajor: *value = p.major; break;
    case cudaDevAttrComputeCapabilityMinor: *value = p.minor; break;
    case cudaDevAttrL2CacheSize: *value = p.l2CacheSize; break;
    case cudaDevAttrGlobalMemoryBusWidth: *value = p.memoryBusWidth; break;
    case cudaDevAttrPciBusId: *value = p.pciBusID; break;
    case cudaDevAttrPciDeviceId: case cudaDevAttrPciDomainId:
    case cudaDevAttrIntegrated: case cudaDevAttrComputeMode: case cudaDevAttrEccEnabled:
    case CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED: case CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED:
    case CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED: *value = 0; break;
    default: *value = 1; /* "is this supported?" */
    }
    return 0;
}

EXPORT cudaError_t cudaDeviceGetPCIBusId(char *into, int room, int device) {
    snprintf(into, room, "0000:%02x:00.0", settings.card_of[device] + 1);
    return 0;
}
EXPORT cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer) {
    *can = device != peer;
    return 0;
}
EXPORT cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest) {
    *least = 0, *greatest = -5;
    return 0;
}
EXPORT cudaError_t cudaDeviceSynchronize(void) {
    RETURN_IF_FAULTY(SYNC);
    return nccl_wait_for_device(current_device);
}

EXPORT cudaError_t cudaMemGetInfo(size_t *free_bytes, size_t *total_bytes) {
    int error = make_context(current_device), card = settings.card_of[current_device];
    lock();
    int64_t total = settings.capacity_bytes[card];
    int64_t left = total - held_by_others(card) - held_by_this_process(card);
    unlock();
    *total_bytes = total, *free_bytes = left < 0 ? 0 : left;
    return error ? fail_with(error) : status();
}
