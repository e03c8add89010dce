/* Threads that share the items of a call, and never wait for one that is not there.
 *
 * A decode step makes two hundred calls of 10 to 200 µs each. OpenMP ends a call when all of its threads have arrived:
 * one that sleeps takes 50 µs to come, and if they spin instead, one that other programs keep from its core takes
 * milliseconds. Here whoever runs takes items one by one, the caller among them, and the call ends with the last item;
 * a worker that comes late finds nothing to do. Workers stay awake between calls as long as nobody wants their cores.
 * When somebody does, they sleep at once for a while, and are woken for long calls only (docs/decisions/002). */
#pragma once
#include "cpu.h"
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <unistd.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#endif

#define MOST_THREADS 256
#define LOOKS 16            /* at what is waited for, between two looks at the clock */
#define AWAKE_NS 1000000    /* without work: longer than the pauses within a decode step and between two */
#define PATIENCE_NS 50000   /* of the caller with the last items of others, before it sleeps */
#define LOST_NS 500000      /* a thread that was kept from its core for so long has neighbours */
#define CROWDED_NS 50000000 /* for which that is remembered */
#define SHARE_NS 10000      /* of work: fewer are not worth a thread that is awake, */
#define WAKE_NS 100000      /* and a call shorter than this not one that sleeps */

typedef void (*crew_work)(const void *job, int64_t item, int worker);

static struct {
    atomic_flag busy;               /* a call is being worked on */
    _Atomic uint32_t calls;         /* so far: what workers wait for a change of */
    _Atomic int sleeping;           /* workers */
    _Atomic int64_t crowded_until;  /* time */
    _Atomic uint32_t inside;        /* workers that may read what stands below */
    _Atomic int waiting;            /* whether the caller sleeps until there are none */
    _Atomic int open;               /* whether they may begin to */
    _Atomic int64_t next;           /* item */
    int64_t items;
    int threads;                    /* of this call, the caller's included */
    crew_work work;
    const void *job;
    int workers;                    /* that have been started */
} crew = {.busy = ATOMIC_FLAG_INIT};

static inline void crew_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#if defined(__linux__)
static inline void crew_sleep(_Atomic uint32_t *at, uint32_t seen) { /* unless it has changed */
    syscall(SYS_futex, at, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
}

static inline void crew_wake(_Atomic uint32_t *at) {
    syscall(SYS_futex, at, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
#else /* not tested: who sleeps looks again every 0.1 ms */
static inline void crew_sleep(_Atomic uint32_t *at, uint32_t seen) {
    if (atomic_load(at) == seen) usleep(100);
}

static inline void crew_wake(_Atomic uint32_t *at) { (void)at; }
#endif

static void crew_take(int worker) {
    for (int64_t item; (item = atomic_fetch_add(&crew.next, 1)) < crew.items;) crew.work(crew.job, item, worker);
}

/* Waits awake for another number of calls than `seen`. Gives up, returning `seen`, after AWAKE_NS or among neighbours:
 * they get the core whenever they want it, and this thread then notices that it was away. */
static uint32_t crew_watch(uint32_t seen) {
    uint32_t calls;
    for (int64_t began = now_ns(), then = began, now; then - began < AWAKE_NS; then = now) {
        for (int i = 0; i < LOOKS; i++) {
            if ((calls = atomic_load(&crew.calls)) != seen) return calls;
            crew_pause();
        }
        if (then < atomic_load(&crew.crowded_until)) break;
        sched_yield();
        now = now_ns();
        if (now - then > LOST_NS) atomic_store(&crew.crowded_until, now + CROWDED_NS);
    }
    return seen;
}

static void *crew_worker(void *number) {
    const int worker = (int)(intptr_t)number;
    for (uint32_t seen = 0, calls;; seen = calls) {
        if ((calls = crew_watch(seen)) == seen) {
            atomic_fetch_add(&crew.sleeping, 1); /* before the number is read again: the caller writes that first */
            while ((calls = atomic_load(&crew.calls)) == seen) crew_sleep(&crew.calls, seen);
            atomic_fetch_sub(&crew.sleeping, 1);
        }
        atomic_fetch_add(&crew.inside, 1); /* before `open` is read: the caller closes first, then waits */
        if (atomic_load(&crew.open) && worker < crew.threads) crew_take(worker);
        if (atomic_fetch_sub(&crew.inside, 1) == 1 && atomic_load(&crew.waiting)) crew_wake(&crew.inside);
    }
    return NULL;
}

static void crew_forget(void) { /* a forked child has no workers, and is in no call */
    crew.workers = 0;
    atomic_store(&crew.sleeping, 0);
    atomic_store(&crew.inside, 0);
    atomic_store(&crew.open, 0);
    atomic_flag_clear(&crew.busy);
}

/* Workers beside the caller, as many as the system grants. Signals remain the business of other threads. */
static void crew_grow(int workers) {
    sigset_t all, before;
    static int registered;
    if (crew.workers >= workers) return;
    if (!registered++) pthread_atfork(NULL, NULL, crew_forget);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; crew.workers < workers; crew.workers++) {
        if (pthread_create(&thread, NULL, crew_worker, (void *)(intptr_t)(crew.workers + 1))) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Until nobody is at work on an item any more. */
static void crew_finish(void) {
    uint32_t inside;
    for (int64_t until = now_ns() + PATIENCE_NS; (inside = atomic_load(&crew.inside)) != 0;) {
        for (int i = 0; i < LOOKS && atomic_load(&crew.inside); i++) crew_pause();
        if (now_ns() < until) continue;
        atomic_store(&crew.waiting, 1);
        if ((inside = atomic_load(&crew.inside)) != 0) crew_sleep(&crew.inside, inside);
        atomic_store(&crew.waiting, 0);
    }
}

/* work(job, item, worker) for each item in [0, items), by up to `threads` threads; no two at the same time have the
 * same worker < threads. ns: about what one thread takes for all. Somebody who calls while another call is worked on
 * does everything alone. Results must not depend on who does what. */
static void crew_run(int threads, double ns, int64_t items, crew_work work, const void *job) {
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (ns < (double)SHARE_NS * threads) threads = (int)(ns / SHARE_NS);
    if (threads < 2 || items < 2 || atomic_flag_test_and_set(&crew.busy)) {
        for (int64_t item = 0; item < items; item++) work(job, item, 0);
        return;
    }
    const int64_t began = now_ns(), ran = thread_ns();
    crew_grow(threads - 1);
    crew.items = items, crew.threads = threads, crew.work = work, crew.job = job;
    atomic_store(&crew.next, 0);
    atomic_store(&crew.open, 1);
    atomic_fetch_add(&crew.calls, 1);
    if (ns >= WAKE_NS && atomic_load(&crew.sleeping)) crew_wake(&crew.calls);
    crew_take(0);
    atomic_store(&crew.open, 0);
    crew_finish();
    const int64_t ended = now_ns();
    if (ended - began - (thread_ns() - ran) > LOST_NS) atomic_store(&crew.crowded_until, ended + CROWDED_NS);
    atomic_flag_clear(&crew.busy);
}
