/* Which engine is taken: by measurement, and where the kernel says no. */
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include "engine_fixture.h"

static void test_the_choice_touches_its_region_only(void)
{
    uint8_t *bytes = memory(FILE_BYTES, 10);
    struct pcc_io_choice choice;
    const int fd = fresh_file();

    CHECK_EQUAL(pwrite(fd, bytes, FILE_BYTES, 0), (long long)FILE_BYTES);
    CHECK_EQUAL(pcc_io_choose(fd, MIB, 3 * MIB, true, &choice), -EINVAL);
    CHECK_EQUAL(pcc_io_choose(fd, MIB + 512, 8 * MIB, true, &choice), -EINVAL);
    CHECK_EQUAL(pcc_io_choose(fd, FILE_BYTES - 4 * MIB, 8 * MIB, true, &choice), -EINVAL);
    check_file_holds(bytes, FILE_BYTES, 0);
    CHECK_EQUAL(pcc_io_choose(fd, 2 * MIB, 12 * MIB + 4096, true, &choice), 0);
    check_file_holds(bytes, 2 * MIB, 0);
    check_file_holds(bytes + 14 * MIB, 10 * MIB, 14 * MIB);
    CHECK(choice.rounds > 0 && choice.round_bytes >= 4 * MIB && choice.round_bytes <= 12 * MIB);
    CHECK(choice.measured[choice.engine].bytes_per_second > 0);
    CHECK_EQUAL(choice.measured[PCC_IO_MMAP].bytes_per_second, 0);
    CHECK_EQUAL(choice.measured[PCC_IO_PWRITE].error, 0);
    printf("  %s of pwrite %llu, uring %llu MB/s, %u rounds of %llu MiB\n",
           pcc_io_engine_name(choice.engine),
           (unsigned long long)choice.measured[PCC_IO_PWRITE].bytes_per_second / 1000000,
           (unsigned long long)choice.measured[PCC_IO_URING].bytes_per_second / 1000000,
           choice.rounds, (unsigned long long)(choice.round_bytes / MIB));
    (void)close(fd);
    free(bytes);
}

static void test_the_choice_in_a_directory(void)
{
    struct pcc_io_choice choice;

    CHECK_EQUAL(pcc_io_choose_in(directory, true, &choice), 0);
    CHECK(choice.measured[choice.engine].bytes_per_second > 0);
    CHECK_EQUAL(pcc_io_choose_in("/nowhere", true, &choice), -ENOENT);
}

static void forbid(int call, uint32_t error)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)call, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | error),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    const struct sock_fprog program = {.len = sizeof filter / sizeof *filter, .filter = filter};

    CHECK_EQUAL(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), 0);
    /* qemu's user mode knows no filters, and has no io_uring that could be forbidden. */
    CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0 || errno == EINVAL);
}

static void check_without_uring(void)
{
    struct pcc_io_options options = options_of(PCC_IO_URING);
    struct pcc_io_choice choice;
    struct pcc_io *io;
    uint8_t *bytes = memory(MIB, 9);

    CHECK_EQUAL(pcc_io_open(fresh_file(), &options, &io), -PCC_E_UNSUPPORTED);
    options.strict = false;
    CHECK_EQUAL(pcc_io_open(fresh_file(), &options, &io), 0);
    pcc_io_limit(io, 1ull << 40);
    CHECK_EQUAL(strcmp(io->ops->name, "pwrite"), 0); /* through the throttle, too */
    CHECK_EQUAL(pcc_io_write_all(io, bytes, MIB, 0), 0);
    check_file_holds(bytes, MIB, 0);
    pcc_io_close(io);
    free(bytes);
    CHECK_EQUAL(pcc_io_choose_in(directory, true, &choice), 0);
    CHECK_EQUAL(choice.engine, PCC_IO_PWRITE);
    CHECK_EQUAL(choice.measured[PCC_IO_URING].error, -PCC_E_UNSUPPORTED);
    CHECK(choice.measured[PCC_IO_PWRITE].bytes_per_second > 0);
}

static void test_where_io_uring_is_forbidden(void)
{
    static const struct {
        int call;
        uint32_t error;
    } cases[] = {{__NR_io_uring_setup, EPERM},
                 {__NR_io_uring_setup, ENOSYS},
                 {__NR_io_uring_setup, ENOMEM},
                 {__NR_io_uring_enter, EPERM}};

    for (uint32_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            forbid(cases[i].call, cases[i].error);
            check_without_uring();
            (void)fflush(stdout);
            _exit(0);
        }
        int status;
        CHECK_EQUAL(waitpid(child, &status, 0), child);
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
}

/* Where rings cannot be had for all threads they share the one that there is. */
static void test_one_ring_for_all(void)
{
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        struct pcc_io *io = opened_engine(PCC_IO_URING);
        struct worker workers[3];
        if (!io)
            _exit(0);
        forbid(__NR_io_uring_setup, ENOMEM);
        for (uint32_t i = 0; i < 3; i++) {
            workers[i] = (struct worker){.io = io, .number = i};
            CHECK_EQUAL(pcc_thread_start(&workers[i].thread, write_and_read, &workers[i], "worker"),
                        0);
        }
        for (uint32_t i = 0; i < 3; i++)
            (void)pthread_join(workers[i].thread, NULL);
        pcc_io_close(io);
        _exit(0);
    }
    int status;
    CHECK_EQUAL(waitpid(child, &status, 0), child);
    CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
}

int main(void)
{
    make_directory();
    RUN(test_the_choice_touches_its_region_only);
    RUN(test_the_choice_in_a_directory);
    RUN(test_where_io_uring_is_forbidden);
    RUN(test_one_ring_for_all);
    remove_directory();
    return 0;
}
