#include "base/pcc_guard.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <unistd.h>

#define PART_BYTES 65536u

struct guard {
    struct pcc_guard guard; /* first member */
    sigjmp_buf out;
    volatile uint64_t fault;
};

/* The work that this thread is in. A pointer in static thread storage, so that the handler needs
 * no memory of its own. */
static _Thread_local struct guard *volatile current __attribute__((tls_model("initial-exec")));

static struct sigaction before_bus, before_segv;
static int install_error;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static bool is_ours(const struct guard *guard, uintptr_t address)
{
    return guard != NULL && (address - guard->guard.from < guard->guard.length ||
                             address - guard->guard.to < guard->guard.length);
}

static void pass_on(const struct sigaction *before, int number, siginfo_t *info, void *context)
{
    if (before->sa_flags & SA_SIGINFO) {
        before->sa_sigaction(number, info, context);
    } else if (before->sa_handler != SIG_DFL && before->sa_handler != SIG_IGN) {
        before->sa_handler(number);
    } else {
        /* The default action, as without a guard: the fault, or the signal, comes again. */
        (void)signal(number, SIG_DFL);
        if (info->si_code <= 0)
            (void)raise(number);
    }
}

static void on_fault(int number, siginfo_t *info, void *context)
{
    struct guard *guard = current;

    /* A fault, not a signal that a process sent. */
    if (info->si_code > 0 && is_ours(guard, (uintptr_t)info->si_addr)) {
        current = NULL;
        guard->fault = (uintptr_t)info->si_addr;
        siglongjmp(guard->out, 1);
    }
    pass_on(number == SIGBUS ? &before_bus : &before_segv, number, info, context);
}

static void install(void)
{
    struct sigaction action = {.sa_flags = SA_SIGINFO | SA_ONSTACK};

    action.sa_sigaction = on_fault;
    (void)sigemptyset(&action.sa_mask);
    if (sigaction(SIGBUS, &action, &before_bus) != 0 ||
        sigaction(SIGSEGV, &action, &before_segv) != 0)
        install_error = -errno;
}

int pcc_guard_install(void)
{
    (void)pthread_once(&once, install);
    return install_error;
}

static bool is_still_ours(int number)
{
    struct sigaction now;

    return sigaction(number, NULL, &now) == 0 && (now.sa_flags & SA_SIGINFO) != 0 &&
           now.sa_sigaction == on_fault;
}

bool pcc_guard_ready(void)
{
    return pcc_guard_install() == 0 && is_still_ours(SIGBUS) && is_still_ours(SIGSEGV);
}

/* The handler came back with its signal blocked. */
static void unblock(void)
{
    sigset_t set;

    (void)sigemptyset(&set);
    (void)sigaddset(&set, SIGBUS);
    (void)sigaddset(&set, SIGSEGV);
    (void)pthread_sigmask(SIG_UNBLOCK, &set, NULL);
}

int pcc_guard_run(void (*work)(void *context, struct pcc_guard *guard), void *context,
                  uint64_t *fault_out)
{
    struct guard guard = {0};

    if (sigsetjmp(guard.out, 0) == 0) {
        current = &guard;
        work(context, &guard.guard);
        current = NULL;
        return 0;
    }
    unblock();
    *fault_out = guard.fault;
    return -EFAULT;
}

static void copy_one(void *context, struct pcc_guard *guard)
{
    const struct pcc_guarded *what = context;

    pcc_guard_expect(guard, what);
    what->copy(what->context, what->to, what->from, what->length);
}

int pcc_guard_copy(const struct pcc_guarded *what, uint64_t *fault_out)
{
    struct pcc_guarded one = *what;

    return pcc_guard_run(copy_one, &one, fault_out);
}

/* Through a file in memory: three times slower, but allowed everywhere, and for memory of drivers,
 * too. */
static int64_t read_by_file(void *to, const void *from, size_t length)
{
    const int fd = memfd_create("pcc-guard", MFD_CLOEXEC);

    if (fd < 0)
        return -errno;
    ssize_t count = pwrite(fd, from, length, 0);
    if (count > 0)
        count = pread(fd, to, (size_t)count, 0);
    const int error = errno;
    (void)close(fd);
    return count > 0 ? count : count == 0 ? -EFAULT : -error;
}

/* The bytes that were read; else -errno. */
static int64_t read_by_kernel(void *to, const void *from, size_t length)
{
    const struct iovec there = {.iov_base = (void *)(uintptr_t)from, .iov_len = length};
    const struct iovec here = {.iov_base = to, .iov_len = length};
    const ssize_t count = process_vm_readv(getpid(), &here, 1, &there, 1, 0);

    return count > 0 ? count : read_by_file(to, from, length);
}

int pcc_guard_copy_slowly(const struct pcc_guarded *what, uint64_t *fault_out)
{
    const uint64_t page = (uint64_t)sysconf(_SC_PAGESIZE);
    uint8_t *bytes = malloc(PART_BYTES);
    int64_t count = bytes != NULL ? 0 : -ENOMEM;
    uint64_t at = 0;

    for (; count >= 0 && at < what->length; at += (uint64_t)count) {
        const uint8_t *from = (const uint8_t *)what->from + at;
        const uint64_t left = what->length - at < PART_BYTES ? what->length - at : PART_BYTES;
        const uint64_t in_page = page - (uintptr_t)from % page;
        count = read_by_kernel(bytes, from, left);
        if (count == -EFAULT && in_page < left) /* what there is before the gap */
            count = read_by_kernel(bytes, from, in_page);
        if (count < 0)
            break;
        what->copy(what->context, what->to != NULL ? (uint8_t *)what->to + at : NULL, bytes,
                   (uint64_t)count);
    }
    free(bytes);
    if (count >= 0)
        return 0;
    *fault_out = (uintptr_t)what->from + at;
    return (int)count;
}
