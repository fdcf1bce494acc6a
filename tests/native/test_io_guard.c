/* Stores to mappings whose page cannot be allocated: errors, never signals. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>

#include "engine_fixture.h"

static void *store_beyond_the_end(void *argument)
{
    uint8_t *bytes = memory(MIB, 7);

    for (uint32_t i = 0; i < 3; i++)
        CHECK_EQUAL(pcc_io_write_all(argument, bytes, MIB, 8 * MIB), -EIO);
    CHECK_EQUAL(pcc_io_write_durable_all(argument, bytes, 4096, 8 * MIB), -EIO);
    CHECK_EQUAL(pcc_io_write_all(argument, bytes, MIB, FILE_BYTES), -EFBIG);
    CHECK_EQUAL(pcc_io_write_all(argument, bytes, MIB, MIB), 0);
    check_file_holds(bytes, MIB, MIB);
    free(bytes);
    return NULL;
}

/* Once for each engine, on this thread and on one of ours, which blocks other signals. */
static void test_a_page_that_is_gone_is_an_error(void)
{
    for (uint32_t engine = PCC_IO_MMAP; engine <= PCC_IO_PMEM; engine++) {
        struct pcc_io *io = opened_engine((enum pcc_io_engine)engine);
        pthread_t thread;

        CHECK(io);
        CHECK_EQUAL(truncate(path, 4 * MIB), 0);
        (void)store_beyond_the_end(io);
        CHECK_EQUAL(pcc_thread_start(&thread, store_beyond_the_end, io, "worker"), 0);
        (void)pthread_join(thread, NULL);
        CHECK_EQUAL(pcc_io_flush(io), 0);
        pcc_io_close(io);
    }
}

static void exit_with_3(int number)
{
    (void)number;
    _exit(3);
}

/* A fault that is nobody's copy is none of ours. */
static void test_other_bus_errors_are_not_ours(void)
{
    for (uint32_t handled = 0; handled < 2; handled++) {
        const pid_t child = fork();
        CHECK(child >= 0);
        if (child == 0) {
            (void)signal(SIGBUS, handled ? exit_with_3 : SIG_DFL);
            struct pcc_io *io = opened_engine(PCC_IO_MMAP);
            CHECK(io && truncate(path, 0) == 0);
            const uint8_t *map = mmap(NULL, 4096, PROT_READ, MAP_SHARED, open(path, O_RDONLY), 0);
            _exit(*(const volatile uint8_t *)map);
        }
        int status;
        CHECK_EQUAL(waitpid(child, &status, 0), child);
        if (handled)
            CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 3);
        else
            CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
    }
}

int main(void)
{
    make_directory();
    RUN(test_a_page_that_is_gone_is_an_error);
    RUN(test_other_bus_errors_are_not_ours);
    remove_directory();
    return 0;
}
