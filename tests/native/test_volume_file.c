/* Volumes as files: made whole or not at all, locked, and opened with care. */
#include <sys/stat.h>
#include <unistd.h>

#include "volume_fixture.h"

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
    CHECK_EQUAL(pcc_volume_open(path, true, true, 0, &volume), 0);
    CHECK_EQUAL(pcc_volume_open(path, true, true, 0, &second), -PCC_E_LOCKED);
    CHECK_EQUAL(publish_next(volume, &sequence), 0);
    CHECK_EQUAL(pcc_volume_open(path, false, true, 0, &second), 0); /* readers need no lock */
    CHECK(has(second, sequence));
    pcc_volume_close(second);
    pcc_volume_close(volume);
    CHECK_EQUAL(pcc_volume_open(path, true, true, 1 << 30, &volume), 0);
    CHECK(has(volume, sequence));
    pcc_volume_close(volume);
    CHECK_EQUAL(truncate(path, status.st_size - 1), 0);
    CHECK_EQUAL(pcc_volume_open(path, true, true, 0, &volume), -PCC_E_TRUNCATED);
    CHECK_EQUAL(truncate(path, 0), 0);
    CHECK_EQUAL(pcc_volume_open(path, true, true, 0, &volume), -PCC_E_NOT_A_VOLUME);
    CHECK_EQUAL(unlink(path), 0);
    CHECK_EQUAL(pcc_volume_open(path, true, true, 0, &volume), -ENOENT);
    CHECK_EQUAL(pcc_volume_open(directory, false, true, 0, &volume), -PCC_E_NOT_A_VOLUME);
    CHECK_EQUAL(rmdir(directory), 0); /* nothing temporary is left */
    CHECK_EQUAL(pcc_volume_create(path, &spec, true), -ENOENT);
}

int main(void)
{
    RUN(test_volumes_as_files);
    return 0;
}
