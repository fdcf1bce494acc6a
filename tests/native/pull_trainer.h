/* The processes of tests that pull: a trainer with GPU memory at the end of a socket (a driver
 * opens no handle of the process that made it), and each test in a process of its own, so that it
 * may lose the GPU. The driver is the stand-in of tests/standin. */
#pragma once

#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <signal.h>

#include "tenant_fixture.h"

/* -- the trainer; `order` names what it does, one answer for each -- */

struct order {
    enum { ORDER_ALLOCATE, ORDER_FILL, ORDER_FREE } what;
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

static inline void trainer_main(int fd)
{
    struct order order;

    while (read(fd, &order, sizeof(order)) == (ssize_t)sizeof(order)) {
        struct answer answer = {.address = order.address};
        struct pcc_gpu_device device;
        if (order.what == ORDER_ALLOCATE) {
            trainer_allocate(&order, &answer);
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
