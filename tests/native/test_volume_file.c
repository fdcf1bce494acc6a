/* Volumes as files: made whole or not at all, locked, and opened with care. */
#include <sys/stat.h>
#include <unistd.h>

#include "volume_fixture.h"
#include "volume_open.h"

static void test_volumes_as_files(void)
{
    char directory[] = "/tmp/pcc-volume-XXXXXX", path[64];
    const struct pcc_volume_spec spec = spec_of(4, 2);
    struct pcc_volume *volume, *second;
    struct stat status;
    uint64_t sequence = 0;

    CHECK(mkdtemp(directory));
    (void)snprintf(path, sizeof path, "%s/v.pcc", directory);
    CHECK_EQUAL(pcc_volume_create(path, &spec, true), 0);
    CHECK_EQUAL(pcc_volume_create(path, &spec, true), -EEXIST);
    CHECK_EQUAL(stat(path, &status), 0);
    CHECK_EQUAL(status.st_mode & 0777, 0600);
    CHECK(status.st_blocks * 512 >= status.st_size);
    CHECK_EQUAL(volume_open(path, true, 0, &volume), 0);
    CHECK_EQUAL(volume_open(path, true, 0, &second), -PCC_E_LOCKED);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK_EQUAL(volume_open(path, false, 0, &second), 0); /* readers need no lock */
    CHECK(has(second, sequence));
    pcc_volume_close(second);
    pcc_volume_close(volume);
    CHECK_EQUAL(volume_open(path, true, 1 << 30, &volume), 0);
    CHECK(has(volume, sequence));
    pcc_volume_close(volume);
    CHECK_EQUAL(volume_open(path, false, 0, &second), 0); /* and leave it to a writer */
    CHECK_EQUAL(volume_open(path, true, 0, &volume), 0);
    pcc_volume_close(volume);
    pcc_volume_close(second);
    /* Only padding is missing behind the last record; then the last byte of the record, too. */
    CHECK_EQUAL(truncate(path, status.st_size - 4096), 0);
    CHECK_EQUAL(volume_open(path, true, 0, &volume), 0);
    CHECK(has(volume, sequence));
    pcc_volume_close(volume);
    CHECK_EQUAL(truncate(path, status.st_size - 4097), 0);
    CHECK_EQUAL(volume_open(path, true, 0, &volume), -PCC_E_TRUNCATED);
    CHECK_EQUAL(truncate(path, 0), 0);
    CHECK_EQUAL(volume_open(path, true, 0, &volume), -PCC_E_NOT_A_VOLUME);
    CHECK_EQUAL(unlink(path), 0);
    CHECK_EQUAL(volume_open(path, true, 0, &volume), -ENOENT);
    CHECK_EQUAL(volume_open(directory, false, 0, &volume), -PCC_E_NOT_A_VOLUME);
    CHECK_EQUAL(rmdir(directory), 0); /* nothing temporary is left */
    CHECK_EQUAL(pcc_volume_create(path, &spec, true), -ENOENT);
}

struct named_volume {
    char directory[32], path[64], other[64];
    struct pcc_volume *volume;
    uint64_t sequence; /* of its newest checkpoint */
};

static void open_named(struct named_volume *f)
{
    const struct pcc_volume_spec spec = spec_of(4, 2);

    *f = (struct named_volume){.directory = "/tmp/pcc-place-XXXXXX"};
    CHECK(mkdtemp(f->directory));
    (void)snprintf(f->path, sizeof f->path, "%s/v.pcc", f->directory);
    (void)snprintf(f->other, sizeof f->other, "%s/other", f->directory);
    CHECK_EQUAL(pcc_volume_create(f->path, &spec, true), 0);
    CHECK_EQUAL(volume_open(f->path, true, 0, &f->volume), 0);
    CHECK_EQUAL(publish_next(f->volume, &f->sequence), 0);
    CHECK_EQUAL(pcc_volume_in_place(f->volume), 0);
}

static void close_named(struct named_volume *f)
{
    pcc_volume_close(f->volume);
    (void)unlink(f->path);
    (void)unlink(f->other);
    CHECK_EQUAL(rmdir(f->directory), 0);
}

/* Nothing is published, and the newest durable checkpoint stays the one from before. */
static void check_refused(struct named_volume *f, int code)
{
    uint64_t next = 0;

    CHECK_EQUAL(pcc_volume_in_place(f->volume), code);
    CHECK_EQUAL(publish_next(f->volume, &next), code);
    CHECK(has(f->volume, f->sequence) && !has(f->volume, next));
}

static void test_nothing_is_published_into_a_file_that_was_removed(void)
{
    struct named_volume f;

    open_named(&f);
    CHECK_EQUAL(unlink(f.path), 0);
    check_refused(&f, -PCC_E_REMOVED);
    close_named(&f);
}

static void test_nothing_is_published_while_the_file_is_moved_away(void)
{
    struct named_volume f;

    open_named(&f);
    CHECK_EQUAL(rename(f.path, f.other), 0);
    for (uint32_t i = 0; i < 8; i++) /* slots are not used up */
        check_refused(&f, -PCC_E_REMOVED);
    CHECK_EQUAL(rename(f.other, f.path), 0);
    CHECK_EQUAL(publish_next(f.volume, &f.sequence), 0);
    close_named(&f);
}

static void test_nothing_is_published_into_a_file_that_was_replaced(void)
{
    const struct pcc_volume_spec spec = spec_of(4, 2);
    struct named_volume f;

    open_named(&f);
    CHECK_EQUAL(pcc_volume_create(f.other, &spec, true), 0);
    CHECK_EQUAL(rename(f.other, f.path), 0);
    check_refused(&f, -PCC_E_REPLACED);
    close_named(&f);
}

static void test_nothing_is_published_into_a_file_that_was_cut(void)
{
    struct named_volume f;

    open_named(&f);
    CHECK_EQUAL(truncate(f.path, 8192), 0);
    check_refused(&f, -PCC_E_TRUNCATED);
    close_named(&f);
}

/* As when it goes between the look and the end of the record: nobody is told, and it stops. */
static void test_a_record_that_was_written_into_a_removed_file_counts_for_nothing(void)
{
    struct named_volume f;

    open_named(&f);
    CHECK_EQUAL(unlink(f.path), 0);
    CHECK_EQUAL(pcc_volume_begin_incarnation(f.volume, 2, NO_ID, 1), -PCC_E_REMOVED);
    CHECK(pcc_volume_stopped(f.volume));
    close_named(&f);
}

int main(void)
{
    RUN(test_volumes_as_files);
    RUN(test_nothing_is_published_into_a_file_that_was_removed);
    RUN(test_nothing_is_published_while_the_file_is_moved_away);
    RUN(test_nothing_is_published_into_a_file_that_was_replaced);
    RUN(test_nothing_is_published_into_a_file_that_was_cut);
    RUN(test_a_record_that_was_written_into_a_removed_file_counts_for_nothing);
    return 0;
}
