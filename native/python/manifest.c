/* Manifests of checkpoints that lie on other nodes: what they say, and the blocks that follow. */
#include "base/pcc_range.h"
#include "core.h"
#include "disk/pcc_format.h"

static bool is_header(const Py_buffer *manifest)
{
    return (size_t)manifest->len >= sizeof(struct pcc_manifest_header) &&
           (uintptr_t)manifest->buf % _Alignof(struct pcc_manifest_header) == 0;
}

PyObject *pcc_py_manifest_facts(PyObject *module, PyObject *args)
{
    Py_buffer bytes PCC_PY_OWNED(PyBuffer_Release) = {0};
    uint8_t digest[PCC_UUID_BYTES];
    _Static_assert(sizeof digest == PCC_DIGEST_BYTES, "an id and a digest are converted alike");
    if (!PyArg_ParseTuple(args, "y*O&:manifest_facts", &bytes, pcc_py_id, digest))
        return NULL;
    const int result = is_header(&bytes)
                           ? pcc_manifest_trust(bytes.buf, (uint64_t)bytes.len, digest)
                           : -PCC_E_DAMAGED;
    if (result < 0)
        return pcc_py_raise(PyModule_GetState(module), result, NULL);
    const struct pcc_manifest_header *header = bytes.buf;
    return Py_BuildValue("(KKKI)", header->payload_bytes, header->tree_offset_bytes,
                         header->tree_bytes, header->block_bytes);
}

/* Whether these bytes are whole blocks of the payload. */
static bool are_blocks(const struct pcc_manifest_header *header, uint64_t offset_bytes,
                       uint64_t length_bytes)
{
    return offset_bytes % header->block_bytes == 0 &&
           pcc_is_within(offset_bytes, length_bytes, header->payload_bytes) &&
           (length_bytes % header->block_bytes == 0 ||
            offset_bytes + length_bytes == header->payload_bytes);
}

static int place(const Py_buffer *manifest, const Py_buffer *blocks, uint64_t offset_bytes,
                 const struct pcc_py_ranges *ranges)
{
    const struct pcc_manifest_header *header = manifest->buf;
    const uint64_t length_bytes = (uint64_t)blocks->len;
    const uint64_t *checksums = (const uint64_t *)(const void *)(header + 1);

    if (header->block_bytes == 0 ||
        (uint64_t)manifest->len != pcc_manifest_bytes(header->payload_bytes, header->block_bytes,
                                                      header->base_sequence != 0) ||
        !are_blocks(header, offset_bytes, length_bytes))
        return -EINVAL;
    checksums += offset_bytes / header->block_bytes;
    if (!pcc_checksums_match(blocks->buf, length_bytes, header->block_bytes, checksums))
        return -PCC_E_DAMAGED;
    pcc_ranges_fill(ranges->items, ranges->count, blocks->buf, offset_bytes, length_bytes);
    return 0;
}

PyObject *pcc_py_manifest_place(PyObject *module, PyObject *args)
{
    Py_buffer manifest PCC_PY_OWNED(PyBuffer_Release) = {0};
    Py_buffer blocks PCC_PY_OWNED(PyBuffer_Release) = {0};
    struct pcc_py_ranges ranges PCC_PY_OWNED(pcc_py_ranges_done) = {0};
    uint64_t offset_bytes;
    int result = -EINVAL;
    if (!PyArg_ParseTuple(args, "y*y*O&O&:manifest_place", &manifest, &blocks, pcc_py_u64,
                          &offset_bytes, pcc_py_ranges, &ranges))
        return NULL;
    if (is_header(&manifest))
        PCC_PY_UNLOCKED(result = place(&manifest, &blocks, offset_bytes, &ranges));
    return result < 0 ? pcc_py_raise(PyModule_GetState(module), result, NULL) : Py_NewRef(Py_None);
}
