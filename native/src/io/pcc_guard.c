#include "io/pcc_guard.h"

#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdlib.h>

struct guard {
    sigjmp_buf out;
    uintptr_t to, from;
    uint64_t length;
};

/* The copy that this thread is in. A pointer in static thread storage, so that the handler needs
 * no memory of its own. */
static _Thread_local struct guard *volatile current __attribute__((tls_model("initial-exec")));

static struct sigaction before;
static int install_error;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static bool is_ours(const struct guard *guard, uintptr_t address)
{
    return guard && (address - guard->to < guard->length || address - guard->from < guard->length);
}

static void on_bus_error(int number, siginfo_t *info, void *context)
{
    struct guard *guard = current;

    /* A fault, not a signal that a process sent. */
    if (info->si_code > 0 && is_ours(guard, (uintptr_t)info->si_addr)) {
        current = NULL;
        siglongjmp(guard->out, 1);
    }
    if (before.sa_flags & SA_SIGINFO) {
        before.sa_sigaction(number, info, context);
    } else if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) {
        before.sa_handler(number);
    } else {
        /* The default action, as without a guard: the fault, or the signal, comes again. */
        (void)signal(number, SIG_DFL);
        if (info->si_code <= 0)
            (void)raise(number);
    }
}

static void install(void)
{
    struct sigaction action = {.sa_flags = SA_SIGINFO | SA_ONSTACK};

    action.sa_sigaction = on_bus_error;
    (void)sigemptyset(&action.sa_mask);
    install_error = sigaction(SIGBUS, &action, &before) == 0 ? 0 : -errno;
}

int pcc_guard_install(void)
{
    (void)pthread_once(&once, install);
    return install_error;
}

int pcc_guard_copy(pcc_guard_copy_function *copy, void *to, const void *from, uint64_t length)
{
    struct guard guard = {.to = (uintptr_t)to, .from = (uintptr_t)from, .length = length};
    sigset_t bus, mask;
    volatile int result = -EIO; /* when we come back from the handler */

    /* Native threads block every signal, and a fault whose signal is blocked kills. */
    (void)sigemptyset(&bus);
    (void)sigaddset(&bus, SIGBUS);
    (void)pthread_sigmask(SIG_UNBLOCK, &bus, &mask);
    if (sigsetjmp(guard.out, 0) == 0) {
        current = &guard;
        copy(to, from, length);
        result = 0;
    }
    current = NULL;
    (void)pthread_sigmask(SIG_SETMASK, &mask, NULL);
    return result;
}
