/* The memory of the devices: bytes held by each process, blocks by address, zeroing and copying pages. */
#include "bed.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <sys/file.h>

#define MAX_PROCESSES 256

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int shared_fd = -1; /* the file of CUDASTUB_SHARED, which holds the table of processes */
static pid_t opened_by;
static Process private_table[MAX_PROCESSES], *table = private_table, *this_process;
static char context_made[MAX_DEVICES], kernels_loaded[MAX_DEVICES], used;
static Block *blocks;
static size_t block_count, block_room;

void lock(void) {
    pthread_mutex_lock(&mutex);
    if (shared_fd >= 0 && opened_by != getpid()) { /* forked: one open file description would be one lock for both */
        int own = open(settings.shared_file, O_RDWR | O_CLOEXEC);
        close(shared_fd);
        shared_fd = own, opened_by = getpid();
    }
    if (shared_fd >= 0) flock(shared_fd, LOCK_EX);
}

void unlock(void) {
    if (shared_fd >= 0) flock(shared_fd, LOCK_UN);
    pthread_mutex_unlock(&mutex);
}

void reset_memory(void) {
    if (shared_fd >= 0) close(shared_fd);
    if (table != private_table) munmap(table, sizeof private_table);
    shared_fd = -1, table = private_table, this_process = 0, block_count = 0, used = 0;
    memset(private_table, 0, sizeof private_table);
    memset(context_made, 0, sizeof context_made);
    memset(kernels_loaded, 0, sizeof kernels_loaded);
    if (!*settings.shared_file) return;
    shared_fd = open(settings.shared_file, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    void *mapped = MAP_FAILED;
    if (shared_fd >= 0 && !ftruncate(shared_fd, sizeof private_table))
        mapped = mmap(0, sizeof private_table, PROT_READ | PROT_WRITE, MAP_SHARED, shared_fd, 0);
    if (mapped == MAP_FAILED) {
        perror("cudastub: CUDASTUB_SHARED");
        abort();
    }
    table = mapped, opened_by = getpid();
}

/* ---- bytes held by each process ---- */

static int is_free(const Process *entry) { /* unused, or of a dead process, whose pid this process may have now */
    if (entry == this_process) return 0;
    return !entry->pid || entry->pid == getpid() || (kill(entry->pid, 0) && errno == ESRCH);
}

static Process *own_entry(void) {
    if (this_process) return this_process;
    for (Process *entry = table; entry < table + MAX_PROCESSES; entry++)
        if (is_free(entry)) {
            memset(entry, 0, sizeof *entry);
            entry->pid = getpid();
            return this_process = entry;
        }
    fprintf(stderr, "cudastub: more than %d processes\n", MAX_PROCESSES);
    abort();
}

int64_t held_by_this_process(int card) { return this_process ? this_process->held_bytes[card] : 0; }

int64_t held_by_others(int card) {
    int64_t sum = 0;
    for (Process *entry = table; entry < table + MAX_PROCESSES; entry++)
        if (entry != this_process && !is_free(entry)) sum += entry->held_bytes[card];
    FILE *file = *settings.neighbour_file && card == 0 ? fopen(settings.neighbour_file, "r") : 0;
    if (file) {
        char text[64] = "", *end;
        if (fgets(text, sizeof text, file)) sum += parse_bytes(text, &end);
        fclose(file);
    }
    return sum;
}

int list_processes(int card, Process *into, int room) {
    int found = 0;
    for (Process *entry = table; entry < table + MAX_PROCESSES; entry++)
        if (!is_free(entry) && entry->held_bytes[card]) {
            if (found < room) into[found] = *entry;
            found++;
        }
    return found;
}

int charge(int device, int64_t bytes) {
    used = 1;
    if (!context_made[device]) bytes += settings.context_bytes;
    Process *entry = own_entry();
    int card = settings.card_of[device];
    if (held_by_others(card) + entry->held_bytes[card] + bytes > settings.capacity_bytes[card]) return cudaErrorMemoryAllocation;
    context_made[device] = 1;
    entry->held_bytes[card] += bytes;
    return 0;
}

void refund(int device, int64_t bytes) { own_entry()->held_bytes[settings.card_of[device]] -= bytes; }

int was_used(void) { return used; }
void note_use(void) { used = 1; }
int has_context(int device) { return context_made[device]; }

int make_context(int device) {
    lock();
    int error = context_made[device] ? 0 : charge(device, 0);
    unlock();
    return error;
}

int load_kernels(int device) { /* kernels are loaded on first use, into memory that no allocator counts */
    if (kernels_loaded[device]) return 0;
    lock();
    int error = kernels_loaded[device] ? 0 : charge(device, settings.lazy_bytes);
    if (!error) kernels_loaded[device] = 1;
    unlock();
    return error;
}

/* ---- blocks by address ---- */

void add_block(void *address, size_t size, size_t charged_bytes, int device, Place place) {
    if (block_count == block_room) {
        block_room = block_room ? 2 * block_room : 1024;
        blocks = realloc(blocks, block_room * sizeof *blocks);
    }
    blocks[block_count++] = (Block){(uintptr_t)address, size, charged_bytes, device, place};
}

Block *block_at(const void *address) {
    for (size_t i = block_count; i-- > 0;)
        if ((uintptr_t)address - blocks[i].address < blocks[i].size) return &blocks[i];
    return 0;
}

Block remove_block(const void *address) {
    Block *block = block_at(address), removed = {0};
    if (block && block->address == (uintptr_t)address) removed = *block, *block = blocks[--block_count];
    return removed;
}

/* ---- pages: a card of 80 GiB uses only as much host memory as is written to it ---- */

/* Addresses fall, as those of cards mostly do: among equal free blocks torch takes the lowest. */
void *map_pages(size_t size) {
    static uintptr_t lowest = 0x500000000000;
    int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
    uintptr_t wanted = __atomic_sub_fetch(&lowest, ROUND_UP(size, DRIVER_PAGE), __ATOMIC_RELAXED);
    void *address = mmap((void *)wanted, ROUND_UP(size, PAGE), PROT_READ | PROT_WRITE, flags, -1, 0);
    return address == MAP_FAILED ? 0 : address;
}

void unmap_pages(void *address, size_t size) { munmap(address, ROUND_UP(size, PAGE)); }

void fill_with_zeros(void *address, size_t size) { /* by dropping whole pages */
    uintptr_t begin = (uintptr_t)address, end = begin + size;
    uintptr_t first_page = ROUND_UP(begin, PAGE), last_page = end / PAGE * PAGE;
    Block *block = size >= 16 * PAGE ? block_at(address) : 0;
    if (!block || block->place == ON_HOST || first_page >= last_page) {
        memset(address, 0, size);
        return;
    }
    memset(address, 0, first_page - begin);
    madvise((void *)first_page, last_page - first_page, MADV_DONTNEED);
    memset((void *)last_page, 0, end - last_page);
}

void copy_bytes(void *to, const void *from, size_t size) { /* only pages that have been written; the others are zeros */
    Block *source = size >= 64 * PAGE ? block_at(from) : 0;
    if (!source || source->place == ON_HOST) {
        memmove(to, from, size);
        return;
    }
    static unsigned char written[4096];
    uintptr_t begin = (uintptr_t)from, end = begin + size;
    for (uintptr_t window = begin / PAGE * PAGE; window < end;) {
        size_t pages = (end - window + PAGE - 1) / PAGE;
        if (pages > sizeof written) pages = sizeof written;
        if (mincore((void *)window, pages * PAGE, written)) memset(written, 1, pages);
        for (size_t first = 0, next; first < pages; first = next) {
            for (next = first + 1; next < pages && (written[next] & 1) == (written[first] & 1);) next++;
            uintptr_t low = window + first * PAGE, high = window + next * PAGE;
            if (low < begin) low = begin;
            if (high > end) high = end;
            char *target = (char *)to + (low - begin);
            if (written[first] & 1) memmove(target, (void *)low, high - low);
            else fill_with_zeros(target, high - low);
        }
        window += pages * PAGE;
    }
}
