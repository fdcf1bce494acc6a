/* The first records of a new volume. */
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

#include "pcc_volume.h"

static int first_record(struct pcc_record *record, const struct pcc_volume_spec *spec)
{
    struct pcc_geometry geometry;
    const size_t job_bytes = strlen(spec->job);

    if (spec->keep == 0 || spec->keep >= spec->slot_count || job_bytes > PCC_JOB_BYTES_MAX ||
        spec->next_sequence == 0)
        return -EINVAL;
    int result = pcc_geometry_plan(spec->payload_capacity_bytes, spec->slot_count,
                                   spec->block_bytes, spec->record_stride_bytes, &geometry);
    if (result != 0)
        return result;
    memset(record, 0, sizeof *record);
    record->magic = PCC_RECORD_MAGIC;
    record->format_version = PCC_FORMAT_VERSION;
    record->record_bytes = PCC_RECORD_BYTES;
    record->record_number = 1;
    record->volume_bytes = geometry.volume_bytes;
    record->record_stride_bytes = geometry.record_stride_bytes;
    record->slot_stride_bytes = geometry.slot_stride_bytes;
    record->slot_count = geometry.slot_count;
    record->block_bytes = geometry.block_bytes;
    record->checksum_algorithm = PCC_CHECKSUM_XXH3_64;
    record->keep = spec->keep;
    record->uid = spec->uid;
    record->rank = spec->rank;
    record->world_size = spec->world_size;
    record->job_bytes = (uint32_t)job_bytes;
    memcpy(record->job, spec->job, job_bytes);
    record->created_wall_ns = pcc_wall_ns();
    record->next_sequence = spec->next_sequence;
    record->incarnation = spec->incarnation;
    if (getrandom(record->volume_uuid, sizeof record->volume_uuid, 0) !=
        (ssize_t)sizeof record->volume_uuid)
        return -EIO;
    return 0;
}

int pcc_volume_format(struct pcc_io *io, const struct pcc_volume_spec *spec)
{
    struct pcc_record *record = aligned_alloc(PCC_IO_ALIGN, PCC_RECORD_BYTES);
    struct pcc_record *blank = aligned_alloc(PCC_IO_ALIGN, PCC_RECORD_BYTES);
    int result = record && blank ? first_record(record, spec) : -ENOMEM;

    if (result == 0 && io->size_bytes < record->volume_bytes)
        result = -EINVAL;
    if (result == 0) {
        const struct pcc_geometry geometry = pcc_record_geometry(record);
        memset(blank, 0, PCC_RECORD_BYTES);
        /* Whatever the other generation's place held before must not outnumber ours. */
        for (uint32_t replica = 0; result == 0 && replica < PCC_REPLICAS; replica++)
            result = pcc_io_write_durable_all(io, blank, PCC_RECORD_BYTES,
                                              pcc_geometry_record_offset(&geometry, 0, replica));
        for (uint32_t replica = 0; result == 0 && replica < PCC_REPLICAS; replica++) {
            pcc_record_seal(record, 1, replica);
            PCC_ASSERT(pcc_record_accept(record, record->offset_bytes) == 0);
            result = pcc_io_write_durable_all(io, record, PCC_RECORD_BYTES, record->offset_bytes);
        }
    }
    free(blank);
    free(record);
    return result;
}
