/* What the files of the binding share: module state, the lease on a C object, conversions.
 *
 * The binding translates and nothing more: no I/O and no locks of its own. Counters and flags in
 * here are guarded by the GIL, which is released around whatever blocks or moves bytes. */
#pragma once

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <sys/types.h>

#include "client/pcc_client.h"

enum pcc_py_result { /* the named tuples of _core.pyi */
                     PCC_PY_SLOT_ENTRY,
                     PCC_PY_VOLUME_INFO,
                     PCC_PY_SAVE_TIMES,
                     PCC_PY_EVENT,
                     PCC_PY_SAVE_REQUEST,
                     PCC_PY_GPU_INFO,
                     PCC_PY_TENANT_USAGE,
                     PCC_PY_CLIENT_STATE,
                     PCC_PY_KEPT_STATE,
                     PCC_PY_RESULT_COUNT,
};

enum pcc_py_type_id {
    PCC_PY_VOLUME,
    PCC_PY_POOL,
    PCC_PY_EVENTS,
    PCC_PY_GPUS,
    PCC_PY_TENANT,
    PCC_PY_CLIENT,
    PCC_PY_TYPE_COUNT,
};

struct pcc_py_state {
    PyObject *native_error;
    PyTypeObject *types[PCC_PY_TYPE_COUNT];
    PyObject *results[PCC_PY_RESULT_COUNT];
};

/* -- the lease: when the C object behind a Python object may go -------------------------------- */

/* Running calls and other objects that borrow it count as users. close() forbids new ones; the last
 * user to leave closes the C object, so that it never goes under a call or under its borrower. */
struct pcc_py_lease {
    void *handle;                 /* NULL once closed */
    void (*close)(void *handle);  /* may block; called without the GIL */
    void (*gone)(PyObject *self); /* or NULL; called after that, with the GIL */
    const char *name;
    uint32_t users;
    bool closed;
    pid_t owner; /* a forked child has neither its threads nor its segments */
};

struct pcc_py_object { /* every type of the binding starts like this */
    PyObject_HEAD struct pcc_py_lease lease;
};

static inline struct pcc_py_lease *pcc_py_lease(PyObject *self)
{
    return &((struct pcc_py_object *)self)->lease;
}

/* borrows; our types have no subclasses */
struct pcc_py_state *pcc_py_state_of(PyTypeObject *type);
/* Defines `name`, which closes a handle that a lease knows as void *. */
#define PCC_PY_CLOSES(name, close_handle)                                                          \
    static void name(void *handle)                                                                 \
    {                                                                                              \
        close_handle(handle);                                                                      \
    }
/* A new object of `type` that takes `handle`, which is closed when memory is out; or the exception
 * of a negative `code`. */
PyObject *pcc_py_object_new(PyTypeObject *type, const char *name, int code, void *handle,
                            void (*close)(void *handle));
/* The handle, and one more user; NULL with ValueError when closed or in a forked child. */
void *pcc_py_enter(PyObject *self);
void pcc_py_leave(PyObject *self); /* keeps a raised exception */
void pcc_py_close(PyObject *self);
void pcc_py_object_dealloc(PyObject *self);
PyObject *pcc_py_object_close(PyObject *self, PyObject *unused); /* the method */

/* -- what a function owns, given back on every way out of it ------------------------------------
 */

/* Behind a variable's name: calls `give_back` with its address at the end of its block. */
#define PCC_PY_OWNED(give_back) __attribute__((cleanup(give_back)))

static inline void pcc_py_drop(PyObject **object) /* a reference, or NULL */
{
    Py_XDECREF(*object);
}

static inline void pcc_py_left(PyObject **entered)
{
    pcc_py_leave(*entered);
}

/* In a method: enters `self` until the end of the block, with its handle under that name; HANDLE is
 * the type of the file's handles. When it cannot enter, the method returns NULL with the exception.
 */
#define PCC_PY_ENTER()                                                                             \
    HANDLE *handle = pcc_py_enter(self);                                                           \
    if (handle == NULL)                                                                            \
        return NULL;                                                                               \
    PyObject *entered PCC_PY_OWNED(pcc_py_left) = self

/* -- calls of the core ------------------------------------------------------------------------- */

/* For statements that block or move bytes. */
#define PCC_PY_UNLOCKED(statement)                                                                 \
    do {                                                                                           \
        Py_BEGIN_ALLOW_THREADS statement;                                                          \
        Py_END_ALLOW_THREADS                                                                       \
    } while (0)

/* In a method: the statement, with `handle` and without the GIL. */
#define PCC_PY_CALL(statement)                                                                     \
    do {                                                                                           \
        PCC_PY_ENTER();                                                                            \
        PCC_PY_UNLOCKED(statement);                                                                \
    } while (0)
/* How these end. Returns None. */
#define PCC_PY_RETURN_NONE(statement)                                                              \
    do {                                                                                           \
        PCC_PY_CALL(statement);                                                                    \
        Py_RETURN_NONE;                                                                            \
    } while (0)
/* The same, or NULL with the exception of a negative code. */
#define PCC_PY_RETURN_DONE(expression)                                                             \
    do {                                                                                           \
        int done_code;                                                                             \
        PCC_PY_CALL(done_code = (expression));                                                     \
        return pcc_py_done(self, done_code);                                                       \
    } while (0)
/* The same for a question: returns True or False. */
#define PCC_PY_RETURN_BOOL(expression)                                                             \
    do {                                                                                           \
        bool answer;                                                                               \
        PCC_PY_CALL(answer = (expression));                                                        \
        return PyBool_FromLong(answer);                                                            \
    } while (0)
/* Defines the method `name` without arguments: calls `function` with the handle, and returns in one
 * of these three ways. */
#define PCC_PY_CALLS(name, returns, function)                                                      \
    static PyObject *name(PyObject *self, PyObject *Py_UNUSED(unused))                             \
    {                                                                                              \
        returns(function(handle));                                                                 \
    }

/* The same for a method that takes one number: calls `function` with the handle and the number. */
#define PCC_PY_CALLS_NUMBER(name, returns, function)                                               \
    static PyObject *name(PyObject *self, PyObject *object)                                        \
    {                                                                                              \
        PCC_PY_NUMBER(number, object);                                                             \
        returns(function(handle, number));                                                         \
    }

/* Defines the method (OTHER is PyObject) or getter (OTHER is void) `name`, which returns the object
 * that `expression` makes of `handle`. It must not block: the GIL is kept. */
#define PCC_PY_ANSWERS(name, OTHER, expression)                                                    \
    static PyObject *name(PyObject *self, OTHER *Py_UNUSED(unused))                                \
    {                                                                                              \
        PCC_PY_ENTER();                                                                            \
        return expression;                                                                         \
    }

/* -- errors: the one place where a code becomes an exception ----------------------------------- */

/* -errno to OSError (with path, when there is one), -PCC_E_* to NativeError. Returns NULL. */
PyObject *pcc_py_raise(struct pcc_py_state *state, int code, const char *path);
/* None, or the exception of a negative code. */
PyObject *pcc_py_done(PyObject *self, int code);
int pcc_py_errors_add(PyObject *module, struct pcc_py_state *state);

/* -- results ----------------------------------------------------------------------------------- */

/* Takes `item` into *list, or an exception (item NULL): then *list goes, and is NULL. */
void pcc_py_append(PyObject **list, PyObject *item);

/* Named tuples. */
int pcc_py_results_add(PyObject *module, struct pcc_py_state *state);
/* Takes `values` (a tuple, or NULL with an exception set, which is passed on). */
PyObject *pcc_py_result(struct pcc_py_state *state, enum pcc_py_result kind, PyObject *values);

/* -- arguments --------------------------------------------------------------------------------- */

/* "O&" converters that refuse what does not fit instead of cutting it. */
int pcc_py_u32(PyObject *object, void *out);
int pcc_py_u64(PyObject *object, void *out);
int pcc_py_seconds(PyObject *object, void *out); /* a float; nanoseconds, a uint64_t */
int pcc_py_id(PyObject *object, void *out);      /* bytes; PCC_UUID_BYTES of them */
int pcc_py_engine(PyObject *object, void *out);  /* a name; an enum pcc_io_engine */
int pcc_py_bool(PyObject *object, void *out);    /* anything with a truth; a bool */

/* In a method that takes one number: that number. When it is none, the method returns NULL with the
 * exception. */
#define PCC_PY_NUMBER(name, object)                                                                \
    uint64_t name;                                                                                 \
    if (!pcc_py_u64(object, &name)) {                                                              \
        return NULL;                                                                               \
    }

/* True when the first `count` of these keyword-only arguments were given; else TypeError. (The
 * format strings of PyArg_ParseTupleAndKeywords know optional ones only.) */
bool pcc_py_require(PyObject *kwargs, char *const *names, size_t count);

#define PCC_PY_RANGES_MAX (1u << 24)

struct pcc_py_ranges {
    Py_buffer view; /* keeps the memory as it is until pcc_py_ranges_done() */
    union {         /* by the converter that filled it */
        const struct pcc_range *items;
        const struct pcc_device_range *device_items;
        const struct pcc_device_copy *copies;
    };
    uint64_t count;
};

/* "O&" converters of packed <QQQ triples, or <QQQII with a device: whole ones, ascending, disjoint,
 * no sum overflows. A zeroed struct may be passed to pcc_py_ranges_done(). */
int pcc_py_ranges(PyObject *object, void *out);
int pcc_py_device_ranges(PyObject *object, void *out);
int pcc_py_device_copies(PyObject *object, void *out);
void pcc_py_ranges_done(struct pcc_py_ranges *ranges);

/* -- types ------------------------------------------------------------------------------------- */

struct pcc_py_type { /* in what our types differ */
    const char *name;
    const char *doc;
    size_t size_bytes; /* 0: of struct pcc_py_object */
    newfunc make;
    PyMethodDef *methods;
    PyGetSetDef *properties; /* or NULL */
};
extern const struct pcc_py_type pcc_py_volume;
extern const struct pcc_py_type pcc_py_pool;
extern const struct pcc_py_type pcc_py_events;
extern const struct pcc_py_type pcc_py_gpus;
extern const struct pcc_py_type pcc_py_tenant;
extern const struct pcc_py_type pcc_py_client;

PyObject *pcc_py_volume_bytes_for(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_create_volume(PyObject *module, PyObject *args, PyObject *kwargs);
PyObject *pcc_py_engines(void); /* (name, how, refusal) of each */

PyObject *pcc_py_manifest_facts(PyObject *module, PyObject *args);
PyObject *pcc_py_manifest_place(PyObject *module, PyObject *args);

PyObject *pcc_py_kept_state(PyObject *module, PyObject *args);

PyObject *pcc_py_cuda_missing(PyObject *module, PyObject *unused);
PyObject *pcc_py_cuda_driver(PyObject *module, PyObject *unused);

PyObject *pcc_py_tensor_geometry(PyObject *module, PyObject *args);
PyObject *pcc_py_same_geometry(PyObject *module, PyObject *args);
PyObject *pcc_py_integers(PyObject *module, PyObject *args);
PyObject *pcc_py_same_items(PyObject *module, PyObject *args);
PyObject *pcc_py_same_values(PyObject *module, PyObject *args);

/* A method that takes keywords. `_core.pyi` describes the methods. */
#define PCC_PY_METHOD(name, function)                                                              \
    {                                                                                              \
        name, (PyCFunction)(void (*)(void))(function), METH_VARARGS | METH_KEYWORDS, NULL          \
    }
