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

/* -- the trainer; `order` names what it does, one answer for each -- */

struct order {
    enum {
        ORDER_ALLOCATE,
        ORDER_FILL,
        ORDER_FREE,
        ORDER_RUN,
        ORDER_EXPORT,
        ORDER_PAGE,
        ORDER_CLEAR
    } what;
    uint32_t device;
    uint32_t pieces; /* of `length` in all, side by side */
    uint64_t address;
    uint64_t length;
    uint64_t seed;
};

struct answer {
    uint64_t address;
    struct pcc_exposed_allocation exposed;
};

static inline void descriptor_send(int socket, int fd)
{
    char control[CMSG_SPACE(sizeof(int))] = {0};
    struct iovec byte = {"d", 1};
    struct msghdr message = {.msg_iov = &byte,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof(control)};
    struct cmsghdr *part = CMSG_FIRSTHDR(&message);

    *part = (struct cmsghdr){CMSG_LEN(sizeof(int)), SOL_SOCKET, SCM_RIGHTS};
    memcpy(CMSG_DATA(part), &fd, sizeof(fd));
    CHECK(sendmsg(socket, &message, 0) == 1);
}

static inline int descriptor_receive(int socket)
{
    char control[CMSG_SPACE(sizeof(int))], byte;
    struct iovec into = {&byte, 1};
    struct msghdr message = {.msg_iov = &into,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = sizeof(control)};
    int fd;

    CHECK(recvmsg(socket, &message, MSG_CMSG_CLOEXEC) == 1);
    CHECK(message.msg_controllen >= CMSG_LEN(sizeof(int)));
    memcpy(&fd, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof(fd));
    return fd;
}

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
    answer->exposed = (struct pcc_exposed_allocation){.length_bytes = order->length,
                                                      .buffer_id = buffer_id,
                                                      .address = address,
                                                      .device = order->device};
    memcpy(answer->exposed.handle, &handle, sizeof(handle));
    memcpy(answer->exposed.uuid, &device.uuid, sizeof(device.uuid));
}

/* As torch's expandable segments. */
static inline void trainer_run(const struct order *order, struct answer *answer)
{
    const CUmemAllocationProp properties = {
        .type = CU_MEM_ALLOCATION_TYPE_PINNED,
        .requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
        .location = {CU_MEM_LOCATION_TYPE_DEVICE, (int)order->device}};
    const CUmemAccessDesc access = {{CU_MEM_LOCATION_TYPE_DEVICE, (int)order->device},
                                    CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
    const uint64_t piece = order->length / order->pieces;
    struct pcc_gpu_device device;
    CUdeviceptr address;
    CUresult (*create)(CUmemGenericAllocationHandle *, size_t, const CUmemAllocationProp *,
                       unsigned long long);

    *(void **)&create = dlsym(dlopen(STANDIN, RTLD_NOW), "cuMemCreate");
    CHECK(create != NULL && pcc_gpu_device_open(order->device, &device) == 0);
    CHECK(pcc_gpu_enter(&device) == 0);
    CHECK(device.cuda->address_reserve(&address, order->length, 0, 0, 0) == 0);
    for (uint32_t i = 0; i < order->pieces; i++) {
        CUmemGenericAllocationHandle handle;
        CHECK(create(&handle, piece, &properties, 0) == 0);
        CHECK(device.cuda->piece_map(address + i * piece, piece, 0, handle, 0) == 0);
        CHECK(device.cuda->piece_release(handle) == 0);
    }
    CHECK(device.cuda->access_set(address, order->length, &access, 1) == 0);
    pcc_gpu_leave(&device);
    answer->address = address;
    answer->exposed = (struct pcc_exposed_allocation){.length_bytes = order->length,
                                                      .address = address,
                                                      .device = order->device,
                                                      .pieces = order->pieces};
    memcpy(answer->exposed.handle, &address, sizeof(address));
    memcpy(answer->exposed.uuid, &device.uuid, sizeof(device.uuid));
}

/* The descriptor of the piece at an address, sent behind a byte. */
static inline void trainer_export(const struct order *order, int socket)
{
    const struct pcc_cuda *cuda;
    CUmemGenericAllocationHandle handle;
    int fd;

    CHECK(pcc_cuda_load(&cuda) == 0);
    CHECK(cuda->piece_retain(&handle, (void *)(uintptr_t)order->address) == 0);
    CHECK(cuda->piece_export(&fd, handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0) == 0);
    CHECK(cuda->piece_release(handle) == 0);
    descriptor_send(socket, fd);
    CHECK(close(fd) == 0);
}

/* As the client's thread: answers while the page's session lasts. */
static inline void *trainer_answers(void *bytes)
{
    struct pcc_page *page = bytes;

    while (PCC_READ_ACQUIRE(&page->ended) == 0) {
        const uint32_t rung = pcc_bell_read(&page->client_bell);
        pcc_life_tell(page);
        if (PCC_READ_ACQUIRE(&page->ended) == 0)
            pcc_futex_wait(&page->client_bell, rung, pcc_now_ns() + PCC_BELL_SLICE_NS);
    }
    CHECK(munmap(bytes, page->page_bytes) == 0);
    return NULL;
}

static inline void trainer_page(const struct order *order, int socket)
{
    const int fd = descriptor_receive(socket);
    void *bytes = mmap(NULL, order->length, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    pthread_t thread;

    CHECK(bytes != MAP_FAILED && close(fd) == 0);
    CHECK(pthread_create(&thread, NULL, trainer_answers, bytes) == 0);
    CHECK(pthread_detach(thread) == 0);
}

static inline void trainer_main(int fd)
{
    struct order order;

    while (read(fd, &order, sizeof(order)) == (ssize_t)sizeof(order)) {
        struct answer answer = {.address = order.address};
        struct pcc_gpu_device device;
        if (order.what == ORDER_ALLOCATE) {
            trainer_allocate(&order, &answer);
        } else if (order.what == ORDER_RUN) {
            trainer_run(&order, &answer);
        } else if (order.what == ORDER_EXPORT) {
            trainer_export(&order, fd);
            continue;
        } else if (order.what == ORDER_PAGE) {
            trainer_page(&order, fd);
        } else if (order.what == ORDER_CLEAR) {
            memset((void *)(uintptr_t)order.address, 0, order.length);
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

static inline int trainer_descriptor(const struct trainer *trainer, uint64_t address)
{
    const struct order order = {.what = ORDER_EXPORT, .address = address};

    CHECK(write(trainer->fd, &order, sizeof(order)) == (ssize_t)sizeof(order));
    return descriptor_receive(trainer->fd);
}

/* From now on it says of this page's session that it lives. */
static inline void trainer_answer(const struct trainer *trainer, int page_fd, uint64_t page_bytes)
{
    const struct order order = {.what = ORDER_PAGE, .length = page_bytes};
    struct answer answer;

    CHECK(write(trainer->fd, &order, sizeof(order)) == (ssize_t)sizeof(order));
    descriptor_send(trainer->fd, page_fd);
    CHECK(read(trainer->fd, &answer, sizeof(answer)) == (ssize_t)sizeof(answer));
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
