/* The engines on real files: what was written is there, by whichever engine it is read; errors of
 * the file come back as results. */
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>

#include "engine_fixture.h"

static void round_trips(enum pcc_io_engine engine)
{
    static const uint64_t lengths[] = {4096, 2 * MIB, 3 * MIB + 4096, 16 * MIB, 17 * MIB - 4096};
    struct pcc_io *io = opened_engine(engine);
    uint8_t *back = memory(17 * MIB, 0);

    for (uint32_t i = 0; io && i < sizeof lengths / sizeof *lengths; i++) {
        const uint64_t length = lengths[i], offset = (i % 2) * 4096 + i * MIB;
        uint8_t *bytes = memory(length, i + 1);
        CHECK_EQUAL(pcc_io_write_all(io, bytes, length, offset), 0);
        CHECK_EQUAL(pcc_io_read_all(io, back, length, offset), 0);
        CHECK(memcmp(bytes, back, length) == 0);
        CHECK_EQUAL(pcc_io_flush(io), 0);
        check_file_holds(bytes, length, offset);
        bytes[0] ^= 1;
        CHECK_EQUAL(pcc_io_write_durable_all(io, bytes, 4096, offset), 0);
        check_file_holds(bytes, 4096, offset);
        free(bytes);
    }
    pcc_io_close(io);
    free(back);
}

static void test_what_was_written_is_there(void)
{
    for (uint32_t engine = 0; engine < PCC_IO_ENGINES; engine++)
        round_trips((enum pcc_io_engine)engine);
}

static void test_any_thread_at_any_time(void)
{
    for (uint32_t engine = 0; engine < PCC_IO_ENGINES; engine++) {
        struct pcc_io *io = opened_engine((enum pcc_io_engine)engine);
        struct worker workers[THREADS];

        for (uint32_t i = 0; io && i < THREADS; i++) {
            workers[i] = (struct worker){.io = io, .number = i};
            CHECK_EQUAL(pcc_thread_start(&workers[i].thread, write_and_read, &workers[i], "worker"),
                        0);
        }
        for (uint32_t i = 0; io && i < THREADS; i++)
            (void)pthread_join(workers[i].thread, NULL);
        pcc_io_close(io);
    }
}

/* RLIMIT_FSIZE ends a transfer half-way, as other limits do: the kernel moves what is below it. */
static void test_an_error_half_way_is_an_error(void)
{
    struct rlimit before, limit;
    uint8_t *bytes = memory(16 * MIB, 5);
    struct pcc_io *io = opened_engine(PCC_IO_PWRITE);

    (void)signal(SIGXFSZ, SIG_IGN);
    CHECK_EQUAL(getrlimit(RLIMIT_FSIZE, &before), 0);
    limit = before;
    limit.rlim_cur = 5 * MIB + 4096;
    CHECK_EQUAL(setrlimit(RLIMIT_FSIZE, &limit), 0);
    CHECK_EQUAL(pcc_io_write_all(io, bytes, 16 * MIB, 0), -EFBIG);
    CHECK_EQUAL(pcc_io_write_all(io, bytes, 4 * MIB, 0), 0);
    CHECK_EQUAL(setrlimit(RLIMIT_FSIZE, &before), 0);
    CHECK_EQUAL(pcc_io_write_all(io, bytes, 16 * MIB, 0), 0);
    check_file_holds(bytes, 16 * MIB, 0);
    CHECK_EQUAL(pcc_io_read_all(io, bytes, 4096, FILE_BYTES), -EIO);
    CHECK_EQUAL(pcc_io_read_all(io, bytes, 4 * MIB, FILE_BYTES - 3 * MIB), -EIO);
    pcc_io_close(io);
    free(bytes);
}

static void test_a_read_only_file(void)
{
    uint8_t *bytes = memory(MIB, 6);

    (void)close(fresh_file());
    for (uint32_t engine = 0; engine < PCC_IO_ENGINES; engine++) {
        struct pcc_io_options options = options_of((enum pcc_io_engine)engine);
        struct pcc_io *io;
        const bool maps = engine == PCC_IO_MMAP || engine == PCC_IO_PMEM;
        if (maps)
            CHECK_EQUAL(pcc_io_open(open(path, O_RDONLY | O_CLOEXEC), &options, &io),
                        -PCC_E_UNSUPPORTED);
        options.strict = false;
        CHECK_EQUAL(pcc_io_open(open(path, O_RDONLY | O_CLOEXEC), &options, &io), 0);
        CHECK(!maps || strcmp(io->name, "pwrite") == 0);
        CHECK_EQUAL(pcc_io_read_all(io, bytes, MIB, MIB), 0);
        CHECK_EQUAL(pcc_io_write_all(io, bytes, MIB, MIB), -EBADF);
        pcc_io_close(io);
    }
    free(bytes);
}

static void test_what_cannot_hold_a_volume(void)
{
    const struct pcc_io_options options = {.engine = PCC_IO_MMAP};
    struct pcc_io *io;
    enum pcc_io_engine engine;

    CHECK_EQUAL(pcc_io_open(-1, &options, &io), -EBADF);
    CHECK_EQUAL(pcc_io_open(open(directory, O_RDONLY | O_CLOEXEC), &options, &io),
                -PCC_E_NOT_A_VOLUME);
    const int fd = memfd_create("tmpfs", MFD_CLOEXEC);
    CHECK_EQUAL(pcc_io_open(fd, &options, &io), -PCC_E_UNSUPPORTED);
    CHECK_EQUAL(fcntl(fd, F_GETFD), -1); /* it was taken */
    CHECK_EQUAL(pcc_io_engine_named("mmap", &engine), 0);
    CHECK_EQUAL(engine, PCC_IO_MMAP);
    CHECK_EQUAL(pcc_io_engine_named("auto", &engine), -EINVAL);
}

static void test_a_volume_moves_between_engines(void)
{
    const struct pcc_volume_spec spec = spec_of(4, 2);
    uint64_t sequence = 0;

    (void)unlink(path);
    CHECK_EQUAL(pcc_volume_create(path, &spec, true), 0);
    for (uint32_t i = 0; i < 3 * PCC_IO_ENGINES; i++) {
        struct pcc_io_options options = options_of((enum pcc_io_engine)(i % PCC_IO_ENGINES));
        struct pcc_volume *volume;
        struct pcc_io *io;
        int fd, second;
        options.strict = false;
        /* The lock went with the volume before: nothing of an engine outlives its close. */
        CHECK_EQUAL(pcc_volume_open_file(path, true, &fd), 0);
        CHECK_EQUAL(pcc_volume_open_file(path, true, &second), -PCC_E_LOCKED);
        CHECK_EQUAL(pcc_io_open(fd, &options, &io), 0);
        CHECK_EQUAL(pcc_volume_open_io(io, true, &volume), 0);
        CHECK(sequence == 0 || has(volume, sequence));
        CHECK_EQUAL(publish_next(volume, &sequence), 0);
        pcc_volume_close(volume);
    }
}

int main(void)
{
    make_directory();
    RUN(test_what_was_written_is_there);
    RUN(test_any_thread_at_any_time);
    RUN(test_an_error_half_way_is_an_error);
    RUN(test_a_read_only_file);
    RUN(test_what_cannot_hold_a_volume);
    RUN(test_a_volume_moves_between_engines);
    remove_directory();
    return 0;
}
