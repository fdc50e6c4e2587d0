/* Shared declarations of the bed. README.md says what is real here and what is not. */
#pragma once
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default"))) /* seen by torch; everything else is hidden */
#define MAX_DEVICES 8
#define MAX_COMMUNICATORS 32 /* NCCL's, in a process at a time */
#define PAGE 4096ul
#define DRIVER_PAGE (2ul << 20) /* the driver allocates in units of 2 MiB */
#define ROUND_UP(n, to) (((n) + (to) - 1) / (to) * (to))

/* settings.c: the environment variables CUDASTUB_* */
typedef struct {
    int cards, devices, card_of[MAX_DEVICES]; /* CUDA's devices are the cards that CUDA_VISIBLE_DEVICES names; NVML's are all */
    int64_t capacity_bytes[MAX_DEVICES], context_bytes, lazy_bytes, nccl_bytes; /* capacities by card */
    int major, minor, multiprocessors, threads_each; /* of each card */
    int scribble, asserts, log;
    char neighbour_file[4096], shared_file[4096];
} Settings;
extern Settings settings;
void read_visible_devices(void);
int64_t parse_bytes(const char *text, char **end);
void log_line(const char *format, ...);

/* memory.c: memory held by each process, and the blocks behind addresses. Hold the lock in all of these calls. */
typedef struct {
    int pid;
    int64_t held_bytes[MAX_DEVICES]; /* by card */
} Process;
typedef enum { ON_DEVICE, ON_HOST } Place;
typedef struct {
    uintptr_t address;
    size_t size, charged_bytes;
    int device;
    Place place;
} Block;
void lock(void);
void unlock(void);
void reset_memory(void);                    /* as before the first use of CUDA */
int charge(int device, int64_t bytes);      /* 0, or cudaErrorMemoryAllocation; the first call creates the context */
void refund(int device, int64_t bytes);
int make_context(int device);               /* takes the lock itself */
int load_kernels(int device);               /* takes the lock itself; CUDASTUB_LAZY */
int has_context(int device);
int was_used(void);                         /* has this process called CUDA? */
void note_use(void);
int64_t held_by_this_process(int card);
int64_t held_by_others(int card);
int list_processes(int card, Process *into, int room); /* processes that hold memory of the card */
void add_block(void *address, size_t size, size_t charged_bytes, int device, Place place);
Block *block_at(const void *address);       /* the block that contains the address, or null */
Block remove_block(const void *address);    /* the block that begins there; its address is 0 if none does */
void *map_pages(size_t size);               /* zeros that use no memory until they are written */
void unmap_pages(void *address, size_t size);
void fill_with_zeros(void *address, size_t size);
void copy_bytes(void *to, const void *from, size_t size);

/* errors.c: faults that a test requests, and the texts */
typedef enum { LAUNCH, SYNC, MALLOC, MEMCPY, CALLS } Call;
void ask_for_fault(const char *text);       /* CUDASTUB_FAIL */
int fault_of(Call call);                    /* counts the call; 0, or the error it must return */
void poison(int error);                     /* every later call fails with this, as after a real fault */
int fail_with(int error);                   /* remembers and returns the error */
int status(void);                           /* the result of a successful call: 0, unless the process is poisoned */
const char *error_text(int error);
const char *error_name(int error);
#define RETURN_IF_FAULTY(call) do { int fault_ = fault_of(call); if (fault_) return fault_; } while (0)

/* device.c */
extern __thread int current_device;
void uuid_of(int card, char *bytes);

/* nccl.c: collectives, which are done once every rank has launched them. The calls that wait end early, with its error, if
 * the process is poisoned; without a communicator they all return at once. */
typedef struct { int64_t of[MAX_COMMUNICATORS]; } Tickets; /* the last collectives, one a communicator, that something follows */
extern int nccl_in_use;
void nccl_add(Tickets *to, const Tickets *more);
int nccl_are_done(const Tickets *tickets);
int nccl_wait(const Tickets *tickets);
int nccl_wait_for_device(int device);
int nccl_wait_for_data(const void *address, size_t size); /* for collectives that write there */

/* streams.c */
Tickets *tickets_of(cudaStream_t stream);

/* pools.c */
void reset_pools(void);
