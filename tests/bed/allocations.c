/* The runtime's allocations and copies. The pools of cudaMallocAsync are in pools.c, virtual memory in driver.c. */
#include "bed.h"

EXPORT cudaError_t cudaMalloc(void **address, size_t size) {
    RETURN_IF_FAULTY(MALLOC);
    *address = 0;
    if (!size) return 0;
    size_t charged_bytes = ROUND_UP(size, DRIVER_PAGE);
    lock();
    int error = charge(current_device, charged_bytes);
    if (!error && !(*address = map_pages(size))) {
        refund(current_device, charged_bytes);
        error = cudaErrorMemoryAllocation;
    }
    if (!error) add_block(*address, size, charged_bytes, current_device, ON_DEVICE);
    unlock();
    log_line("malloc %zu on %d: %s", size, current_device, error_text(error));
    return error ? fail_with(error) : 0;
}

EXPORT cudaError_t cudaFree(void *address) {
    int error = make_context(current_device); /* programs create their context by cudaFree(0) */
    if (!error) error = nccl_wait_for_device(current_device);
    if (error) return fail_with(error);
    lock();
    Block block = remove_block(address);
    if (block.address) {
        refund(block.device, block.charged_bytes);
        unmap_pages(address, block.size);
    }
    unlock();
    if (address) log_line("free %zu on %d", block.size, block.device);
    return status();
}

EXPORT cudaError_t cudaMallocHost(void **address, size_t size) {
    if (!(*address = map_pages(size ? size : 1))) return fail_with(cudaErrorMemoryAllocation);
    lock();
    add_block(*address, size, 0, current_device, ON_HOST);
    unlock();
    return status();
}
EXPORT cudaError_t cudaHostAlloc(void **address, size_t size, unsigned flags) { return cudaMallocHost(address, size); }
EXPORT cudaError_t cudaFreeHost(void *address) {
    lock();
    Block block = remove_block(address);
    unlock();
    if (block.address) unmap_pages(address, block.size);
    return status();
}
EXPORT cudaError_t cudaHostRegister(void *address, size_t size, unsigned flags) {
    lock();
    add_block(address, size, 0, current_device, ON_HOST);
    unlock();
    return status();
}
EXPORT cudaError_t cudaHostUnregister(void *address) {
    lock();
    remove_block(address);
    unlock();
    return status();
}

EXPORT cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *address) {
    lock();
    Block *found = block_at(address), block = found ? *found : (Block){0};
    unlock();
    *attributes = (struct cudaPointerAttributes){.type = cudaMemoryTypeUnregistered, .device = -2};
    if (!found) return status();
    attributes->type = block.place == ON_HOST ? cudaMemoryTypeHost : cudaMemoryTypeDevice;
    attributes->device = block.device;
    attributes->devicePointer = (void *)address;
    attributes->hostPointer = block.place == ON_HOST ? (void *)address : 0;
    return status();
}

/* A copy is made when it is launched: the collectives that write what it reads or writes must be done. To the host it waits
 * for the whole stream, as on a card. */
EXPORT cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t size, enum cudaMemcpyKind kind, cudaStream_t stream) {
    RETURN_IF_FAULTY(MEMCPY);
    int error = kind == cudaMemcpyDeviceToHost ? nccl_wait(tickets_of(stream)) : 0;
    if (!error) error = nccl_wait_for_data(from, size);
    if (!error) error = nccl_wait_for_data(to, size);
    if (error) return error;
    lock();
    copy_bytes(to, from, size);
    unlock();
    return 0;
}
EXPORT cudaError_t cudaMemcpy(void *to, const void *from, size_t size, enum cudaMemcpyKind kind) {
    return cudaMemcpyAsync(to, from, size, kind, 0);
}
EXPORT cudaError_t cudaMemcpyPeerAsync(void *to, int to_device, const void *from, int from_device, size_t size,
                                       cudaStream_t stream) {
    return cudaMemcpyAsync(to, from, size, cudaMemcpyDefault, stream);
}
EXPORT cudaError_t cudaMemcpy2DAsync(void *to, size_t to_pitch, const void *from, size_t from_pitch, size_t width,
                                     size_t height, enum cudaMemcpyKind kind, cudaStream_t stream) {
    for (size_t row = 0; row < height; row++)
        memmove((char *)to + row * to_pitch, (const char *)from + row * from_pitch, width);
    return status();
}
EXPORT cudaError_t cudaMemset(void *address, int value, size_t size) {
    int error = nccl_wait_for_data(address, size);
    if (error) return error;
    lock();
    if (value) memset(address, value, size);
    else fill_with_zeros(address, size);
    unlock();
    return status();
}
EXPORT cudaError_t cudaMemsetAsync(void *address, int value, size_t size, cudaStream_t stream) {
    return cudaMemset(address, value, size);
}
