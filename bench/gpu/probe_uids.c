/* Step "uids": can a process of one user open what a process of another has exported? Neither is
 * root where that can be had: root opens what others may not. */
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "probe.h"

#define UID_A ((uid_t)64001)
#define UID_B ((uid_t)64002)
#define MARK 0x5ca1ab1eu
#define LENGTH_BYTES (4 * MIB)

/* The driver's names of results are known to the processes that have loaded it only. */
static void say_of(const char *pair, const char *what, CUresult result)
{
    char key[64];
    snprintf(key, sizeof(key), "%s_%s", pair, what);
    say_result(key, result);
}

static void exporter(int socket, void *pair)
{
    struct note note = {0};
    (void)gpu_begin();
    CUdeviceptr memory = gpu_memory(LENGTH_BYTES);
    unsigned *mark = shared_memory(4096);
    for (size_t i = 0; i < 1024; i++)
        mark[i] = MARK;
    CUstream stream = gpu_stream();
    CU(cu.copy_to_device(memory, mark, 4096, stream));
    CU(cu.stream_synchronize(stream));
    note.result = cu.ipc_get(&note.handle, memory);
    say_of(pair, "export", note.result);
    tell(socket, &note);
    (void)hear_next(socket, &note);
}

static void importer(int socket, void *pair)
{
    struct note note;
    unsigned read_back[1024] = {0};
    CUdeviceptr source = 0;
    hear(socket, &note);
    (void)gpu_begin();
    note.result = cu.ipc_open(&source, note.handle, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS);
    say_of(pair, "open", note.result);
    note.number = 0;
    if (note.result == CUDA_SUCCESS) {
        CUstream stream = gpu_stream();
        CU(cu.copy_to_host(read_back, source, sizeof(read_back), stream));
        CU(cu.stream_synchronize(stream));
        note.number = read_back[0] == MARK && read_back[1023] == MARK;
    }
    tell(socket, &note);
    (void)hear_next(socket, &note);
}

static void try_pair(char *name, uid_t from, uid_t to)
{
    char key[64];
    struct note note = {0};
    struct peer source = spawn(name, from, exporter, name);
    struct peer target = spawn(name, to, importer, name);
    /* A peer that has gone has said why. */
    if (hear_next(source.socket, &note) && note.result == CUDA_SUCCESS) {
        tell(target.socket, &note);
        if (hear_next(target.socket, &note)) {
            snprintf(key, sizeof(key), "%s_bytes_are_right", name);
            say_count(key, (long long)note.number);
        }
    }
    dismiss(&source);
    dismiss(&target);
}

void step_uids(void)
{
    static struct {
        char name[16];
        uid_t from, to;
    } pairs[] = {
        {"root_to_root", SAME_UID, SAME_UID},
        {"a_to_a", UID_A, UID_A},
        {"a_to_b", UID_A, UID_B},
        {"a_to_root", UID_A, SAME_UID},
        {"root_to_a", SAME_UID, UID_A},
    };
    if (getuid() != 0) {
        char own[] = "own_to_own";
        say_text("skipped", "not root: only one's own uid can be had");
        try_pair(own, SAME_UID, SAME_UID);
        return;
    }
    for (size_t i = 0; i < sizeof(pairs) / sizeof(pairs[0]); i++)
        try_pair(pairs[i].name, pairs[i].from, pairs[i].to);
}
