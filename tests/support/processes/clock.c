// A wall clock that is wrong by the ns in the file $TEST_CLOCK, which may change at any time. To be preloaded. What the kernel
// itself waits for goes by its own clock.
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const volatile long long *wrong_ns;

__attribute__((constructor)) static void open_it(void) {
    const char *path = getenv("TEST_CLOCK");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    void *at = fd < 0 ? MAP_FAILED : mmap(NULL, sizeof *wrong_ns, PROT_READ, MAP_SHARED, fd, 0);
    if (at != MAP_FAILED) wrong_ns = at;
    if (fd >= 0) close(fd);
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (failed || !wrong_ns || (clock != CLOCK_REALTIME && clock != CLOCK_REALTIME_COARSE)) return failed;
    long long ns = now->tv_sec * 1000000000LL + now->tv_nsec + *wrong_ns;
    now->tv_sec = ns / 1000000000LL;
    now->tv_nsec = ns % 1000000000LL;
    return 0;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    now->tv_sec = precise.tv_sec;
    now->tv_usec = precise.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to) {
    struct timespec precise;
    clock_gettime(CLOCK_REALTIME, &precise);
    if (to) *to = precise.tv_sec;
    return precise.tv_sec;
}
