/* What a GPU and its driver really do, as far as PCcheck's design depends on it. One JSON document
 * on the standard output, in under two minutes:
 *
 *   facts         driver, attributes, what has an IPC handle, what a second context costs
 *   page          stream waits and writes on a memfd page, with another process's CPU
 *   overlap       one process's copies against another's kernels
 *   death         bytes behind an open IPC mapping after the exporter's SIGKILL
 *   uids          IPC between users
 *   registration  what pinning costs, with 4 KiB and with huge pages
 *   bandwidth     pinned and pageable copies
 *
 *     probe [--small] [--device N] [--only STEP]... [--limit-s N]
 *
 * Needs nothing but libcuda.so.1, opened at run time. Each step is a process of its own with a time
 * limit; what it has recorded before it fails or is ended stays in the document. */
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "probe.h"

struct step {
    const char *name;
    void (*run)(void);
    int limit_s;
    bool wanted;
};

static struct step steps[] = {
    {"facts", step_facts, 20, true},         {"page", step_page, 30, true},
    {"overlap", step_overlap, 35, true},     {"death", step_death, 50, true},
    {"uids", step_uids, 30, true},           {"registration", step_registration, 40, true},
    {"bandwidth", step_bandwidth, 25, true},
};
#define STEP_COUNT (sizeof(steps) / sizeof(steps[0]))
#define RECORDS_BYTES_MAX (256 << 10)

struct outcome {
    char records[RECORDS_BYTES_MAX]; /* lines: `"key": value`, or `!"failure"` */
    size_t length;
    double seconds;
    char ended[48];
    bool no_driver;
};

/* Reads what the step records until it closes its end, or until the limit. */
static bool collect(int pipe_end, double deadline_s, struct outcome *outcome)
{
    for (;;) {
        double left_s = deadline_s - now_s();
        struct pollfd poll_for = {.fd = pipe_end, .events = POLLIN};
        if (left_s <= 0)
            return false;
        int ready = poll(&poll_for, 1, (int)(left_s * 1000) + 1);
        if (ready < 0 && errno != EINTR)
            return false;
        if (ready <= 0)
            continue;
        size_t room = sizeof(outcome->records) - 1 - outcome->length;
        ssize_t got = read(pipe_end, outcome->records + outcome->length, room);
        if (got <= 0)
            return true;
        outcome->length += (size_t)got;
    }
}

/* A process that hangs in the driver may outlive even SIGKILL for a while: it is left behind. */
static void finish(pid_t pid, bool in_time, struct outcome *outcome)
{
    int status = 0;
    pid_t ended = 0;
    if (!in_time)
        (void)kill(pid, SIGKILL);
    for (double limit_s = now_s() + 5; (ended = waitpid(pid, &status, WNOHANG)) == 0;) {
        if (now_s() > limit_s) {
            (void)kill(pid, SIGKILL);
            break;
        }
        sleep_s(0.002);
    }
    outcome->no_driver = ended == pid && WIFEXITED(status) && WEXITSTATUS(status) == EXIT_NO_DRIVER;
    if (!in_time || ended != pid)
        snprintf(outcome->ended, sizeof(outcome->ended), "timed out");
    else if (WIFSIGNALED(status))
        snprintf(outcome->ended, sizeof(outcome->ended), "signal %d", WTERMSIG(status));
    else
        snprintf(outcome->ended, sizeof(outcome->ended), "%s",
                 WEXITSTATUS(status) == 0 ? "ok" : "failed");
}

/* What a killed step has left behind becomes this process's and dies with it, see spawn. */
static void reap_orphans(void)
{
    pid_t found = 0;
    for (double limit_s = now_s() + 2; now_s() < limit_s && found >= 0; sleep_s(0.002))
        while ((found = waitpid(-1, NULL, WNOHANG)) > 0)
            ;
}

static void run_step(const struct step *step, double limit_s, struct outcome *outcome)
{
    int ends[2];
    double start_s = now_s();
    memset(outcome, 0, sizeof(*outcome));
    if (pipe(ends) != 0) {
        snprintf(outcome->ended, sizeof(outcome->ended), "no pipe");
        return;
    }
    fflush(stdout);
    pid_t pid = fork();
    if (pid == 0) {
        close(ends[0]);
        record_descriptor = ends[1];
        alarm((unsigned)limit_s + 1);
        step->run();
        _exit(0);
    }
    close(ends[1]);
    if (pid > 0)
        finish(pid, collect(ends[0], start_s + limit_s, outcome), outcome);
    reap_orphans();
    close(ends[0]);
    outcome->seconds = now_s() - start_s;
}

/* Records are whole lines; one that a kill cut off is dropped. */
static void print_outcome(const struct step *step, struct outcome *outcome, bool is_last)
{
    char *end = strrchr(outcome->records, '\n');
    if (end != NULL)
        end[1] = 0;
    else
        outcome->records[0] = 0;
    char *copy = strdup(outcome->records);
    printf("  \"%s\": {\n   \"ended\": \"%s\", \"seconds\": %.2f", step->name, outcome->ended,
           outcome->seconds);
    for (char *line = strtok(outcome->records, "\n"); line != NULL; line = strtok(NULL, "\n"))
        if (line[0] != '!')
            printf(",\n   %s", line);
    printf(",\n   \"failures\": [");
    const char *comma = "";
    for (char *line = copy ? strtok(copy, "\n") : NULL; line != NULL; line = strtok(NULL, "\n"))
        if (line[0] == '!') {
            printf("%s%s", comma, line + 1);
            comma = ", ";
        }
    printf("]\n  }%s\n", is_last ? "" : ",");
    fflush(stdout);
    free(copy);
}

static void usage(void)
{
    fprintf(stderr, "probe [--small] [--device N] [--only STEP]... [--limit-s N]\nsteps:");
    for (size_t i = 0; i < STEP_COUNT; i++)
        fprintf(stderr, " %s", steps[i].name);
    fprintf(stderr, "\n");
    exit(2);
}

static void want_only(const char *name)
{
    static bool is_narrowed = false;
    bool found = false;
    for (size_t i = 0; i < STEP_COUNT; i++) {
        if (!is_narrowed)
            steps[i].wanted = false;
        if (strcmp(steps[i].name, name) == 0)
            steps[i].wanted = found = true;
    }
    is_narrowed = true;
    if (!found)
        usage();
}

static double read_options(int count, char **arguments)
{
    double limit_s = 120;
    for (int i = 1; i < count; i++) {
        const char *option = arguments[i];
        const char *value = i + 1 < count ? arguments[i + 1] : NULL;
        if (strcmp(option, "--small") == 0) {
            options.is_small = true;
            continue;
        }
        if (value == NULL)
            usage();
        i++;
        if (strcmp(option, "--device") == 0)
            options.ordinal = atoi(value);
        else if (strcmp(option, "--only") == 0)
            want_only(value);
        else if (strcmp(option, "--limit-s") == 0)
            limit_s = atof(value);
        else
            usage();
    }
    return limit_s;
}

static void print_head(void)
{
    struct utsname kernel = {0};
    char date[32] = "";
    time_t now = time(NULL);
    struct tm parts;
    (void)uname(&kernel);
    if (gmtime_r(&now, &parts) != NULL)
        strftime(date, sizeof(date), "%Y-%m-%dT%H:%M:%SZ", &parts);
    printf("{\n \"probe\": 1,\n \"date\": \"%s\",\n \"kernel\": \"%s %s\",\n", date, kernel.release,
           kernel.machine);
    printf(" \"cpus\": %ld,\n \"memory_available_gib\": %.1f,\n \"uid\": %u,\n",
           sysconf(_SC_NPROCESSORS_ONLN), (double)available_bytes() / (double)GIB,
           (unsigned)getuid());
    printf(" \"mps\": %s,\n \"steps\": {\n",
           getenv("CUDA_MPS_PIPE_DIRECTORY") != NULL ? "true" : "false");
}

int main(int count, char **arguments)
{
    static struct outcome outcome;
    double deadline_s = now_s() + read_options(count, arguments);
    size_t last = 0;
    bool found = true;
    for (size_t i = 0; i < STEP_COUNT; i++)
        if (steps[i].wanted)
            last = i;
    (void)signal(SIGPIPE, SIG_IGN);
    (void)prctl(PR_SET_CHILD_SUBREAPER, 1);
    print_head();
    for (size_t i = 0; i <= last && found; i++) {
        if (!steps[i].wanted)
            continue;
        double left_s = deadline_s - now_s();
        if (left_s < 1)
            left_s = 1; /* still says by itself that it timed out */
        run_step(&steps[i], left_s < steps[i].limit_s ? left_s : steps[i].limit_s, &outcome);
        found = !outcome.no_driver;
        print_outcome(&steps[i], &outcome, i == last || !found);
    }
    printf(" },\n \"driver\": \"%s\"\n}\n", found ? "found" : "none");
    return 0;
}
