/* The control file: faults on demand, and counters. */
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "standin.h"

static struct standin_control nobody;

CUresult control_open(void)
{
    const char *path = getenv("PCCHECK_STANDIN_FAULTS");
    struct standin_control *control = &nobody;
    if (path && *path) {
        const int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd < 0)
            return CUDA_ERROR_UNKNOWN;
        control = mmap(NULL, sizeof(*control), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
        (void)close(fd);
        if (control == MAP_FAILED || control->magic != STANDIN_CONTROL_MAGIC)
            return CUDA_ERROR_UNKNOWN;
    }
    standin.control = control;
    for (uint64_t *gauge = &control->open_mappings; gauge <= &control->held_copies; gauge++)
        __atomic_store_n(gauge, 0, __ATOMIC_RELEASE); /* a process before this one may be dead */
    __atomic_store_n(&control->pid, (uint64_t)getpid(), __ATOMIC_RELEASE);
    return CUDA_SUCCESS;
}

void count(uint64_t *word, int64_t change)
{
    (void)__atomic_add_fetch(word, (uint64_t)change, __ATOMIC_ACQ_REL);
}

uint64_t peek(const uint64_t *word)
{
    return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

bool control_take(uint64_t *fail_count)
{
    const uint64_t left = peek(fail_count);
    if (left && left != STANDIN_ALWAYS)
        count(fail_count, -1);
    return left != 0;
}

bool code_is_sticky(CUresult code)
{
    return code == CUDA_ERROR_ECC_UNCORRECTABLE || code == CUDA_ERROR_ILLEGAL_ADDRESS ||
           code == 702 || code == CODE_CONTEXT_IS_DESTROYED || code == 710 ||
           (code >= CUDA_ERROR_HARDWARE_STACK_ERROR && code <= 721);
}

CUresult control_copy_fault(unsigned kind, bool *async)
{
    struct standin_control *control = standin.control;
    *async = peek(&control->copy_fail_async) != 0;
    if (!(peek(&control->copy_fail_kinds) & kind) || !peek(&control->copy_fail_at))
        return CUDA_SUCCESS;
    if (peek(&control->copy_fail_at) != STANDIN_ALWAYS) {
        count(&control->copy_fail_at, -1);
        if (peek(&control->copy_fail_at))
            return CUDA_SUCCESS;
    }
    return (CUresult)peek(&control->copy_fail_code);
}
