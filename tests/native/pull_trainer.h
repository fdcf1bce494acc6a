/* The processes of tests that pull: a trainer with GPU memory at the end of a socket (a driver
 * opens no handle of the process that made it), and each test in a process of its own, so that it
 * may lose the GPU. The driver is the stand-in of tests/standin. */
#pragma once

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>

#include "../standin/standin_control.h"
#include "tenant_fixture.h"

#define DESCRIPTORS_A_MESSAGE 250u

/* -- the trainer; `order` names what it does, one answer for each -- */

struct order {
    enum { ORDER_ALLOCATE, ORDER_FILL, ORDER_FREE, ORDER_PIECES, ORDER_GIVE } what;
    uint32_t device;
    uint64_t address;
    uint64_t length;
    uint64_t seed;
};

struct answer {
    uint64_t address;
    struct pcc_exposed_allocation exposed;
};

static inline void trainer_allocate(const struct order *order, struct answer *answer)
{
    struct pcc_gpu_device device;
    CUdeviceptr address;
    CUipcMemHandle handle;
    unsigned long long buffer_id;

    CHECK(pcc_gpu_device_open(order->device, &device) == 0);
    CHECK(pcc_gpu_enter(&device) == 0);
    CHECK(device.cuda->memory_alloc(&address, order->length) == 0);
    CHECK(device.cuda->ipc_get(&handle, address) == 0);
    CHECK(device.cuda->pointer_attribute(&buffer_id, CU_POINTER_ATTRIBUTE_BUFFER_ID, address) == 0);
    pcc_gpu_leave(&device);
    answer->address = address;
    answer->exposed = (struct pcc_exposed_allocation){
        .length_bytes = order->length, .buffer_id = buffer_id, .device = order->device};
    memcpy(answer->exposed.handle, &handle, sizeof(handle));
    memcpy(answer->exposed.uuid, &device.uuid, sizeof(device.uuid));
}

/* `seed` pieces of `length` bytes each, side by side, as an expandable segment of torch. */
static inline void trainer_make_pieces(const struct order *order, struct answer *answer)
{
    const CUmemLocation where = {CU_MEM_LOCATION_TYPE_DEVICE, (int)order->device};
    const CUmemAllocationProp wanted = {
        CU_MEM_ALLOCATION_TYPE_PINNED, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, where, NULL, {0}};
    const CUmemAccessDesc access = {where, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const uint64_t length = order->length * order->seed;
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                       unsigned long long);
    void *const found = dlsym(dlopen(STANDIN, RTLD_NOW), "cuMemCreate");
    CUmemGenericAllocationHandle handle;
    struct pcc_gpu_device device;
    CUdeviceptr address;

    CHECK(found != NULL);
    memcpy(&create, &found, sizeof(create));
    CHECK(pcc_gpu_device_open(order->device, &device) == 0);
    CHECK(pcc_gpu_enter(&device) == 0);
    CHECK(device.cuda->range_reserve(&address, length, 0, 0, 0) == 0);
    answer->address = address;
    for (uint64_t at = 0; at < length; at += order->length) {
        CHECK(create(&handle, order->length, &wanted, 0) == 0);
        CHECK(device.cuda->piece_map(answer->address + at, order->length, 0, handle, 0) == 0);
        CHECK(device.cuda->piece_release(handle) == 0);
    }
    CHECK(device.cuda->range_access(answer->address, length, &access, 1) == 0);
    pcc_gpu_leave(&device);
    answer->exposed = (struct pcc_exposed_allocation){.length_bytes = length,
                                                      .buffer_id = answer->address,
                                                      .device = order->device,
                                                      .piece_count = (uint32_t)order->seed};
    memcpy(answer->exposed.handle, &answer->address, sizeof(answer->address));
    memcpy(answer->exposed.uuid, &device.uuid, sizeof(device.uuid));
}

/* Sends the descriptors of `seed` pieces of `length` bytes from `address` on, and keeps none. */
static inline void trainer_give(int fd, const struct order *order, const struct answer *answer)
{
    union {
        struct cmsghdr head;
        uint8_t room[CMSG_SPACE(DESCRIPTORS_A_MESSAGE * sizeof(int))];
    } control = {.room = {0}};
    const size_t bytes = order->seed * sizeof(int);
    struct iovec data = {(void *)(uintptr_t)answer, sizeof(*answer)};
    const struct msghdr message = {.msg_iov = &data,
                                   .msg_iovlen = 1,
                                   .msg_control = &control,
                                   .msg_controllen = CMSG_SPACE(bytes)};
    int descriptors[DESCRIPTORS_A_MESSAGE];
    const struct pcc_cuda *cuda;

    CHECK(pcc_cuda_load(&cuda) == 0);
    CHECK(order->seed <= DESCRIPTORS_A_MESSAGE);
    for (uint64_t i = 0; i < order->seed; i++) {
        CUmemGenericAllocationHandle handle;
        CHECK(cuda->piece_retain(&handle,
                                 (void *)(uintptr_t)(order->address + i * order->length)) == 0);
        CHECK(cuda->piece_export(&descriptors[i], handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                                 0) == 0);
        CHECK(cuda->piece_release(handle) == 0);
    }
    control.head = (struct cmsghdr){CMSG_LEN(bytes), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(&control.head), descriptors, bytes);
    CHECK(sendmsg(fd, &message, 0) == (ssize_t)sizeof(*answer));
    for (uint64_t i = 0; i < order->seed; i++)
        (void)close(descriptors[i]);
}

static inline void trainer_main(int fd)
{
    struct order order;

    while (read(fd, &order, sizeof(order)) == (ssize_t)sizeof(order)) {
        struct answer answer = {.address = order.address};
        struct pcc_gpu_device device;
        if (order.what == ORDER_ALLOCATE) {
            trainer_allocate(&order, &answer);
        } else if (order.what == ORDER_PIECES) {
            trainer_make_pieces(&order, &answer);
        } else if (order.what == ORDER_GIVE) {
            trainer_give(fd, &order, &answer);
            continue;
        } else if (order.what == ORDER_FILL) {
            pattern((uint8_t *)(uintptr_t)order.address, order.length, order.seed);
        } else {
            CHECK(pcc_gpu_device_open(order.device, &device) == 0);
            CHECK(pcc_gpu_enter(&device) == 0);
            CHECK(device.cuda->memory_free(order.address) == 0);
            pcc_gpu_leave(&device);
        }
        CHECK(write(fd, &answer, sizeof(answer)) == (ssize_t)sizeof(answer));
    }
}

/* -- the test's side -- */

struct trainer {
    pid_t pid;
    int fd;
};

static inline struct answer trainer_ask(const struct trainer *trainer, struct order order)
{
    struct answer answer;

    CHECK(write(trainer->fd, &order, sizeof(order)) == (ssize_t)sizeof(order));
    CHECK(read(trainer->fd, &answer, sizeof(answer)) == (ssize_t)sizeof(answer));
    return answer;
}

/* The descriptors of up to DESCRIPTORS_A_MESSAGE pieces, the caller's to close. */
static inline void trainer_descriptors(const struct trainer *trainer, uint64_t address,
                                       uint64_t piece_bytes, uint32_t count, int *out)
{
    const struct order order = {
        .what = ORDER_GIVE, .address = address, .length = piece_bytes, .seed = count};
    struct answer answer;
    union {
        struct cmsghdr head;
        uint8_t room[CMSG_SPACE(DESCRIPTORS_A_MESSAGE * sizeof(int))];
    } control;
    struct iovec data = {&answer, sizeof(answer)};
    struct msghdr message = {.msg_iov = &data,
                             .msg_iovlen = 1,
                             .msg_control = &control,
                             .msg_controllen = sizeof(control)};

    CHECK(write(trainer->fd, &order, sizeof(order)) == (ssize_t)sizeof(order));
    CHECK(recvmsg(trainer->fd, &message, MSG_CMSG_CLOEXEC) == (ssize_t)sizeof(answer));
    CHECK(control.head.cmsg_len == CMSG_LEN(count * sizeof(int)));
    memcpy(out, CMSG_DATA(&control.head), count * sizeof(int));
}

static inline void trainer_start(struct trainer *trainer)
{
    int fds[2];
    char number[16];

    CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, fds) == 0);
    (void)snprintf(number, sizeof(number), "%d", fds[1]);
    trainer->pid = fork();
    CHECK(trainer->pid >= 0);
    if (trainer->pid == 0) {
        (void)close(fds[0]);
        (void)unsetenv("PCCHECK_STANDIN_FAULTS"); /* those are the daemon's */
        (void)execl("/proc/self/exe", "trainer", "--trainer", number, (char *)NULL);
        _exit(127);
    }
    CHECK(close(fds[1]) == 0);
    CHECK(fcntl(fds[0], F_SETFD, FD_CLOEXEC) == 0);
    trainer->fd = fds[0];
    /* Until it has answered it may not have begun its program, and whoever attaches is past that.
     */
    (void)trainer_ask(trainer, (struct order){.what = ORDER_FILL});
}

static inline void trainer_kill(struct trainer *trainer)
{
    if (trainer->pid == 0)
        return;
    CHECK(kill(trainer->pid, SIGKILL) == 0 && waitpid(trainer->pid, NULL, 0) == trainer->pid);
    CHECK(close(trainer->fd) == 0);
    trainer->pid = 0;
}

/* -- a process per test -- */

static inline void directory_remove(const char *path)
{
    DIR *directory = opendir(path);
    struct dirent *entry;

    while (directory != NULL && (entry = readdir(directory)) != NULL)
        (void)unlinkat(dirfd(directory), entry->d_name, 0);
    if (directory != NULL)
        (void)closedir(directory);
    (void)rmdir(path);
}

static inline void run_alone(const char *name)
{
    char directory[64] = "/dev/shm/pcc-pull-XXXXXX", faults[96];
    int status;

    printf("%s\n", name);
    (void)fflush(stdout);
    if (access("/dev/shm", W_OK) != 0)
        (void)strcpy(directory, "/tmp/pcc-pull-XXXXXX");
    CHECK(mkdtemp(directory) != NULL);
    (void)snprintf(faults, sizeof(faults), "%s/faults", directory);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
        (void)setenv("PCCHECK_STANDIN_DIR", directory, 1);
        (void)setenv("PCCHECK_STANDIN_DEVICES", "2", 1);
        (void)setenv("PCCHECK_STANDIN_FAULTS", faults, 1);
        (void)execl("/proc/self/exe", "test", name, (char *)NULL);
        _exit(127);
    }
    CHECK(waitpid(child, &status, 0) == child);
    directory_remove(directory);
    CHECK_EQUAL(status, 0);
}

struct test {
    const char *name;
    void (*run)(void);
};

/* Without arguments: every test in a process of its own. */
static inline int pull_main(int argc, char **argv, const struct test *tests, uint32_t count)
{
    /* By its path: a later dlopen of libcuda.so.1 returns the library that is loaded. */
    CHECK(argc < 2 || dlopen(STANDIN, RTLD_NOW) != NULL);
    if (argc == 3 && strcmp(argv[1], "--trainer") == 0) {
        trainer_main(atoi(argv[2]));
        return 0;
    }
    for (uint32_t i = 0; i < count; i++) {
        if (argc < 2)
            run_alone(tests[i].name);
        else if (strcmp(argv[1], tests[i].name) == 0)
            tests[i].run();
    }
    return 0;
}
