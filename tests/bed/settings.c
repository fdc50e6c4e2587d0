/* The environment variables, read when torch loads the library, and again by a forked child that has changed them. */
#include "bed.h"
#include <stdarg.h>

Settings settings;

void log_line(const char *format, ...) {
    if (!settings.log) return;
    va_list rest;
    va_start(rest, format);
    fprintf(stderr, "cudastub: ");
    vfprintf(stderr, format, rest);
    fputc('\n', stderr);
    va_end(rest);
}

int64_t parse_bytes(const char *text, char **end) {
    double number = strtod(text, end);
    switch (**end) {
    case 'T': number *= 1024; /* fall through */
    case 'G': number *= 1024; /* fall through */
    case 'M': number *= 1024; /* fall through */
    case 'K': number *= 1024; /* fall through */
    case 'B': *end += strcspn(*end, ",");
    }
    return (int64_t)number;
}

static int64_t bytes_from(const char *variable) {
    char *end;
    const char *text = getenv(variable);
    return text ? parse_bytes(text, &end) : 0;
}

static int number_from(const char *variable, int otherwise) {
    const char *text = getenv(variable);
    return text && *text ? atoi(text) : otherwise;
}

static void path_from(const char *variable, char *into) {
    const char *text = getenv(variable);
    snprintf(into, sizeof settings.shared_file, "%s", text ? text : "");
}

/* CUDA_VISIBLE_DEVICES: numbers of cards. As in CUDA, the first that is none hides the rest. Read again at CUDA's first use. */
void read_visible_devices(void) {
    const char *text = getenv("CUDA_VISIBLE_DEVICES");
    settings.devices = 0;
    for (int card = 0; !text && card < settings.cards; card++) settings.card_of[settings.devices++] = card;
    while (text && *text && settings.devices < MAX_DEVICES) {
        char *end;
        long card = strtol(text, &end, 10);
        if (end == text || card < 0 || card >= settings.cards) break;
        settings.card_of[settings.devices++] = card;
        text = end + (*end == ',');
    }
}

/* Returns 1 if CUDA was used before, since torch may then remember the devices of the old settings; otherwise 0. */
EXPORT int cudastub_configure(void) {
    int used = was_used();
    const char *text = getenv("CUDASTUB_MEMORY");
    char *end = (char *)(text && *text ? text : "1GiB");
    for (settings.cards = 0; *end && settings.cards < MAX_DEVICES; settings.cards++) {
        settings.capacity_bytes[settings.cards] = parse_bytes(end, &end);
        end += *end == ',';
    }
    read_visible_devices();
    settings.major = 8, settings.minor = 0, settings.multiprocessors = 108, settings.threads_each = 2048; /* an A100's */
    if ((text = getenv("CUDASTUB_CARD")))
        sscanf(text, "%d.%d,%d,%d", &settings.major, &settings.minor, &settings.multiprocessors, &settings.threads_each);
    settings.context_bytes = bytes_from("CUDASTUB_CONTEXT");
    settings.lazy_bytes = bytes_from("CUDASTUB_LAZY");
    settings.nccl_bytes = bytes_from("CUDASTUB_NCCL");
    settings.scribble = number_from("CUDASTUB_SCRIBBLE", 1);
    settings.asserts = number_from("CUDASTUB_ASSERT", 1);
    settings.log = number_from("CUDASTUB_LOG", 0);
    path_from("CUDASTUB_NEIGHBOUR", settings.neighbour_file);
    path_from("CUDASTUB_SHARED", settings.shared_file);
    ask_for_fault(getenv("CUDASTUB_FAIL"));
    reset_memory();
    reset_pools();
    return used;
}

__attribute__((constructor)) static void when_loaded(void) {
    cudastub_configure();
    /* Load this file under two more names, so that a later dlopen of them (by NVML's Python package) finds it. Use the
     * results: a tail call of dlopen would search in the directories of this function's caller. */
    if (!dlopen("libnvidia-ml.so.1", RTLD_LAZY) || !dlopen("libcuda.so.1", RTLD_LAZY)) fprintf(stderr, "cudastub: %s\n", dlerror());
}
