#include "disk/pcc_named_file.h"

#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

int pcc_named_file_take(int fd, const char *path, struct pcc_named_file *out)
{
    struct stat status;

    if (fstat(fd, &status) != 0)
        return -errno;
    const size_t length = strlen(path) + 1;
    char *const own = malloc(length);
    if (!own)
        return -ENOMEM;
    (void)memcpy(own, path, length);
    *out = (struct pcc_named_file){
        .path = own,
        .device = (uint64_t)status.st_dev,
        .inode = (uint64_t)status.st_ino,
        .size_bytes = (uint64_t)status.st_size,
    };
    return 0;
}

int pcc_named_file_check(const struct pcc_named_file *file)
{
    struct stat status;

    if (!file->path)
        return 0;
    if (lstat(file->path, &status) != 0)
        return errno == ENOENT || errno == ENOTDIR ? -PCC_E_REMOVED : -errno;
    if ((uint64_t)status.st_dev != file->device || (uint64_t)status.st_ino != file->inode)
        return -PCC_E_REPLACED;
    return (uint64_t)status.st_size < file->size_bytes ? -PCC_E_TRUNCATED : 0;
}

void pcc_named_file_destroy(struct pcc_named_file *file)
{
    free(file->path);
    memset(file, 0, sizeof *file);
}
