#include "core.h"
#include "daemon/pcc_tenant.h"

#include <sys/mman.h>

/* The ids of the segments that a copied save lies in, each once per run of its chunks. */
static PyObject *segments_new(const struct pcc_kept *kept, uint32_t place)
{
    const uint64_t payload_bytes = pcc_kept_save(kept, place)->entry.payload_bytes;
    const uint64_t pieces = pcc_ceil_div(payload_bytes, pcc_kept_header(kept)->chunk_bytes);
    uint64_t last = 0;
    PyObject *ids PCC_PY_OWNED(pcc_py_drop) = PyList_New(0);
    for (uint32_t i = 0; ids != NULL && i < pieces; i++) {
        const uint64_t id = PCC_READ_ACQUIRE(&pcc_kept_piece(kept, place, i)->segment);
        if (id != 0 && id != last)
            pcc_py_append(&ids, PyLong_FromUnsignedLongLong(id));
        last = id;
    }
    return ids != NULL ? PySet_New(ids) : NULL;
}

/* [(sequence, {segment, ...}), ...] */
static PyObject *copied_new(const struct pcc_kept *kept)
{
    PyObject *list = PyList_New(0);
    for (uint32_t i = 0; list != NULL && i < pcc_kept_header(kept)->places; i++) {
        if (!pcc_kept_is_copied(kept, i))
            continue;
        PyObject *segments = segments_new(kept, i);
        pcc_py_append(
            &list, segments == NULL
                       ? NULL
                       : Py_BuildValue("(KN)", pcc_kept_save(kept, i)->entry.sequence, segments));
    }
    return list;
}

static PyObject *state_new(struct pcc_py_state *state, const struct pcc_kept *kept)
{
    const struct pcc_kept_header *header = pcc_kept_header(kept);
    PyObject *copied = copied_new(kept);
    if (copied == NULL)
        return NULL;
    return pcc_py_result(
        state, PCC_PY_KEPT_STATE,
        Py_BuildValue("(y#Is#IIIIN)", (const char *)header->volume_uuid, (Py_ssize_t)PCC_UUID_BYTES,
                      header->uid, header->job, (Py_ssize_t)header->job_bytes, header->rank,
                      header->chunk_bytes, header->block_bytes,
                      (header->places - PCC_SAVES_PARKED) / PCC_SAVES_PER_LANE, copied));
}

PyObject *pcc_py_kept_state(PyObject *module, PyObject *args)
{
    int fd;
    if (!PyArg_ParseTuple(args, "i:kept_state", &fd))
        return NULL;
    struct pcc_py_state *state = PyModule_GetState(module);
    struct pcc_kept kept;
    void *bytes = NULL;
    uint64_t length_bytes = 0;
    int result = pcc_pool_state_map(fd, &bytes, &length_bytes);
    if (result < 0)
        return pcc_py_raise(state, result, NULL);
    result = pcc_kept_accept(&kept, bytes, length_bytes);
    PyObject *made = result < 0 ? pcc_py_raise(state, result, NULL) : state_new(state, &kept);
    (void)munmap(bytes, length_bytes);
    return made;
}
