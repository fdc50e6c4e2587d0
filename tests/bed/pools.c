/* The memory pool of each device for cudaMallocAsync (PYTORCH_ALLOC_CONF=backend:cudaMallocAsync). */
#include "bed.h"

#define POOL_STEP (32ul << 20) /* a pool grows in steps of 32 MiB if there is room, otherwise by the bytes needed */

typedef struct {
    int device;
    size_t used_bytes, reserved_bytes, most_used_bytes, most_reserved_bytes;
    uint64_t release_threshold;
} Pool;
static Pool pools[MAX_DEVICES];

void reset_pools(void) {
    memset(pools, 0, sizeof pools);
    for (int device = 0; device < MAX_DEVICES; device++) pools[device].device = device;
}

EXPORT cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device) {
    *pool = (cudaMemPool_t)&pools[device];
    return status();
}

static int grow(Pool *pool, size_t needed_bytes) {
    size_t steps[] = {ROUND_UP(needed_bytes, POOL_STEP), ROUND_UP(needed_bytes, DRIVER_PAGE)};
    for (int i = 0; i < 2; i++)
        if (!charge(pool->device, steps[i])) {
            pool->reserved_bytes += steps[i];
            return 0;
        }
    return cudaErrorMemoryAllocation;
}

EXPORT cudaError_t cudaMallocFromPoolAsync(void **address, size_t size, cudaMemPool_t handle, cudaStream_t stream) {
    RETURN_IF_FAULTY(MALLOC);
    Pool *pool = (Pool *)handle;
    size_t charged_bytes = ROUND_UP(size, 512), used_bytes = pool->used_bytes + charged_bytes;
    lock();
    int error = used_bytes > pool->reserved_bytes ? grow(pool, used_bytes - pool->reserved_bytes) : 0;
    *address = error ? 0 : map_pages(size);
    if (*address) {
        add_block(*address, size, charged_bytes, pool->device, ON_DEVICE);
        pool->used_bytes = used_bytes;
        if (used_bytes > pool->most_used_bytes) pool->most_used_bytes = used_bytes;
        if (pool->reserved_bytes > pool->most_reserved_bytes) pool->most_reserved_bytes = pool->reserved_bytes;
    }
    unlock();
    log_line("mallocAsync %zu on %d: %s", size, pool->device, error_text(error));
    return error ? fail_with(error) : 0;
}
EXPORT cudaError_t cudaMallocAsync(void **address, size_t size, cudaStream_t stream) {
    return cudaMallocFromPoolAsync(address, size, (cudaMemPool_t)&pools[current_device], stream);
}

EXPORT cudaError_t cudaFreeAsync(void *address, cudaStream_t stream) {
    lock();
    Block block = remove_block(address);
    if (block.address) {
        pools[block.device].used_bytes -= block.charged_bytes;
        unmap_pages(address, block.size);
    }
    unlock();
    return status();
}

EXPORT cudaError_t cudaMemPoolTrimTo(cudaMemPool_t handle, size_t keep_bytes) {
    Pool *pool = (Pool *)handle;
    lock();
    size_t left = ROUND_UP(pool->used_bytes > keep_bytes ? pool->used_bytes : keep_bytes, DRIVER_PAGE);
    if (left < pool->reserved_bytes) {
        refund(pool->device, pool->reserved_bytes - left);
        pool->reserved_bytes = left;
    }
    unlock();
    return status();
}

EXPORT cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr attribute, void *value) {
    Pool *pool = (Pool *)handle;
    uint64_t *into = value;
    switch (attribute) {
    case cudaMemPoolAttrReservedMemCurrent: *into = pool->reserved_bytes; break;
    case cudaMemPoolAttrReservedMemHigh: *into = pool->most_reserved_bytes; break;
    case cudaMemPoolAttrUsedMemCurrent: *into = pool->used_bytes; break;
    case cudaMemPoolAttrUsedMemHigh: *into = pool->most_used_bytes; break;
    default: *into = pool->release_threshold;
    }
    return status();
}

EXPORT cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t handle, enum cudaMemPoolAttr attribute, void *value) {
    Pool *pool = (Pool *)handle;
    if (attribute == cudaMemPoolAttrReleaseThreshold) pool->release_threshold = *(uint64_t *)value;
    if (attribute == cudaMemPoolAttrReservedMemHigh) pool->most_reserved_bytes = pool->reserved_bytes; /* a write resets it */
    if (attribute == cudaMemPoolAttrUsedMemHigh) pool->most_used_bytes = pool->used_bytes;
    return status();
}
