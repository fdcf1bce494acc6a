/* qemu's user mode drops advice that it does not know, and calls that success; and it passes on
 * that statx tells the alignment of direct I/O, without the alignment. Here both are as on a kernel
 * that does not know them, so that the core does without. Preloaded. */
#define _GNU_SOURCE
#include <errno.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { POPULATE_READ = 22, POPULATE_WRITE = 23, COLLAPSE = 25, DIRECT_ALIGNMENT = 0x2000 };

int statx(int directory, const char *restrict path, int flags, unsigned mask,
          struct statx *restrict out)
{
    const long result = syscall(SYS_statx, directory, path, flags, mask, out);

    if (result == 0)
        out->stx_mask &= ~(unsigned)DIRECT_ALIGNMENT;
    return (int)result;
}

int madvise(void *bytes, size_t length, int advice)
{
    if (advice == POPULATE_READ || advice == POPULATE_WRITE || advice == COLLAPSE) {
        errno = EINVAL;
        return -1;
    }
    return (int)syscall(SYS_madvise, bytes, length, advice);
}
