/* Whole transfers over engines that move less than asked, and the engine that limits bandwidth. */
#include <string.h>

#include "volume_fixture.h"

static void test_short_and_interrupted_transfers_resume(void)
{
    struct memory_io *media = formatted(4, 2);
    uint8_t *buffer = aligned_alloc(4096, 5 * 4096), *back = aligned_alloc(4096, 5 * 4096);

    CHECK(buffer && back);
    memset(buffer, 0x5a, 5 * 4096);
    media->short_every = 6000;
    media->interrupts = 3;
    CHECK_EQUAL(pcc_io_write_all(&media->io, buffer, 5 * 4096, 32768), 0);
    media->interrupts = 3;
    CHECK_EQUAL(pcc_io_read_all(&media->io, back, 5 * 4096, 32768), 0);
    CHECK(memcmp(buffer, back, 5 * 4096) == 0);
    media->interrupts = -1;
    CHECK_EQUAL(pcc_io_write_all(&media->io, buffer, 4096, 32768), -EINTR);
    media->interrupts = 0;
    media->short_every = 512;
    CHECK_EQUAL(pcc_io_write_all(&media->io, buffer, 4096, 32768), -EIO);
    free(buffer);
    free(back);
    memory_free(media);
}

static void test_the_throttle_delays_but_changes_nothing(void)
{
    struct memory_io *media = memory_new(1 << 20);
    uint8_t *buffer = aligned_alloc(4096, 1 << 20);
    struct pcc_io *io;

    CHECK(buffer);
    memset(buffer, 0x33, 1 << 20);
    CHECK_EQUAL(pcc_io_throttle_open(&media->io, 0, &io), -EINVAL);
    CHECK_EQUAL(pcc_io_throttle_open(&media->io, 10 << 20, &io), 0);
    CHECK_EQUAL(io->size_bytes, 1 << 20);
    const uint64_t before = pcc_now_ns();
    CHECK_EQUAL(pcc_io_write_all(io, buffer, 1 << 20, 0), 0);
    CHECK(pcc_now_ns() - before >= 70000000); /* 100 ms less the burst */
    CHECK(memcmp(media->bytes, buffer, 1 << 20) == 0);
    media->fail_flushes = 1;
    CHECK_EQUAL(pcc_io_flush(io), -EIO);
    pcc_io_close(io);
    free(buffer);
    memory_free(media);
}

int main(void)
{
    RUN(test_short_and_interrupted_transfers_resume);
    RUN(test_the_throttle_delays_but_changes_nothing);
    return 0;
}
