/* Client: its life, saving, waits and loads, GPUs. */
#include "core.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define HANDLE struct pcc_client
#define CLOSE_TRIES 200
#define CLOSE_PAUSE_NS 1000000l
/* Waits return to Python this often, for signals and for close() by another thread. */
#define SLICE_NS 50000000ull
/* A slice that ends so late: this process was stopped (a suspended batch job, a frozen cgroup). */
#define STOPPED_NS 1000000000ull

PCC_PY_CLOSES(client_close, pcc_client_close)

static PyObject *client_new(PyTypeObject *type, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"socket_fd", "page_fd", NULL};
    PyObject *socket;
    PyObject *page;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OO:Client", names, &socket, &page))
        return NULL;
    int socket_fd = PyObject_AsFileDescriptor(socket);
    int page_fd = socket_fd < 0 ? -1 : PyObject_AsFileDescriptor(page);
    if (page_fd < 0)
        return NULL;
    struct pcc_client *client = NULL;
    int result;
    PCC_PY_UNLOCKED(result = pcc_client_open(socket_fd, page_fd, &client));
    return pcc_py_object_new(type, "Client", result, client, client_close);
}

/* The client's thread reads the caller's tensors, so close() returns when that thread has ended.
 * Calls in other threads, which return within a slice, end first. The wait for them is bounded: a
 * signal handler may close the client that its own thread is waiting on, and then the interrupted
 * call closes the client when it returns. */
static PyObject *method_close(PyObject *self, PyObject *Py_UNUSED(unused))
{
    const struct timespec pause = {.tv_nsec = CLOSE_PAUSE_NS};
    pcc_py_close(self);
    for (int i = 0; pcc_py_lease(self)->users > 0 && i < CLOSE_TRIES; i++)
        PCC_PY_UNLOCKED(nanosleep(&pause, NULL));
    Py_RETURN_NONE;
}

/* -- quick calls: atomics and at most one poll, so the GIL is kept ------------------------------
 */

PCC_PY_ANSWERS(client_alive, PyObject, PyBool_FromLong(pcc_client_alive(handle)))
PCC_PY_ANSWERS(client_unmapped, void, PyLong_FromLong(-pcc_client_unmapped(handle)))
PCC_PY_ANSWERS(client_chunk_bytes, void, PyLong_FromUnsignedLong(pcc_client_chunk_bytes(handle)))

static PyObject *client_state(PyObject *self, PyObject *number)
{
    PCC_PY_NUMBER(snapshot, number);
    struct pcc_client_state now;
    PCC_PY_ENTER();
    const int result = pcc_client_state(handle, snapshot, &now);
    if (result == -ENOENT)
        Py_RETURN_NONE;
    if (result < 0)
        return pcc_py_done(self, result);
    return pcc_py_result(pcc_py_state_of(Py_TYPE(self)), PCC_PY_CLIENT_STATE,
                         Py_BuildValue("(IIKKNisKIssK)", now.word, now.outcome, now.sequence,
                                       now.newer, PyBool_FromLong(now.source_read), now.error,
                                       now.error ? pcc_error_name(now.error) : "", now.fault,
                                       (unsigned)now.reason.cause, pcc_stage_name(now.reason.stage),
                                       now.reason.error ? pcc_error_name(now.reason.error) : "",
                                       now.reason.argument));
}

/* -- saving ------------------------------------------------------------------------------------ */

PCC_PY_CALLS_NUMBER(client_request, PCC_PY_RETURN_DONE, pcc_client_request)

static PyObject *client_submit(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot",    "ranges",        "inline_ranges", "tail",
                            "tail_offset", "device_ranges", "pulled_bytes",  "pulled_devices",
                            "provisional", "offered_bytes", "step",          "skip",
                            "map",         "frozen_bytes",  "held_at_ns",    "held_ns",
                            "base",        "turn",          "descents",      "row",
                            "interval",    "division",      "level",         NULL};
    uint64_t snapshot;
    struct pcc_submission submission = {0};
    struct pcc_request *request = &submission.request;
    struct pcc_py_ranges ranges PCC_PY_OWNED(pcc_py_ranges_done) = {0};
    struct pcc_py_ranges inline_ranges PCC_PY_OWNED(pcc_py_ranges_done) = {0};
    struct pcc_py_ranges device_ranges PCC_PY_OWNED(pcc_py_ranges_done) = {0};
    Py_buffer tail PCC_PY_OWNED(PyBuffer_Release) = {0};
    bool skip = false;
    long long step = 0;
    if (!PyArg_ParseTupleAndKeywords(
            args, kwargs, "O&O&O&y*O&|O&O&O&$O&O&LO&O&O&O&O&O&O&O&O&O&O&O&:submit", names,
            pcc_py_u64, &snapshot, pcc_py_ranges, &ranges, pcc_py_ranges, &inline_ranges, &tail,
            pcc_py_u64, &submission.tail_offset_bytes, pcc_py_device_ranges, &device_ranges,
            pcc_py_u64, &submission.pulled_bytes, pcc_py_u32, &submission.pulled_devices,
            pcc_py_bool, &submission.provisional, pcc_py_u64, &submission.offered_bytes, &step,
            pcc_py_bool, &skip, pcc_py_u64, &request->map, pcc_py_u64, &request->frozen_bytes,
            pcc_py_u64, &request->held_at_ns, pcc_py_u64, &request->held_ns, pcc_py_u64,
            &request->base, pcc_py_u64, &request->turn, pcc_py_u64, &request->descents, pcc_py_u64,
            &request->row, pcc_py_u64, &request->interval, pcc_py_u64, &request->division,
            pcc_py_u32, &request->level))
        return NULL;
    request->step = step;
    request->flags = skip ? PCC_REQUEST_SKIP : 0;
    submission.ranges = ranges.items;
    submission.range_count = ranges.count;
    submission.inline_ranges = inline_ranges.items;
    submission.inline_count = inline_ranges.count;
    submission.tail = tail.buf;
    submission.tail_bytes = (uint64_t)tail.len;
    submission.device_ranges = device_ranges.device_items;
    submission.device_range_count = device_ranges.count;
    PCC_PY_RETURN_DONE(pcc_client_submit(handle, snapshot, &submission));
}

PCC_PY_CALLS_NUMBER(client_confirm, PCC_PY_RETURN_NONE, pcc_client_confirm)
PCC_PY_CALLS_NUMBER(client_write, PCC_PY_RETURN_BOOL, pcc_client_write)
PCC_PY_CALLS_NUMBER(client_abandon, PCC_PY_RETURN_BOOL, pcc_client_abandon)

/* -- images of processes ----------------------------------------------------------------------- */

static PyObject *client_image_begin(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", "bound_bytes", "step", "frozen_bytes", NULL};
    uint64_t snapshot;
    long long step = 0;
    struct pcc_request request = {.kind = PCC_KIND_IMAGE};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&LO&:image_begin", names, pcc_py_u64,
                                     &snapshot, pcc_py_u64, &request.payload_bytes, &step,
                                     pcc_py_u64, &request.frozen_bytes))
        return NULL;
    request.step = step;
    PCC_PY_RETURN_DONE(pcc_client_image_begin(handle, snapshot, &request));
}

static PyObject *client_image_stream(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", "fd", "number", "bulk", NULL};
    uint64_t snapshot;
    uint32_t number;
    bool bulk;
    int fd;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&iO&O&:image_stream", names, pcc_py_u64,
                                     &snapshot, &fd, pcc_py_u32, &number, pcc_py_bool, &bulk))
        return NULL;
    PCC_PY_RETURN_DONE(pcc_client_image_stream(handle, snapshot, fd, number, bulk));
}

static PyObject *extents_new(struct pcc_image_extent *extents, uint64_t count)
{
    PyObject *list = PyList_New((Py_ssize_t)count);
    for (uint64_t i = 0; list != NULL && i < count; i++) {
        PyObject *item =
            Py_BuildValue("(IKK)", extents[i].stream, (unsigned long long)extents[i].offset_bytes,
                          (unsigned long long)extents[i].length_bytes);
        if (item == NULL || PyList_SetItem(list, (Py_ssize_t)i, item) < 0)
            Py_CLEAR(list);
    }
    free(extents);
    return list;
}

static PyObject *client_image_extents(PyObject *self, PyObject *number)
{
    PCC_PY_NUMBER(snapshot, number);
    struct pcc_image_extent *extents = NULL;
    uint64_t count;
    PCC_PY_ENTER();
    const int result = pcc_client_image_extents(handle, snapshot, &extents, &count);
    return result < 0 ? pcc_py_done(self, result) : extents_new(extents, count);
}

static PyObject *client_image_bytes(PyObject *self, PyObject *number)
{
    PCC_PY_NUMBER(snapshot, number);
    PCC_PY_ENTER();
    return PyLong_FromUnsignedLongLong(pcc_client_image_bytes(handle, snapshot));
}

static PyObject *client_image_end(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", "tail", NULL};
    uint64_t snapshot;
    Py_buffer tail PCC_PY_OWNED(PyBuffer_Release) = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&y*:image_end", names, pcc_py_u64, &snapshot,
                                     &tail))
        return NULL;
    PCC_PY_RETURN_DONE(pcc_client_image_end(handle, snapshot, tail.buf, (uint64_t)tail.len));
}

/* -- waits, each made of slices ---------------------------------------------------------------- */

/* After a slice that expired: false with an exception when the wait must end. */
static bool goes_on(PyObject *self)
{
    if (PyErr_CheckSignals() < 0)
        return false;
    if (pcc_py_lease(self)->closed) {
        PyErr_SetString(PyExc_ValueError, "this Client was closed during the call");
        return false;
    }
    return true;
}

static uint64_t slice_end(uint64_t deadline_ns)
{
    uint64_t end_ns = pcc_now_ns() + SLICE_NS;
    return end_ns < deadline_ns ? end_ns : deadline_ns;
}

struct wait {
    uint64_t id;
    uint64_t deadline_ns;
    enum pcc_wait_for what;
};

/* The time for which this process was stopped in a slice does not count: the process did nothing
 * for the end of the wait meanwhile, and the daemon may have been stopped, too. */
static void go_on_later(uint64_t *deadline_ns, uint64_t slice_end_ns)
{
    const uint64_t now_ns = pcc_now_ns();
    if (now_ns > slice_end_ns + STOPPED_NS && now_ns - slice_end_ns < UINT64_MAX - *deadline_ns)
        *deadline_ns += now_ns - slice_end_ns;
}

/* Sets *code_out to 0 or a negative code; false with an exception. */
static bool wait_until(PyObject *self, struct pcc_client *client, struct wait *wait, int *code_out)
{
    bool ok = true;
    uint64_t end_ns;
    do {
        end_ns = slice_end(wait->deadline_ns);
        PCC_PY_UNLOCKED(*code_out = pcc_client_wait(client, wait->id, wait->what, end_ns));
        go_on_later(&wait->deadline_ns, end_ns);
    } while (*code_out == -ETIMEDOUT && end_ns < wait->deadline_ns && (ok = goes_on(self)));
    return ok;
}

/* Whether it came before the deadline; NULL with the exception of another code. */
static PyObject *in_time(PyObject *self, int code)
{
    return code < 0 && code != -ETIMEDOUT ? pcc_py_done(self, code) : PyBool_FromLong(code == 0);
}

/* "O&" converter of what becomes of a snapshot. */
static int awaited(PyObject *object, void *out)
{
    static const char *const names[] = {
        [PCC_WAIT_READ] = "read",     [PCC_WAIT_HOST_READ] = "host_read",
        [PCC_WAIT_COPIED] = "copied", [PCC_WAIT_DURABLE] = "durable",
        [PCC_WAIT_GLOBAL] = "global", [PCC_WAIT_DRAINED] = "drained",
    };
    for (size_t i = 0; PyUnicode_Check(object) && i < sizeof(names) / sizeof(names[0]); i++) {
        if (PyUnicode_CompareWithASCIIString(object, names[i]) == 0) {
            *(enum pcc_wait_for *)out = (enum pcc_wait_for)i;
            return 1;
        }
    }
    PyErr_Format(PyExc_ValueError, "no snapshot becomes %R", object);
    return 0;
}

static PyObject *client_wait(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", "what", "deadline_ns", NULL};
    struct wait wait;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&:wait", names, pcc_py_u64, &wait.id,
                                     awaited, &wait.what, pcc_py_u64, &wait.deadline_ns))
        return NULL;
    int code;
    PCC_PY_ENTER();
    return wait_until(self, handle, &wait, &code) ? in_time(self, code) : NULL;
}

/* -- loading ----------------------------------------------------------------------------------- */

static PyObject *client_load_start(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"load_id", "ranges", "device_ranges", NULL};
    uint64_t load_id;
    struct pcc_py_ranges ranges PCC_PY_OWNED(pcc_py_ranges_done) = {0};
    struct pcc_py_ranges device_ranges PCC_PY_OWNED(pcc_py_ranges_done) = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|O&:load_start", names, pcc_py_u64,
                                     &load_id, pcc_py_ranges, &ranges, pcc_py_device_ranges,
                                     &device_ranges))
        return NULL;
    PCC_PY_RETURN_DONE(pcc_client_load_start(handle, load_id, ranges.items, ranges.count,
                                             device_ranges.device_items, device_ranges.count));
}

static PyObject *client_load_wait(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"load_id", "deadline_ns", NULL};
    struct wait wait = {.what = PCC_WAIT_LOAD};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:load_wait", names, pcc_py_u64, &wait.id,
                                     pcc_py_u64, &wait.deadline_ns))
        return NULL;
    PCC_PY_ENTER();
    int code;
    bool ok = wait_until(self, handle, &wait, &code);
    /* Also after an exception: nothing may write to the caller's memory after the call. */
    PCC_PY_UNLOCKED(code = pcc_client_load_wait(handle, wait.id, ok ? wait.deadline_ns : 0));
    if (!ok)
        return NULL;
    if (code == -ETIMEDOUT || code == -ECONNRESET)
        return pcc_py_done(self, code);
    return PyLong_FromLong(code);
}

static PyObject *client_loaded(PyObject *self, void *Py_UNUSED(unused))
{
    uint64_t cached_bytes, read_bytes;
    PCC_PY_ENTER();
    pcc_client_loaded(handle, &cached_bytes, &read_bytes);
    return Py_BuildValue("KK", (unsigned long long)cached_bytes, (unsigned long long)read_bytes);
}

/* -- GPUs: a driver call may wait for the driver's own locks, so none is made under the GIL ------
 */

/* "O&" converter of a CUDA ordinal. */
static int ordinal(PyObject *object, void *out)
{
    uint32_t device;
    if (!pcc_py_u32(object, &device))
        return 0;
    if (device >= PCC_DEVICES) {
        PyErr_Format(PyExc_ValueError, "GPU %u: the last one that is supported is %u", device,
                     PCC_DEVICES - 1);
        return 0;
    }
    *(uint32_t *)out = device;
    return 1;
}

static int open_device(struct pcc_client *client, uint32_t device, const char **why_out)
{
    const int result = pcc_client_device_open(client, device);
    if (result == 0)
        *why_out = pcc_client_device_cannot_pull(client, device);
    return result;
}

static PyObject *client_device_open(PyObject *self, PyObject *number)
{
    uint32_t device;
    if (!ordinal(number, &device))
        return NULL;
    PCC_PY_ENTER(); /* until the words are read, which are the handle's */
    const char *why = "";
    int result;
    PCC_PY_UNLOCKED(result = open_device(handle, device, &why));
    return result < 0 ? pcc_py_done(self, result)
                      : PyUnicode_DecodeUTF8(why, (Py_ssize_t)strlen(why), "replace");
}

static PyObject *client_pin_for(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device", "later", NULL};
    uint32_t device;
    bool later = false;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&|$O&:pin_for", names, ordinal, &device,
                                     pcc_py_bool, &later))
        return NULL;
    PCC_PY_ENTER();
    pcc_client_pin_for(handle, device, later);
    Py_RETURN_NONE;
}

static PyObject *client_staging(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device", "nbytes", NULL};
    uint32_t device;
    uint64_t length_bytes;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:staging", names, ordinal, &device,
                                     pcc_py_u64, &length_bytes))
        return NULL;
    uint64_t address = 0;
    int result;
    PCC_PY_CALL(result = pcc_client_staging(handle, device, length_bytes, &address));
    if (result == -ENOMEM)
        return PyErr_NoMemory();
    return result < 0 ? pcc_py_done(self, result) : PyLong_FromUnsignedLongLong(address);
}

PCC_PY_CALLS(client_staging_trim, PCC_PY_RETURN_NONE, pcc_client_staging_trim)

static PyObject *client_stage(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device", "stream", "copies", "aside", NULL};
    uint32_t device;
    uint64_t stream;
    struct pcc_py_ranges copies PCC_PY_OWNED(pcc_py_ranges_done) = {0};
    bool aside = false;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&|$O&:stage", names, ordinal, &device,
                                     pcc_py_u64, &stream, pcc_py_device_copies, &copies,
                                     pcc_py_bool, &aside))
        return NULL;
    PCC_PY_RETURN_DONE(
        pcc_client_stage(handle, device, stream, copies.copies, copies.count, aside));
}

static PyObject *client_sample(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", "device", "stream", "device_ranges", NULL};
    uint64_t snapshot, stream;
    uint32_t device;
    struct pcc_py_ranges ranges PCC_PY_OWNED(pcc_py_ranges_done) = {0};
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&O&:sample", names, pcc_py_u64, &snapshot,
                                     ordinal, &device, pcc_py_u64, &stream, pcc_py_device_ranges,
                                     &ranges))
        return NULL;
    PCC_PY_RETURN_DONE(
        pcc_client_sample(handle, snapshot, device, stream, ranges.device_items, ranges.count));
}

static PyObject *client_mark(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", "device", "stream", "pull", "aside", NULL};
    uint64_t snapshot, stream;
    uint32_t device;
    bool pull = false, aside = false;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&|$O&O&:mark", names, pcc_py_u64,
                                     &snapshot, ordinal, &device, pcc_py_u64, &stream, pcc_py_bool,
                                     &pull, pcc_py_bool, &aside) ||
        !pcc_py_require(kwargs, &names[3], 1))
        return NULL;
    PCC_PY_RETURN_DONE(pcc_client_mark(handle, snapshot, device, stream, pull, aside));
}

static int stream_or_staging(PyObject *object, void *out)
{
    if (object != Py_None)
        return pcc_py_u64(object, out);
    *(uint64_t *)out = PCC_STAGING;
    return 1;
}

static PyObject *client_hold(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"snapshot", "device", "stream", "deadline_ns", NULL};
    uint64_t snapshot, stream, deadline_ns;
    uint32_t device;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&O&O&:hold", names, pcc_py_u64, &snapshot,
                                     ordinal, &device, stream_or_staging, &stream, pcc_py_u64,
                                     &deadline_ns))
        return NULL;
    PCC_PY_ENTER();
    bool ok = true;
    bool ready = false;
    while (ok && !ready && pcc_now_ns() < deadline_ns) {
        uint64_t end_ns = slice_end(deadline_ns);
        PCC_PY_UNLOCKED(ready = pcc_client_hold_ready(handle, snapshot, device, stream, end_ns));
        go_on_later(&deadline_ns, end_ns);
        ok = ready || goes_on(self);
    }
    if (!ok)
        return NULL;
    int result;
    PCC_PY_UNLOCKED(result = pcc_client_hold(handle, snapshot, device, stream, deadline_ns));
    return in_time(self, result);
}

PCC_PY_CALLS_NUMBER(client_reached, PCC_PY_RETURN_BOOL, pcc_client_reached)

static PyObject *client_capturing(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device", "stream", NULL};
    uint32_t device;
    uint64_t stream;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&:capturing", names, ordinal, &device,
                                     pcc_py_u64, &stream))
        return NULL;
    bool capturing = false;
    int result;
    PCC_PY_CALL(result = pcc_client_capturing(handle, device, stream, &capturing));
    return result < 0 ? pcc_py_done(self, result) : PyBool_FromLong(capturing);
}

static void bytes_free(uint8_t **bytes)
{
    free(*bytes);
}

static PyObject *client_expose(PyObject *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"device_ranges", "device_bytes", "known", "replica_id",
                            "replica",       "shares",       NULL};
    struct pcc_py_ranges ranges PCC_PY_OWNED(pcc_py_ranges_done) = {0};
    struct pcc_py_ranges replicated PCC_PY_OWNED(pcc_py_ranges_done) = {0};
    struct pcc_py_ranges shares PCC_PY_OWNED(pcc_py_ranges_done) = {0};
    struct pcc_client_replica replica = {0};
    uint64_t device_bytes;
    int known = 0;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "O&O&|pO&O&O&:expose", names,
                                     pcc_py_device_ranges, &ranges, pcc_py_u64, &device_bytes,
                                     &known, pcc_py_u64, &replica.id, pcc_py_device_ranges,
                                     &replicated, pcc_py_ranges, &shares))
        return NULL;
    replica.ranges = replicated.device_items;
    replica.range_count = replicated.count;
    replica.shares = shares.items;
    replica.share_count = shares.count;
    uint8_t *bytes PCC_PY_OWNED(bytes_free) = NULL;
    uint64_t length_bytes = 0;
    int result;
    PCC_PY_CALL(result = pcc_client_expose(handle, ranges.device_items, ranges.count, device_bytes,
                                           &replica, known != 0, &bytes, &length_bytes));
    return result < 0 ? pcc_py_done(self, result)
                      : PyBytes_FromStringAndSize((const char *)bytes, (Py_ssize_t)length_bytes);
}

static PyObject *client_unshareable(PyObject *self, PyObject *argument)
{
    struct pcc_py_ranges ranges PCC_PY_OWNED(pcc_py_ranges_done) = {0};
    if (!pcc_py_device_ranges(argument, &ranges))
        return NULL;
    uint8_t *flags PCC_PY_OWNED(bytes_free) = calloc(ranges.count + 1, 1);
    if (flags == NULL)
        return PyErr_NoMemory();
    int result;
    PCC_PY_CALL(result = pcc_client_unshareable(handle, ranges.device_items, ranges.count, flags));
    return result < 0 ? pcc_py_done(self, result)
                      : PyBytes_FromStringAndSize((const char *)flags, (Py_ssize_t)ranges.count);
}

static PyObject *client_descriptors(PyObject *self, PyObject *Py_UNUSED(unused))
{
    int fds[PCC_DESCRIPTORS_MAX];
    uint32_t count = 0;
    int result;
    PCC_PY_CALL(result = pcc_client_descriptors(handle, fds, PCC_DESCRIPTORS_MAX, &count));
    PyObject *made = result < 0 ? NULL : PyList_New((Py_ssize_t)count);
    for (uint32_t i = 0; made != NULL && i < count; i++) {
        PyObject *number = PyLong_FromLong(fds[i]);
        if (number == NULL)
            Py_CLEAR(made);
        else
            (void)PyList_SetItem(made, (Py_ssize_t)i, number);
    }
    for (uint32_t i = 0; made == NULL && i < count; i++)
        (void)close(fds[i]);
    return result < 0 ? pcc_py_done(self, result) : made;
}

PCC_PY_CALLS(client_exposure_holds, PCC_PY_RETURN_BOOL, pcc_client_exposure_holds)

/* -- the type ---------------------------------------------------------------------------------- */

static PyMethodDef methods[] = {
    {"alive", client_alive, METH_NOARGS, NULL},
    {"request", client_request, METH_O, NULL},
    PCC_PY_METHOD("submit", client_submit),
    PCC_PY_METHOD("image_begin", client_image_begin),
    PCC_PY_METHOD("image_stream", client_image_stream),
    {"image_extents", client_image_extents, METH_O, NULL},
    {"image_bytes", client_image_bytes, METH_O, NULL},
    PCC_PY_METHOD("image_end", client_image_end),
    PCC_PY_METHOD("wait", client_wait),
    {"confirm", client_confirm, METH_O, NULL},
    {"write", client_write, METH_O, NULL},
    {"abandon", client_abandon, METH_O, NULL},
    {"state", client_state, METH_O, NULL},
    {"device_open", client_device_open, METH_O, NULL},
    PCC_PY_METHOD("pin_for", client_pin_for),
    PCC_PY_METHOD("staging", client_staging),
    {"staging_trim", client_staging_trim, METH_NOARGS, NULL},
    PCC_PY_METHOD("stage", client_stage),
    PCC_PY_METHOD("sample", client_sample),
    PCC_PY_METHOD("mark", client_mark),
    PCC_PY_METHOD("hold", client_hold),
    {"reached", client_reached, METH_O, NULL},
    PCC_PY_METHOD("capturing", client_capturing),
    PCC_PY_METHOD("expose", client_expose),
    {"unshareable", client_unshareable, METH_O, NULL},
    {"descriptors", client_descriptors, METH_NOARGS, NULL},
    {"exposure_holds", client_exposure_holds, METH_NOARGS, NULL},
    PCC_PY_METHOD("load_start", client_load_start),
    PCC_PY_METHOD("load_wait", client_load_wait),
    {"close", method_close, METH_NOARGS, NULL},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef properties[] = {
    {"unmapped", client_unmapped, NULL, "The errno of a mapping that failed, else 0.", NULL},
    {"chunk_bytes", client_chunk_bytes, NULL, "b", NULL},
    {"loaded", client_loaded, NULL, "What the newest load took: from memory, and from the volume.",
     NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

const struct pcc_py_type pcc_py_client = {
    .name = "pccheck_native._core.Client",
    .doc = "The client's end of a session.",
    .make = client_new,
    .methods = methods,
    .properties = properties,
};
