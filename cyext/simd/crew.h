/* Threads that share the items of a call, and never wait for one that is not there.
 *
 * A decode step makes two hundred calls of 10 to 200 µs each. OpenMP ends a call when all of its threads have arrived:
 * one that sleeps takes 50 µs to come, one that another program keeps from its core takes milliseconds. Here whoever
 * runs takes items one by one, the caller among them, and the call ends with the last item. A worker that comes late
 * finds nothing to do; one that has nothing to do stays awake for a while, as long as nobody else wants its core
 * (docs/decisions/002). */
#pragma once
#include "cpu.h"
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <unistd.h>

#define AWAKE_NS 1000000 /* longer than the pauses within a decode step and between two */
#define LOOKS 16         /* at the number of calls, before a worker lets others pass and looks at the time */
#define MOST_THREADS 256

typedef void (*crew_work)(const void *job, int64_t item, int worker);

static struct {
    atomic_flag busy;         /* a call is being worked on */
    _Atomic uint32_t calls;   /* so far: what workers wait for a change of */
    _Atomic int sleeping;     /* workers */
    _Atomic int inside;       /* workers that may read what stands below */
    _Atomic int open;         /* whether they may begin to */
    _Atomic int64_t next;     /* item */
    int64_t items;
    int threads;              /* of this call, the caller's included */
    crew_work work;
    const void *job;
    int workers;              /* that have been started */
} crew = {.busy = ATOMIC_FLAG_INIT};

static inline void crew_pause(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void crew_take(int worker) {
    for (int64_t item; (item = atomic_fetch_add(&crew.next, 1)) < crew.items;) crew.work(crew.job, item, worker);
}

/* Returns the number of calls as soon as it is not `seen`. */
static uint32_t crew_await(uint32_t seen) {
    const int64_t until = now_ns() + AWAKE_NS;
    uint32_t calls;
    do {
        for (int i = 0; i < LOOKS; i++) {
            if ((calls = atomic_load(&crew.calls)) != seen) return calls;
            crew_pause();
        }
        sched_yield();
    } while (now_ns() < until);
    atomic_fetch_add(&crew.sleeping, 1); /* before the number is read again, as the caller writes it before this */
    while ((calls = atomic_load(&crew.calls)) == seen)
        syscall(SYS_futex, &crew.calls, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
    atomic_fetch_sub(&crew.sleeping, 1);
    return calls;
}

static void *crew_worker(void *number) {
    const int worker = (int)(intptr_t)number;
    for (uint32_t seen = 0;;) {
        seen = crew_await(seen);
        atomic_fetch_add(&crew.inside, 1); /* before `open` is read: the caller closes first and waits then */
        if (atomic_load(&crew.open) && worker < crew.threads) crew_take(worker);
        atomic_fetch_sub(&crew.inside, 1);
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
    if (crew.workers >= workers) return;
    static int registered;
    if (!registered++) pthread_atfork(NULL, NULL, crew_forget);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    for (pthread_t thread; crew.workers < workers; crew.workers++) {
        if (pthread_create(&thread, NULL, crew_worker, (void *)(intptr_t)(crew.workers + 1))) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* work(job, item, worker) for each item in [0, items), by up to `threads` threads. No two that run at the same time
 * have the same worker < threads. Somebody who calls while another call is worked on does all of it alone. */
static void crew_run(int threads, int64_t items, crew_work work, const void *job) {
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    if (threads < 2 || items < 2 || atomic_flag_test_and_set(&crew.busy)) {
        for (int64_t item = 0; item < items; item++) work(job, item, 0);
        return;
    }
    crew_grow(threads - 1);
    crew.items = items, crew.threads = threads, crew.work = work, crew.job = job;
    atomic_store(&crew.next, 0);
    atomic_store(&crew.open, 1);
    atomic_fetch_add(&crew.calls, 1);
    if (atomic_load(&crew.sleeping)) syscall(SYS_futex, &crew.calls, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
    crew_take(0);
    atomic_store(&crew.open, 0);
    for (int looks = 1; atomic_load(&crew.inside); looks++)
        if (looks % LOOKS) crew_pause();
        else sched_yield();
    atomic_flag_clear(&crew.busy);
}
