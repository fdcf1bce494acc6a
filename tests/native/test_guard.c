/* Copies of memory that is not there: errors that name the address, whoever else handles the
 * signals. */
#include "base/pcc_guard.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/pcc_copy.h"
#include "base/pcc_thread.h"
#include "check.h"

#define PAGE 4096u
#define PAGES 64u
#define BYTES (PAGES * PAGE)

static uint8_t *pages; /* the page behind the last one is not there */
static uint8_t out[BYTES];

/* The kernel answers as for memory that was unmapped, but malloc does not get it meanwhile. */
static void unmap(uint8_t *page)
{
    CHECK(mprotect(page, PAGE, PROT_NONE) == 0);
}

static uint8_t *pages_make(void)
{
    uint8_t *made =
        mmap(NULL, BYTES + PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    CHECK(made != MAP_FAILED);
    unmap(made + BYTES);
    pattern(made, BYTES, 1);
    return made;
}

static void copy_plainly(void *context, void *to, const void *from, uint64_t length)
{
    (void)context;
    memcpy(to, from, length);
}

static void copy_hashed(void *hash, void *to, const void *from, uint64_t length)
{
    if (to == NULL)
        pcc_hash_add(hash, from, length);
    else
        pcc_copy_hashed(to, from, length, hash);
}

typedef int guarded(const struct pcc_guarded *what, uint64_t *fault_out);

/* Copies [at, at + length) of the pages, with and without a place to put them. True: it is whole.
 */
static bool whole(guarded *guard, uint64_t at, uint64_t length, const uint8_t *gone)
{
    struct pcc_hash hash;
    uint64_t fault = 0;
    int results[3];

    for (uint32_t way = 0; way < 3; way++) {
        const struct pcc_guarded what = {.copy = way == 0 ? copy_plainly : copy_hashed,
                                         .context = &hash,
                                         .to = way < 2 ? out : NULL,
                                         .from = pages + at,
                                         .length = length};
        memset(out, 0, sizeof out);
        pcc_hash_start(&hash);
        results[way] = guard(&what, &fault);
        CHECK_EQUAL(results[way], results[0]);
        if (results[way] != 0) {
            CHECK_EQUAL(results[way], -EFAULT);
            CHECK(fault >= (uintptr_t)gone && fault < (uintptr_t)gone + PAGE);
            continue;
        }
        if (way > 0)
            CHECK(pcc_hash_end(&hash) == pcc_hash_bytes(pages + at, length));
        if (way < 2)
            CHECK(memcmp(out, pages + at, length) == 0);
    }
    return results[0] == 0;
}

/* In the middle of a piece, at the edges of a page, and in the page before and behind. */
static void gaps_are_errors(guarded *guard)
{
    pages = pages_make();
    CHECK(whole(guard, 0, BYTES, NULL) && whole(guard, 1, 99, NULL));
    CHECK(!whole(guard, BYTES - 1, 2, pages + BYTES));
    CHECK(whole(guard, BYTES - 1, 1, NULL));
    CHECK(!whole(guard, BYTES, 8, pages + BYTES));
    unmap(pages + 33 * PAGE);
    CHECK(!whole(guard, 0, BYTES, pages + 33 * PAGE));
    CHECK(!whole(guard, 33 * PAGE - 1, 2, pages + 33 * PAGE));
    CHECK(!whole(guard, 34 * PAGE - 1, 2, pages + 33 * PAGE));
    CHECK(whole(guard, 0, 33 * PAGE, NULL));
    CHECK(whole(guard, 34 * PAGE, BYTES - 34 * PAGE, NULL));
    unmap(pages);
    CHECK(!whole(guard, 0, 2 * PAGE, pages));
    CHECK(munmap(pages, BYTES + PAGE) == 0);
}

static void test_memory_that_was_unmapped_is_an_error(void)
{
    CHECK(pcc_guard_ready());
    for (uint32_t i = 0; i < 3; i++) /* also the second time: the signal is not left blocked */
        gaps_are_errors(pcc_guard_copy);
}

static void test_the_kernel_reads_with_the_same_results(void)
{
    gaps_are_errors(pcc_guard_copy_slowly);
}

static void *gaps_on_a_thread(void *argument)
{
    (void)argument;
    gaps_are_errors(pcc_guard_copy);
    gaps_are_errors(pcc_guard_copy_slowly);
    return NULL;
}

static void test_our_threads_leave_faults_open(void)
{
    pthread_t thread;

    CHECK(pcc_thread_start(&thread, gaps_on_a_thread, NULL, "guarded") == 0);
    CHECK(pthread_join(thread, NULL) == 0);
}

/* Reads and stores. */
static void test_a_file_that_is_cut_is_an_error(void)
{
    const int fd = memfd_create("cut", MFD_CLOEXEC);

    CHECK(fd >= 0 && ftruncate(fd, BYTES) == 0);
    pages = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    CHECK(pages != MAP_FAILED && ftruncate(fd, BYTES / 2) == 0);
    guarded *const both[] = {pcc_guard_copy, pcc_guard_copy_slowly};
    for (uint32_t i = 0; i < 2; i++) {
        CHECK(!whole(both[i], 0, BYTES, pages + BYTES / 2));
        CHECK(whole(both[i], 0, BYTES / 2, NULL));
    }
    uint64_t fault;
    const struct pcc_guarded store = {
        .copy = copy_plainly, .to = pages + BYTES / 2, .from = out, .length = BYTES / 2};
    CHECK_EQUAL(pcc_guard_copy(&store, &fault), -EFAULT);
    CHECK(fault >= (uintptr_t)pages + BYTES / 2 && fault < (uintptr_t)pages + BYTES);
    CHECK(munmap(pages, BYTES) == 0 && close(fd) == 0);
}

static void exit_with_3(int number)
{
    (void)number;
    _exit(3);
}

/* What a child of this test ends with. */
static int ends(void (*child)(void))
{
    int status;
    const pid_t pid = fork();

    CHECK(pid >= 0);
    if (pid == 0) {
        const struct rlimit none = {0};
        (void)setrlimit(RLIMIT_CORE, &none);
        child();
        _exit(0);
    }
    CHECK_EQUAL(waitpid(pid, &status, 0), pid);
    return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

/* A fault that is nobody's copy ends the process as without a guard. */
static void fault_elsewhere(void)
{
    (void)signal(SIGSEGV, SIG_DFL); /* not the sanitizer's */
    CHECK(pcc_guard_install() == 0);
    pages = pages_make();
    CHECK(munmap(pages, BYTES + PAGE) == 0);
    *(volatile uint8_t *)pages = 1;
}

/* The copy itself is fine, but touches something else. */
static void copy_wildly(void *context, void *to, const void *from, uint64_t length)
{
    copy_plainly(context, to, from, length);
    *(volatile uint8_t *)(pages + BYTES) = 1;
}

static void fault_beside_a_copy(void)
{
    uint64_t fault;
    const struct pcc_guarded what = {.copy = copy_wildly, .to = out, .from = pages, .length = 9};

    CHECK(pcc_guard_copy(&what, &fault) == 0);
}

static void earlier_handler_gets_other_faults(void)
{
    (void)signal(SIGSEGV, exit_with_3);
    CHECK(pcc_guard_ready());
    pages = pages_make();
    CHECK(!whole(pcc_guard_copy, BYTES, 1, pages + BYTES));
    fault_beside_a_copy();
}

static void sent_signal_is_not_ours(void)
{
    (void)signal(SIGSEGV, SIG_DFL);
    CHECK(pcc_guard_ready());
    (void)raise(SIGSEGV);
}

static void later_handler_is_left_in_its_place(void)
{
    CHECK(pcc_guard_ready());
    (void)signal(SIGSEGV, exit_with_3);
    CHECK(!pcc_guard_ready());
    gaps_are_errors(pcc_guard_copy_slowly);
    pages = pages_make();
    *(volatile uint8_t *)(pages + BYTES) = 1;
}

/* As the filters of some containers do. An emulator may have no filters: the child ends. */
static void refuse_readv(void)
{
    struct sock_filter rules[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_process_vm_readv, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {.len = sizeof rules / sizeof *rules, .filter = rules};

    CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
    if (prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        _exit(0);
    CHECK(process_vm_readv(getpid(), NULL, 0, NULL, 0, 0) == -1 && errno == EPERM);
}

static void refused_call_has_the_same_results(void)
{
    refuse_readv();
    gaps_are_errors(pcc_guard_copy_slowly);
}

static void no_descriptor_is_left(void)
{
    const struct rlimit none = {0};
    uint64_t fault;
    const struct pcc_guarded what = {.copy = copy_plainly, .to = out, .from = out, .length = 9};

    refuse_readv();
    CHECK(setrlimit(RLIMIT_NOFILE, &none) == 0);
    CHECK_EQUAL(pcc_guard_copy_slowly(&what, &fault), -EMFILE);
}

int main(void)
{
    /* First: the handler before ours is the one that was there at the first install. */
    CHECK_EQUAL(ends(fault_elsewhere), -SIGSEGV);
    CHECK_EQUAL(ends(earlier_handler_gets_other_faults), 3);
    CHECK_EQUAL(ends(sent_signal_is_not_ours), -SIGSEGV);
    CHECK_EQUAL(ends(later_handler_is_left_in_its_place), 3);
    CHECK_EQUAL(ends(refused_call_has_the_same_results), 0);
    CHECK_EQUAL(ends(no_descriptor_is_left), 0);
    RUN(test_memory_that_was_unmapped_is_an_error);
    RUN(test_the_kernel_reads_with_the_same_results);
    RUN(test_our_threads_leave_faults_open);
    RUN(test_a_file_that_is_cut_is_an_error);
    return 0;
}
