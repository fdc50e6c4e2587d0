/* The driver: virtual memory, which expandable segments use, and the few other calls that torch makes. */
#include "bed.h"

static CUcontext context_of(int device) { return (CUcontext)(uintptr_t)(16 + device); }

EXPORT CUresult cuInit(unsigned flags) { return 0; }
EXPORT CUresult cuDriverGetVersion(int *version) {
    *version = CUDA_VERSION;
    return 0;
}
EXPORT CUresult cuDeviceGet(CUdevice *device, int number) {
    *device = number;
    return 0;
}
EXPORT CUresult cuDeviceGetCount(int *count) { return (CUresult)cudaGetDeviceCount(count); }
EXPORT CUresult cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device) {
    return (CUresult)cudaDeviceGetAttribute(value, (int)attribute, device);
}
EXPORT CUresult cuDevicePrimaryCtxGetState(CUdevice device, unsigned *flags, int *active) {
    *flags = 0, *active = has_context(device);
    return 0;
}
EXPORT CUresult cuDevicePrimaryCtxRetain(CUcontext *context, CUdevice device) {
    *context = context_of(device);
    return 0;
}
EXPORT CUresult cuCtxGetCurrent(CUcontext *context) {
    *context = has_context(current_device) ? context_of(current_device) : 0;
    return 0;
}
EXPORT CUresult cuCtxSetCurrent(CUcontext context) { return 0; }
EXPORT CUresult cuCtxGetDevice(CUdevice *device) {
    *device = current_device;
    return 0;
}

/* ---- virtual memory: reserve addresses, create memory, and map one to the other ---- */

EXPORT CUresult cuMemGetAllocationGranularity(size_t *bytes, const CUmemAllocationProp *properties,
                                              CUmemAllocationGranularity_flags flags) {
    *bytes = DRIVER_PAGE;
    return 0;
}
EXPORT CUresult cuMemAddressReserve(CUdeviceptr *address, size_t size, size_t alignment, CUdeviceptr wanted,
                                    unsigned long long flags) {
    *address = (CUdeviceptr)map_pages(size);
    return *address ? 0 : CUDA_ERROR_OUT_OF_MEMORY;
}
EXPORT CUresult cuMemAddressFree(CUdeviceptr address, size_t size) {
    unmap_pages((void *)address, size);
    return 0;
}

typedef struct { size_t size; int device; } Physical;

EXPORT CUresult cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *properties,
                            unsigned long long flags) {
    RETURN_IF_FAULTY(MALLOC);
    int device = properties ? properties->location.id : current_device;
    lock();
    int error = charge(device, size);
    unlock();
    log_line("create %zu on %d: %s", size, device, error_text(error));
    if (error) return CUDA_ERROR_OUT_OF_MEMORY;
    Physical *made = malloc(sizeof *made);
    *made = (Physical){size, device};
    *handle = (CUmemGenericAllocationHandle)made;
    return 0;
}
EXPORT CUresult cuMemRelease(CUmemGenericAllocationHandle handle) {
    Physical *memory = (Physical *)handle;
    lock();
    refund(memory->device, memory->size);
    unlock();
    free(memory);
    return status();
}
EXPORT CUresult cuMemMap(CUdeviceptr address, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
                         unsigned long long flags) {
    lock();
    add_block((void *)address, size, 0, ((Physical *)handle)->device, ON_DEVICE);
    unlock();
    return status();
}
EXPORT CUresult cuMemUnmap(CUdeviceptr address, size_t size) {
    lock();
    for (CUdeviceptr at = address; at < address + size;) {
        Block block = remove_block((void *)at);
        at += block.address ? block.size : DRIVER_PAGE;
    }
    madvise((void *)address, size, MADV_DONTNEED);
    unlock();
    return status();
}
EXPORT CUresult cuMemSetAccess(CUdeviceptr address, size_t size, const CUmemAccessDesc *access, size_t count) {
    return status();
}

EXPORT CUresult cuMemGetAddressRange_v2(CUdeviceptr *begin, size_t *size, CUdeviceptr address) {
    lock();
    Block *found = block_at((void *)address), block = found ? *found : (Block){0};
    unlock();
    if (begin) *begin = block.address;
    if (size) *size = block.size;
    return found ? 0 : CUDA_ERROR_INVALID_VALUE;
}
EXPORT CUresult cuPointerGetAttribute(void *value, CUpointer_attribute attribute, CUdeviceptr address) {
    lock();
    Block *found = block_at((void *)address), block = found ? *found : (Block){0};
    unlock();
    if (!found) return CUDA_ERROR_INVALID_VALUE;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT: *(CUcontext *)value = context_of(block.device); return 0;
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        *(int *)value = block.place == ON_HOST ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE;
        return 0;
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL: *(int *)value = block.device; return 0;
    default: return CUDA_ERROR_INVALID_VALUE;
    }
}

/* ---- torch looks the driver's functions up by name, through the runtime; up to 2.7 itself ---- */

EXPORT cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned version,
                                                    unsigned long long flags, enum cudaDriverEntryPointQueryResult *found) {
    void *library = dlopen("libcuda.so.1", RTLD_LAZY | RTLD_NOLOAD);
    char second_version[128];
    snprintf(second_version, sizeof second_version, "%s_v2", name);
    *function = dlsym(library, name);
    if (!*function) *function = dlsym(library, second_version);
    if (found) *found = *function ? cudaDriverEntryPointSuccess : cudaDriverEntryPointSymbolNotFound;
    return 0;
}
#if CUDART_VERSION < 13000
EXPORT cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                           enum cudaDriverEntryPointQueryResult *found) {
    return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, found);
}
#endif
