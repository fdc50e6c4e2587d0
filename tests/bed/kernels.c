/* Kernels: launches are counted, and nearly all do nothing.
 *
 * A few do something. Fills write their value, and adding a number to float32 adds (a health check of the device reads it
 * back). Optimizer and elementwise kernels change one byte of their output, so that a test that the state was restored can
 * fail. An index out of bounds, if a fill wrote it, triggers a device-side assert. */
#include "bed.h"
#include <pthread.h>

typedef struct { const void *stub; const char *name; } Kernel; /* the host function that launches it, and its name */
static Kernel *kernels;
static size_t kernel_count, kernel_room;
static volatile int sorted;
static pthread_mutex_t kernel_lock = PTHREAD_MUTEX_INITIALIZER;

static int by_stub(const void *left, const void *right) {
    const Kernel *a = left, *b = right;
    return a->stub < b->stub ? -1 : a->stub > b->stub;
}

static const char *kernel_name(const void *stub) {
    if (!sorted) {
        pthread_mutex_lock(&kernel_lock);
        if (!sorted) qsort(kernels, kernel_count, sizeof *kernels, by_stub), sorted = 1;
        pthread_mutex_unlock(&kernel_lock);
    }
    Kernel wanted = {stub, 0}, *found = bsearch(&wanted, kernels, kernel_count, sizeof *kernels, by_stub);
    return found ? found->name : "";
}

/* ---- called when a library with kernels is loaded ---- */

EXPORT void **__cudaRegisterFatBinary(void *image) {
    static void *handle;
    return &handle;
}
EXPORT void __cudaRegisterFunction(void **binary, const char *stub, char *function, const char *name, int limit, void *thread,
                                   void *block, void *block_size, void *grid_size, int *warp_size) {
    pthread_mutex_lock(&kernel_lock);
    if (kernel_count == kernel_room) {
        kernel_room = kernel_room ? 2 * kernel_room : 16384;
        kernels = realloc(kernels, kernel_room * sizeof *kernels);
    }
    kernels[kernel_count++] = (Kernel){stub, name};
    sorted = 0;
    pthread_mutex_unlock(&kernel_lock);
}
EXPORT cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *stub) {
    *kernel = (cudaKernel_t)stub;
    return 0;
}
EXPORT cudaError_t cudaGetSymbolAddress(void **address, const void *symbol) {
    static char somewhere[65536];
    *address = somewhere;
    return status();
}

/* ---- the few kernels that do something ---- */

static void fill(char *out, const void *value, size_t item_bytes, size_t count) {
    static const char zeros[16];
    const size_t most_bytes = 1ul << 20; /* the rest is never read */
    if (nccl_wait_for_data(out, count * item_bytes)) return;
    lock();
    if (!memcmp(value, zeros, item_bytes)) fill_with_zeros(out, count * item_bytes);
    else
        for (size_t i = 0; i < count && i * item_bytes < most_bytes; i++) memcpy(out + i * item_bytes, value, item_bytes);
    unlock();
}

static size_t filled_item_bytes(const char *type) { /* the mangled type after "FillFunctorI" */
    switch (*type) {
    case 'd': case 'l': case 'm': return 8;
    case 'f': case 'i': case 'j': return 4;
    case 's': case 't': return 2;
    case 'a': case 'h': case 'b': return 1;
    default: return strstr(type, "Half") || strstr(type, "BFloat16") ? 2 : strstr(type, "complexIf") ? 8 : 1;
    }
}

static const void *filled_int64; /* output of the last fill: the only indices whose values are known here */

static void check_indices(const int64_t *index, long count, int64_t size) {
    if (index != filled_int64) return;
    lock();
    Block *block = block_at(index);
    long known = block ? (block->address + block->size - (uintptr_t)index) / sizeof *index : 0;
    for (long i = 0; i < count && i < known; i++)
        if (index[i] < 0 || index[i] >= size) poison(cudaErrorAssert);
    unlock();
}

static void scribble(char *out) {
    lock();
    Block *block = block_at(out);
    if (block && block->place == ON_DEVICE) ++*out;
    unlock();
}

static void run_kernel(const void *stub, void **args) { /* args: addresses of the kernel's arguments */
    const char *name = kernel_name(stub);
    if (settings.log > 1) log_line("kernel %s", name);
    if (!args) return;
    if (settings.asserts && strstr(name, "indexSelectSmallIndex") && strstr(name, "IfljL")) {
        struct { int64_t *data; unsigned count; } *index = args[2]; /* the head of a TensorInfo */
        check_indices(index->data, index->count, *(int64_t *)args[6]);
    }
    if (settings.asserts && strstr(name, "vectorized_gather_kernel"))
        check_indices(*(int64_t **)args[2], *(int *)args[3], *(int64_t *)args[5]);
    if (strstr(name, "vectorized_elementwise_kernel") || strstr(name, "unrolled_elementwise_kernel")) {
        int count = *(int *)args[0];
        char **data = args[2]; /* the output, then the inputs */
        const char *fills = strstr(name, "FillFunctorI");
        if (fills) {
            const char *type = fills + strlen("FillFunctorI");
            if (*type == 'l') filled_int64 = data[0];
            fill(data[0], args[1], filled_item_bytes(type), count);
        } else if (strstr(name, "CUDAFunctorOnSelf_addIfE") && count <= 65536) {
            float *out = (float *)data[0], *in = (float *)data[1], *factors = args[1];
            if (nccl_wait_for_data(in, count * sizeof *in)) return;
            for (int i = 0; i < count; i++) out[i] = in[i] + factors[0] * factors[1];
        } else if (settings.scribble) scribble(data[0]);
    } else if (settings.scribble && strstr(name, "multi_tensor_apply_kernel")) scribble(*(char **)args[0]);
}

/* ---- launches ---- */

static int launch(const void *stub, void **args) {
    RETURN_IF_FAULTY(LAUNCH);
    int error = settings.lazy_bytes ? load_kernels(current_device) : 0;
    if (error) return fail_with(error);
    run_kernel(stub, args);
    return 0;
}
EXPORT cudaError_t cudaLaunchKernel(const void *stub, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return launch(stub, args);
}
EXPORT cudaError_t __cudaLaunchKernel(cudaKernel_t stub, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream) {
    return launch(stub, args);
}
EXPORT cudaError_t cudaLaunchCooperativeKernel(const void *stub, dim3 grid, dim3 block, void **args, size_t shared,
                                               cudaStream_t stream) {
    return launch(stub, args);
}
EXPORT cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *stub, void **args) {
    return launch(stub, args);
}

/* The compiler turns `kernel<<<...>>>(...)` into a push, a call of the stub, and a pop in the stub. */
static __thread struct { dim3 grid, block; size_t shared; cudaStream_t stream; } pushed;
EXPORT unsigned __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream) {
    pushed.grid = grid, pushed.block = block, pushed.shared = shared, pushed.stream = stream;
    return 0;
}
EXPORT cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream) {
    *grid = pushed.grid, *block = pushed.block, *shared = pushed.shared, *(cudaStream_t *)stream = pushed.stream;
    return 0;
}

/* The newest architecture for which torch's kernels are compiled and that the card runs: CUB selects its tuning by it. */
static int compiled_for(void) {
    static const int built[] = {120, 100, 90, 86, 80, 75};
    int card = 10 * settings.major + settings.minor;
    for (size_t i = 0; i < sizeof built / sizeof *built; i++)
        if (built[i] <= card) return built[i];
    return card;
}

EXPORT cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *stub) {
    memset(attributes, 0, sizeof *attributes);
    attributes->maxThreadsPerBlock = 1024, attributes->numRegs = 32, attributes->maxDynamicSharedSizeBytes = 49152;
    attributes->ptxVersion = attributes->binaryVersion = compiled_for();
    return status();
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *stub, int threads, size_t shared) {
    *blocks = threads > 0 ? settings.threads_each / threads : 1;
    if (*blocks > 32) *blocks = 32;
    if (*blocks < 1) *blocks = 1;
    return status();
}
EXPORT cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *stub, int threads,
                                                                          size_t shared, unsigned flags) {
    return cudaOccupancyMaxActiveBlocksPerMultiprocessor(blocks, stub, threads, shared);
}
