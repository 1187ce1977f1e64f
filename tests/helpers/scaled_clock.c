/* A clock that runs faster or slower than the host's: clock_gettime(2) and the waits until a time, by LD_PRELOAD.
 *
 * SCALED_CLOCK is "PPM MONOTONIC_NS BOOTTIME_NS": how much faster, and the moment at which it was the host's. Those two
 * clocks are scaled and no other, so that the times of logs are the host's. Timeouts that are lengths are the host's.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define NS_PER_S 1000000000LL
#define PPM 1000000LL

static long long faster_ppm, monotonic_ns, boottime_ns;
static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_nanosleep)(clockid_t, int, const struct timespec *, struct timespec *);
static int (*real_semwait)(sem_t *, clockid_t, const struct timespec *);
static int (*real_condwait)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);

__attribute__((constructor)) static void begin(void) {
    const char *told = getenv("SCALED_CLOCK");
    if (told == NULL || sscanf(told, "%lld %lld %lld", &faster_ppm, &monotonic_ns, &boottime_ns) != 3)
        abort();
    *(void **)&real_nanosleep = dlsym(RTLD_NEXT, "clock_nanosleep");
    *(void **)&real_semwait = dlsym(RTLD_NEXT, "sem_clockwait");
    *(void **)&real_condwait = dlsym(RTLD_NEXT, "pthread_cond_clockwait");
    *(void **)&real_gettime = dlsym(RTLD_NEXT, "clock_gettime");
}

/* The moment at which a clock was the host's; 0 if it is no other. */
static long long since_ns(clockid_t clock) {
    if (clock == CLOCK_MONOTONIC || clock == CLOCK_MONOTONIC_COARSE)
        return monotonic_ns;
    return clock == CLOCK_BOOTTIME ? boottime_ns : 0;
}

static struct timespec as_timespec(long long ns) {
    return (struct timespec){.tv_sec = ns / NS_PER_S, .tv_nsec = ns % NS_PER_S};
}

/* The host's time at which a clock shows this one. */
static struct timespec on_host(clockid_t clock, const struct timespec *time) {
    long long since = since_ns(clock), passed = time->tv_sec * NS_PER_S + time->tv_nsec - since;
    if (!since)
        return *time;
    return as_timespec(since + (long long)((__int128)passed * PPM / (PPM + faster_ppm)));
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    if (real_gettime == NULL)
        begin();
    int result = real_gettime(clock, now);
    long long since = since_ns(clock);
    if (result == 0 && since) {
        long long passed = now->tv_sec * NS_PER_S + now->tv_nsec - since;
        *now = as_timespec(since + passed + (long long)((__int128)passed * faster_ppm / PPM));
    }
    return result;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *time, struct timespec *left) {
    struct timespec until = flags & TIMER_ABSTIME ? on_host(clock, time) : *time;
    return real_nanosleep(clock, flags, &until, left);
}

int sem_clockwait(sem_t *semaphore, clockid_t clock, const struct timespec *time) {
    struct timespec until = on_host(clock, time);
    return real_semwait(semaphore, clock, &until);
}

int pthread_cond_clockwait(
    pthread_cond_t *condition, pthread_mutex_t *mutex, clockid_t clock, const struct timespec *time) {
    struct timespec until = on_host(clock, time);
    return real_condwait(condition, mutex, clock, &until);
}
