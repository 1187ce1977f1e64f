/* The round trips' work by the CUDA driver's own calls, as JSON on one line. client/bench/round_trips.py does the same
 * in Python; the constants and the order are its own.
 *
 *     cc -O2 -o direct_calls direct_calls.c -ldl && ./direct_calls round_trips.ptx LAUNCHES SAMPLES
 *
 * Symbols are looked up in the whole process, so that a library named by LD_PRELOAD comes before libcuda.so.1.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum {
    THREADS = 32,
    STEP = 3,
    PATTERN = 0x5A,
    ALLOCATION_BYTES = 1 << 20,
    OTHER_BYTES = 512 << 10,
    SMALL_COPY_BYTES = 4096,
    PINNED_BYTES = 16 << 20,
    PINNED_COPIES = 15,
    WARM_LAUNCHES = 50,
    BURST_LAUNCHES = 1000,
    OWN_LAUNCHES = 500,
    OWN_BURSTS = 40,
    TRAIN_LAUNCHES = 20,
};

typedef uint64_t Address;

static int (*init)(unsigned);
static int (*device_get)(int *, int);
static int (*primary_retain)(void **, int);
static int (*set_current)(void *);
static int (*synchronize)(void);
static int (*load_data)(void **, const void *);
static int (*get_function)(void **, void *, const char *);
static int (*mem_alloc)(Address *, size_t);
static int (*mem_free)(Address);
static int (*host_alloc)(void **, size_t, unsigned);
static int (*set_bytes)(Address, unsigned char, size_t);
static int (*to_card)(Address, const void *, size_t);
static int (*from_card)(void *, Address, size_t);
static int (*launch_kernel)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *,
                            void **, void **);

static void *function;
static Address counters, card_small, card_large;
static unsigned char small[SMALL_COPY_BYTES];
static unsigned char *pinned;
static void **parameters;
static long launched;

static void fail(const char *what, int error) {
    fprintf(stderr, "%s failed with CUresult %d\n", what, error);
    exit(1);
}

#define CALL(name, ...)                   \
    do {                                  \
        int error_ = name(__VA_ARGS__);   \
        if (error_) fail(#name, error_);  \
    } while (0)

static void find(void *into, const char *symbol) {
    void *found = dlsym(RTLD_DEFAULT, symbol);
    if (!found) {
        fprintf(stderr, "no library has %s\n", symbol);
        exit(1);
    }
    memcpy(into, &found, sizeof found);
}

static void find_all(void) {
    if (!dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL) && !dlsym(RTLD_DEFAULT, "cuInit")) {
        fprintf(stderr, "no CUDA driver: libcuda.so.1 can't be loaded, and no preloaded library has cuInit\n");
        exit(1);
    }
    find(&init, "cuInit");
    find(&device_get, "cuDeviceGet");
    find(&primary_retain, "cuDevicePrimaryCtxRetain");
    find(&set_current, "cuCtxSetCurrent");
    find(&synchronize, "cuCtxSynchronize");
    find(&load_data, "cuModuleLoadData");
    find(&get_function, "cuModuleGetFunction");
    find(&mem_alloc, "cuMemAlloc_v2");
    find(&mem_free, "cuMemFree_v2");
    find(&host_alloc, "cuMemHostAlloc");
    find(&set_bytes, "cuMemsetD8_v2");
    find(&to_card, "cuMemcpyHtoD_v2");
    find(&from_card, "cuMemcpyDtoH_v2");
    find(&launch_kernel, "cuLaunchKernel");
}

static double now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e6 + (double)now.tv_nsec / 1e3;
}

static void alloc_and_free(void) {
    Address address;
    CALL(mem_alloc, &address, ALLOCATION_BYTES);
    CALL(mem_free, address);
}

static void launch(void) {
    CALL(launch_kernel, function, 1, 1, 1, THREADS, 1, 1, 0, NULL, parameters, NULL);
    launched++;
}

static void sync_all(void) { CALL(synchronize); }

static void launch_and_sync(void) {
    launch();
    sync_all();
}

static void train(void) {
    for (int i = 0; i < TRAIN_LAUNCHES; i++) launch();
    sync_all();
}

static void write_small(void) {
    CALL(to_card, card_small, small, SMALL_COPY_BYTES);
    sync_all();
}

static void read_small(void) { CALL(from_card, small, card_small, SMALL_COPY_BYTES); }

static void write_pinned(void) {
    CALL(to_card, card_large, pinned, PINNED_BYTES);
    sync_all();
}

static void read_pinned(void) { CALL(from_card, pinned, card_large, PINNED_BYTES); }

static int in_order(const void *one, const void *other) {
    double left = *(const double *)one, right = *(const double *)other;
    return (left > right) - (left < right);
}

static double percentile(double *sorted, int count, int percent) {
    int at = (int)((double)count * percent / 100);
    return sorted[at < count ? at : count - 1];
}

static void print_times(const char *name, double *times_us, int count) {
    qsort(times_us, (size_t)count, sizeof *times_us, in_order);
    printf(", \"%s_p50_us\": %.4f, \"%s_p99_us\": %.4f", name, percentile(times_us, count, 50), name,
           percentile(times_us, count, 99));
}

static void print_rates(const char *name, double *times_us, int count) {
    qsort(times_us, (size_t)count, sizeof *times_us, in_order);
    printf(", \"%s_p50_gb_s\": %.4f, \"%s_p99_gb_s\": %.4f", name, PINNED_BYTES / percentile(times_us, count, 50) / 1e3,
           name, PINNED_BYTES / percentile(times_us, count, 99) / 1e3);
}

static void time_all(void (*action)(void), double *times_us, int count) {
    for (int i = 0; i < count; i++) {
        double started = now_us();
        action();
        times_us[i] = now_us() - started;
    }
}

static void warm_up(void (*action)(void)) {
    for (int i = 0; i < WARM_LAUNCHES; i++) action();
}

static void time_bursts(double *times_us, int bursts, int count, int is_own_share) {
    for (int burst = 0; burst < bursts; burst++) {
        double started = now_us();
        for (int i = 0; i < count; i++) launch();
        double returned = now_us();
        sync_all();
        times_us[burst] = ((is_own_share ? returned : now_us()) - started) / count;
    }
}

static void check_bytes(const char *name, const unsigned char *bytes, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (bytes[i] != PATTERN) {
            fprintf(stderr, "%s came back from the card with other bytes than were written\n", name);
            exit(1);
        }
}

static char *read_text(const char *path) {
    FILE *file = fopen(path, "rb");
    char *text = calloc(1, 1 << 16);
    if (!file || !text || !fread(text, 1, (1 << 16) - 1, file)) {
        fprintf(stderr, "%s can't be read\n", path);
        exit(1);
    }
    fclose(file);
    return text;
}

static void open_calls(const char *path) {
    static unsigned length = THREADS, step = STEP;
    static void *pointers[] = {&counters, &length, &step};
    void *module, *memory;
    Address other;
    CALL(load_data, &module, read_text(path));
    CALL(get_function, &function, module, "count");
    CALL(mem_alloc, &other, OTHER_BYTES);
    CALL(mem_alloc, &counters, THREADS * sizeof(unsigned));
    CALL(mem_alloc, &card_small, SMALL_COPY_BYTES);
    CALL(mem_alloc, &card_large, PINNED_BYTES);
    CALL(set_bytes, counters, 0, THREADS * sizeof(unsigned));
    CALL(host_alloc, &memory, PINNED_BYTES, 0);
    pinned = memory;
    parameters = pointers;
}

static void check_counters(void) {
    unsigned counts[THREADS];
    CALL(from_card, counts, counters, sizeof counts);
    for (int i = 0; i < THREADS; i++)
        if (counts[i] != (unsigned)(launched * STEP)) {
            fprintf(stderr, "%ld launches left %u in a counter, not %ld\n", launched, counts[i], launched * STEP);
            exit(1);
        }
}

static void time_launches(double *times_us, int launches, int samples) {
    int bursts = launches / BURST_LAUNCHES ? launches / BURST_LAUNCHES : 1;
    warm_up(launch_and_sync);
    time_bursts(times_us, bursts, BURST_LAUNCHES, 0);
    print_times("launch_pipelined", times_us, bursts);
    time_bursts(times_us, OWN_BURSTS, OWN_LAUNCHES, 1);
    print_times("launch_own", times_us, OWN_BURSTS);
    time_all(launch_and_sync, times_us, samples);
    print_times("launch_sync", times_us, samples);
    time_all(sync_all, times_us, samples);
    print_times("sync_idle", times_us, samples);
    time_all(train, times_us, samples);
    print_times("train_sync", times_us, samples);
}

static void time_copies(double *times_us, int samples) {
    memset(small, PATTERN, SMALL_COPY_BYTES);
    warm_up(write_small);
    time_all(write_small, times_us, samples);
    print_times("write_4k_sync", times_us, samples);
    memset(small, 0, SMALL_COPY_BYTES);
    time_all(read_small, times_us, samples);
    print_times("read_4k", times_us, samples);
    memset(pinned, PATTERN, PINNED_BYTES);
    write_pinned();
    time_all(write_pinned, times_us, PINNED_COPIES);
    print_rates("write_16m_pinned", times_us, PINNED_COPIES);
    memset(pinned, 0, PINNED_BYTES);
    time_all(read_pinned, times_us, PINNED_COPIES);
    print_rates("read_16m_pinned", times_us, PINNED_COPIES);
    check_bytes("4 KiB", small, SMALL_COPY_BYTES);
    check_bytes("16 MiB", pinned, PINNED_BYTES);
}

int main(int count, char **words) {
    int device, launches = count == 4 ? atoi(words[2]) : 0, samples = count == 4 ? atoi(words[3]) : 0;
    void *context;
    if (launches < 1 || samples < 1) {
        fprintf(stderr, "usage: %s PTX_FILE LAUNCHES SAMPLES\n", words[0]);
        return 2;
    }
    size_t room = (size_t)samples + (size_t)launches / BURST_LAUNCHES + OWN_BURSTS + PINNED_COPIES;
    double *times_us = calloc(room, sizeof *times_us);
    if (!times_us) fail("calloc", 0);
    find_all();
    double started = now_us();
    CALL(init, 0);
    CALL(device_get, &device, 0);
    CALL(primary_retain, &context, device);
    CALL(set_current, context);
    sync_all();
    printf("{\"session_start_p50_ms\": %.4f", (now_us() - started) / 1e3);
    warm_up(alloc_and_free);
    time_all(alloc_and_free, times_us, samples);
    print_times("alloc_free_alone", times_us, samples);
    open_calls(words[1]);
    warm_up(alloc_and_free);
    time_all(alloc_and_free, times_us, samples);
    print_times("alloc_free_beside", times_us, samples);
    time_launches(times_us, launches, samples);
    check_counters();
    time_copies(times_us, samples);
    printf("}\n");
    return 0;
}
