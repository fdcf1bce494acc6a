/* The probe's ground: records, time, other processes. See probe.h. */
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "probe.h"

int record_descriptor = STDOUT_FILENO;

bool is_peer;

static const char *role = "step";

/* -- records ------------------------------------------------------------------------------------
 */

/* One write, below PIPE_BUF: records of several processes do not mix. */
__attribute__((format(printf, 1, 2))) static void record(const char *format, ...)
{
    char line[4000];
    va_list values;
    va_start(values, format);
    int length = vsnprintf(line, sizeof(line) - 1, format, values);
    va_end(values);
    if (length < 0 || (size_t)length >= sizeof(line) - 1)
        return;
    line[length] = '\n';
    if (write(record_descriptor, line, (size_t)length + 1) < 0)
        _exit(1);
}

void say_number(const char *key, double value)
{
    if (isfinite(value))
        record("\"%s\": %.6g", key, value);
    else
        record("\"%s\": null", key);
}

void say_count(const char *key, long long value)
{
    record("\"%s\": %lld", key, value);
}

static void plain(const char *text, char *out, size_t out_bytes)
{
    size_t length = 0;
    for (; *text != 0 && length + 1 < out_bytes; text++)
        out[length++] = *text < ' ' || *text == '"' || *text == '\\' ? '\'' : *text;
    out[length] = 0;
}

void say_text(const char *key, const char *text)
{
    char clean[400];
    plain(text, clean, sizeof(clean));
    record("\"%s\": \"%s\"", key, clean);
}

void say_result(const char *key, CUresult result)
{
    say_text(key, gpu_name_of(result));
}

void say_numbers(const char *key, const double *values, size_t count)
{
    char list[3000] = "";
    size_t length = 0;
    for (size_t i = 0; i < count && length + 32 < sizeof(list); i++)
        length += (size_t)snprintf(list + length, sizeof(list) - length, "%s%.6g",
                                   i == 0 ? "" : ", ", values[i]);
    record("\"%s\": [%s]", key, list);
}

static int by_size(const void *a, const void *b)
{
    double left = *(const double *)a, right = *(const double *)b;
    return (left > right) - (left < right);
}

void say_spread(const char *key, double *values, size_t count)
{
    if (count == 0) {
        record("\"%s\": null", key);
        return;
    }
    qsort(values, count, sizeof(*values), by_size);
    record("\"%s\": {\"median\": %.6g, \"p99\": %.6g, \"max\": %.6g, \"runs\": %zu}", key,
           values[count / 2], values[count * 99 / 100], values[count - 1], count);
}

void fail(const char *what, const char *why)
{
    char clean[400];
    plain(what, clean, sizeof(clean));
    record("!\"%s: %s: %s\"", role, clean, why);
    _exit(2);
}

void must_call(CUresult result, const char *call)
{
    if (result != CUDA_SUCCESS)
        fail(call, gpu_name_of(result));
}

void must(bool condition, const char *what)
{
    if (!condition)
        fail(what, strerror(errno));
}

/* -- time and processes -------------------------------------------------------------------------
 */

double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

void sleep_s(double seconds)
{
    struct timespec time = {.tv_sec = (time_t)seconds};
    time.tv_nsec = (long)((seconds - (double)time.tv_sec) * 1e9);
    (void)nanosleep(&time, NULL);
}

void tell(int socket, const struct note *note)
{
    if (send(socket, note, sizeof(*note), MSG_NOSIGNAL) != sizeof(*note))
        fail("send", "the peer has gone");
}

bool hear_next(int socket, struct note *note)
{
    ssize_t got = recv(socket, note, sizeof(*note), 0);
    if (got < 0)
        fail("recv", strerror(errno));
    return got == sizeof(*note);
}

void hear(int socket, struct note *note)
{
    if (!hear_next(socket, note))
        fail("recv", "the peer has gone");
}

static int pair_end(int *other)
{
    int ends[2];
    struct timeval limit = {.tv_sec = SILENCE_LIMIT_S};
    must(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0, "socketpair");
    for (int i = 0; i < 2; i++)
        (void)setsockopt(ends[i], SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
    *other = ends[1];
    return ends[0];
}

static void become(uid_t uid)
{
    must(setresgid(uid, uid, uid) == 0 && setresuid(uid, uid, uid) == 0, "setresuid");
    (void)prctl(PR_SET_DUMPABLE, 1); /* as in a process that this user has started */
}

struct peer spawn(const char *name, uid_t uid, peer_body *body, void *argument)
{
    struct peer peer = {0};
    int theirs;
    pid_t parent = getpid();
    peer.socket = pair_end(&theirs);
    peer.pid = fork();
    must(peer.pid >= 0, "fork");
    if (peer.pid > 0) {
        close(theirs);
        return peer;
    }
    close(peer.socket);
    role = name;
    is_peer = true;
    if (uid != SAME_UID)
        become(uid);
    (void)prctl(PR_SET_PDEATHSIG, SIGKILL); /* after become, which would clear it */
    if (getppid() != parent)
        _exit(1);
    alarm(60);
    body(theirs, argument);
    _exit(0);
}

static bool is_gone_by(pid_t pid, double limit_s)
{
    while (waitpid(pid, NULL, WNOHANG) == 0) {
        if (now_s() > limit_s)
            return false;
        sleep_s(0.0002);
    }
    return true;
}

double kill_peer(struct peer *peer)
{
    double start_s = now_s();
    (void)kill(peer->pid, SIGKILL);
    must(is_gone_by(peer->pid, start_s + 10), "a process stays after SIGKILL");
    close(peer->socket);
    peer->pid = 0;
    return now_s() - start_s;
}

void dismiss(struct peer *peer)
{
    (void)shutdown(peer->socket, SHUT_RDWR);
    if (!is_gone_by(peer->pid, now_s() + 3)) {
        (void)kill_peer(peer);
        return;
    }
    close(peer->socket);
    peer->pid = 0;
}
