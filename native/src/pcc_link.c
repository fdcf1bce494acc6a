/* A link's life, its requests and its waits. The thread itself is in pcc_link_copy.c. */
#include "pcc_link.h"

#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "pcc_futex.h"
#include "pcc_link_private.h"
#include "pcc_thread.h"

#define SLICE_NS 100000000u /* a waiter looks for a hang-up this often */
/* Who abandons waits that long for copies that a GPU makes. It is safe to go on after that: nobody
 * will vouch for what they read, and their chunks are not used before they are done. */
#define ABANDON_PATIENCE_NS 10000000000ull
#define GPU_PATIENCE_NS 60000000000ull
#define CLOSE_PATIENCE_NS 10000000000ull

static int page_map(struct pcc_link *link, int page_fd)
{
    struct stat status;

    if (fstat(page_fd, &status) != 0)
        return -errno;
    if (status.st_size < (off_t)sizeof(struct pcc_page) || status.st_size > (off_t)UINT32_MAX ||
        (fcntl(page_fd, F_GET_SEALS) & F_SEAL_SHRINK) == 0)
        return -PCC_E_BAD_PEER;
    const uint64_t length = (uint64_t)status.st_size;
    void *bytes = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_SHARED, page_fd, 0);
    if (bytes == MAP_FAILED)
        return -errno;
    int error = pcc_page_accept(bytes, length, &link->view);
    if (error == 0 && link->view.geometry.page_bytes != length)
        error = -PCC_E_BAD_PEER;
    if (error != 0) {
        (void)munmap(bytes, length);
        link->view.page = NULL;
        return error;
    }
    (void)madvise(bytes, length, MADV_DONTFORK);
    return 0;
}

/* Accepts a link that was opened half-way; its thread does not run. */
static void link_free(struct pcc_link *link)
{
    for (uint32_t i = 0; !link->leaked && i < link->segment_count; i++) {
        if (link->segments[i].pinned_by == PCC_HOST)
            (void)munmap(link->segments[i].bytes, link->segments[i].length_bytes);
    }
    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++)
        free(link->jobs[i].memory);
    free(link->load.targets);
    free(link->flights);
    free(link->free_chunks);
    free(link->held);
    free(link->chunk_at);
    free(link->segments);
    if (link->view.page != NULL && !link->leaked)
        (void)munmap(link->view.page, link->view.geometry.page_bytes);
    if (link->socket_fd >= 0)
        (void)close(link->socket_fd);
    (void)pthread_cond_destroy(&link->idle);
    (void)pthread_mutex_destroy(&link->gpu_lock);
    (void)pthread_mutex_destroy(&link->lock);
    free(link);
}

static bool arrays_make(struct pcc_link *link)
{
    const size_t capacity = link->view.geometry.chunk_capacity;

    link->segments = calloc(capacity, sizeof(*link->segments));
    link->chunk_at = calloc(capacity, sizeof(*link->chunk_at));
    link->held = calloc(capacity, sizeof(*link->held));
    link->free_chunks = calloc(capacity, sizeof(*link->free_chunks));
    link->flights = calloc(capacity, sizeof(*link->flights));
    return link->segments != NULL && link->chunk_at != NULL && link->held != NULL &&
           link->free_chunks != NULL && link->flights != NULL;
}

/* Waits for `idle` have deadlines of pcc_now_ns. */
static void locks_make(struct pcc_link *link)
{
    pthread_condattr_t monotonic;

    (void)pthread_mutex_init(&link->lock, NULL); /* cannot fail with such attributes */
    (void)pthread_mutex_init(&link->gpu_lock, NULL);
    (void)pthread_condattr_init(&monotonic);
    (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&link->idle, &monotonic);
    (void)pthread_condattr_destroy(&monotonic);
}

int pcc_link_open(int socket_fd, int page_fd, struct pcc_link **out)
{
    struct pcc_link *link = calloc(1, sizeof(*link));

    if (link == NULL)
        return -ENOMEM;
    locks_make(link);
    link->landed = (struct pcc_chunk_list){PCC_NO_CHUNK, PCC_NO_CHUNK};
    link->page_by = PCC_HOST;
    atomic_store_explicit(&link->patience_ns, GPU_PATIENCE_NS, memory_order_relaxed);
    link->close_patience_ns = CLOSE_PATIENCE_NS;
    atomic_store_explicit(&link->ahead_bytes, PCC_AHEAD_BYTES, memory_order_relaxed);
    int error = 0;
    link->socket_fd = fcntl(socket_fd, F_DUPFD_CLOEXEC, 0);
    if (link->socket_fd < 0)
        error = -errno;
    if (error == 0)
        error = page_map(link, page_fd);
    if (error == 0 && !arrays_make(link))
        error = -ENOMEM;
    if (error == 0)
        error = pcc_thread_start(&link->thread, pcc_link_run, link, "pcc-link");
    if (error != 0) {
        link_free(link);
        return error;
    }
    pcc_link_remember(link);
    *out = link;
    return 0;
}

void pcc_link_close(struct pcc_link *link)
{
    if (link == NULL)
        return;
    pcc_link_forget(link);
    atomic_store_explicit(&link->stop, true, memory_order_release); /* pairs with pcc_link_run */
    pcc_bell_ring(&link->view.page->client_bell);
    (void)pthread_join(link->thread, NULL);
    /* Words stay as they are: what was handed over whole may still become a checkpoint. But a
     * stream that waits for the daemon must not wait on when nobody watches over it any more. */
    (void)pthread_mutex_lock(&link->lock);
    atomic_store_explicit(&link->dead, true, memory_order_release); /* pairs with the waits */
    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++) {
        struct pcc_job *job = &link->jobs[i];
        if (job->snapshot == 0)
            continue;
        if (!pcc_link_pulled_read(link, job))
            (void)pcc_link_job_abandon(link, job, -ECONNRESET);
        pcc_link_let_go(link, job);
        pcc_link_job_end(job);
    }
    (void)pthread_mutex_unlock(&link->lock);
    pcc_link_load_drain(link); /* in the place of the thread: who waits for a load is let out */
    pcc_bell_ring(&link->view.page->client_bell);
    (void)pthread_mutex_lock(&link->lock);
    while (link->waiters > 0)
        (void)pthread_cond_wait(&link->idle, &link->lock);
    (void)pthread_mutex_unlock(&link->lock);
    pcc_link_devices_close(link);
    if (!link->leaked)
        /* Release pairs with the daemon's acquire: our writes came before. */
        atomic_store_explicit(&link->view.page->quiet, 1, memory_order_release);
    link_free(link);
}

bool pcc_link_alive(struct pcc_link *link)
{
    struct pollfd socket = {.fd = link->socket_fd, .events = POLLRDHUP};

    if (atomic_load_explicit(&link->dead, memory_order_acquire)) /* pairs with the hang-up */
        return false;
    return poll(&socket, 1, 0) <= 0;
}

uint32_t pcc_link_chunk_bytes(const struct pcc_link *link)
{
    return link->view.geometry.chunk_bytes;
}

static bool final(enum pcc_outcome outcome)
{
    return outcome >= PCC_OUTCOME_DURABLE;
}

static enum pcc_outcome outcome_of(const struct pcc_link *link, uint64_t snapshot)
{
    /* Acquire pairs with the daemon's release: the sequence is seen with it. */
    const uint64_t outcome = atomic_load_explicit(
        &pcc_page_snapshot(&link->view, snapshot)->outcome, memory_order_acquire);

    return outcome >> 8 == snapshot ? (enum pcc_outcome)(outcome & 0xff) : PCC_OUTCOME_REQUESTED;
}

void pcc_link_job_end(struct pcc_job *job)
{
    /* Release pairs with the acquire in pcc_link_wait, as in job_advance. */
    atomic_store_explicit(&job->state, PCC_JOB_ENDED, memory_order_release);
    free(job->memory);
    job->memory = NULL;
    job->sources = NULL;
}

bool pcc_link_job_abandon(struct pcc_link *link, struct pcc_job *job, int error)
{
    struct pcc_snapshot *entry = pcc_page_snapshot(&link->view, job->snapshot);
    const bool won = pcc_word_move(entry, job->snapshot, PCC_WORD_REQUESTED, PCC_WORD_ABANDONED) ||
                     pcc_word_move(entry, job->snapshot, PCC_WORD_COPYING, PCC_WORD_ABANDONED);

    if (won)
        job->error = error;
    pcc_link_let_go(link, job);
    return won;
}

/* With the lock held: everything of the snapshot before goes, but for the events. */
static void job_reset(struct pcc_job *job, uint64_t snapshot)
{
    free(job->memory);
    job->memory = NULL;
    job->snapshot = snapshot;
    job->hung_up = false;
    job->provisional = false;
    job->error = 0;
    job->pulled = job->held = 0;
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        struct pcc_job_device *part = &job->devices[i];
        *part = (struct pcc_job_device){
            .marked = part->marked, .copied = part->copied, .waited = part->waited};
    }
    atomic_store_explicit(&job->stop, false, memory_order_relaxed);
    atomic_store_explicit(&job->host_read, false, memory_order_relaxed);
    atomic_store_explicit(&job->state, PCC_JOB_REQUESTED, memory_order_relaxed);
}

int pcc_link_request(struct pcc_link *link, uint64_t snapshot)
{
    struct pcc_snapshot *entry = pcc_page_snapshot(&link->view, snapshot);
    struct pcc_job *job = &link->jobs[snapshot % PCC_SNAPSHOTS];
    int error = 0;

    if (snapshot == 0 || snapshot >> 56 != 0)
        return -EINVAL;
    (void)pthread_mutex_lock(&link->lock);
    const uint64_t before = job->snapshot;
    const uint32_t state = atomic_load_explicit(&job->state, memory_order_relaxed);
    if (atomic_load_explicit(&link->dead, memory_order_relaxed))
        error = -ECONNRESET;
    else if (snapshot <= link->newest)
        error = -EINVAL;
    else if (before != 0 && (state == PCC_JOB_SUBMITTED || state == PCC_JOB_READ ||
                             job->flights > 0 || pcc_link_open_word(link, before) ||
                             pcc_link_word(link, before) == pcc_word(before, PCC_WORD_VOUCHING) ||
                             (pcc_link_word(link, before) == pcc_word(before, PCC_WORD_COPIED) &&
                              !final(outcome_of(link, before)))))
        error = -EBUSY;
    if (error == 0) {
        link->newest = snapshot;
        job_reset(job, snapshot);
        /* Release pairs with the daemon's acquire. No compare-and-swap: the daemon moves words of
         * the snapshot before only, and that one is final. */
        atomic_store_explicit(&entry->word, pcc_word(snapshot, PCC_WORD_REQUESTED),
                              memory_order_release);
    }
    (void)pthread_mutex_unlock(&link->lock);
    return error;
}

/* Acquire pairs with the thread's release: its last read of the source came before. */
static bool source_read(const struct pcc_link *link, const struct pcc_job *job)
{
    return atomic_load_explicit(&job->state, memory_order_acquire) != PCC_JOB_SUBMITTED &&
           pcc_link_pulled_read(link, job);
}

static bool host_read(const struct pcc_job *job)
{
    return atomic_load_explicit(&job->state, memory_order_acquire) != PCC_JOB_SUBMITTED ||
           atomic_load_explicit(&job->host_read, memory_order_acquire);
}

static bool snapshot_over(struct pcc_link *link, const struct pcc_job *job, enum pcc_wait_for what,
                          int *result)
{
    const uint64_t snapshot = job->snapshot;
    const bool dead = atomic_load_explicit(&link->dead, memory_order_acquire);
    bool reached;

    if (what == PCC_WAIT_READ) {
        reached = source_read(link, job);
    } else if (what == PCC_WAIT_HOST_READ) {
        reached = host_read(job);
    } else {
        const uint64_t word = pcc_link_word(link, snapshot);
        reached = word == pcc_word(snapshot, PCC_WORD_ABANDONED) ||
                  word == pcc_word(snapshot, PCC_WORD_REFUSED) ||
                  (word == pcc_word(snapshot, PCC_WORD_COPIED) &&
                   (what == PCC_WAIT_COPIED ||
                    outcome_of(link, snapshot) >=
                        (what == PCC_WAIT_GLOBAL ? PCC_OUTCOME_GLOBAL : PCC_OUTCOME_DURABLE)));
    }
    *result = (reached && job->hung_up) || (!reached && dead) ? -ECONNRESET : 0;
    return reached || (dead && what != PCC_WAIT_READ && what != PCC_WAIT_HOST_READ);
}

static int wait_until(struct pcc_link *link, uint64_t snapshot, enum pcc_wait_for what,
                      uint64_t deadline_ns)
{
    const struct pcc_job *job = &link->jobs[snapshot % PCC_SNAPSHOTS];
    _Atomic uint32_t *bell = &link->view.page->client_bell;
    int result = 0;

    for (;;) {
        const uint32_t rung = pcc_bell_read(bell);
        (void)pthread_mutex_lock(&link->lock);
        /* An entry that was used again: it ended long ago. */
        const bool is_over = job->snapshot != snapshot || snapshot_over(link, job, what, &result);
        (void)pthread_mutex_unlock(&link->lock);
        if (is_over)
            return result;
        const uint64_t now = pcc_now_ns();
        if (now >= deadline_ns)
            return -ETIMEDOUT;
        const uint64_t left = deadline_ns - now;
        pcc_futex_wait(bell, rung, left < SLICE_NS ? left : SLICE_NS);
        if (!pcc_link_alive(link) && !atomic_load_explicit(&link->dead, memory_order_relaxed))
            pcc_bell_ring(bell); /* the thread ends what is outstanding */
    }
}

int pcc_link_wait(struct pcc_link *link, uint64_t snapshot, enum pcc_wait_for what,
                  uint64_t deadline_ns)
{
    pcc_link_enter(link);
    const int result = wait_until(link, snapshot, what, deadline_ns);
    pcc_link_leave(link);
    return result;
}

/* With the lock held: until the thread and the GPUs have stopped reading. */
static void job_await(struct pcc_link *link, const struct pcc_job *job)
{
    const uint64_t limit = pcc_now_ns() + ABANDON_PATIENCE_NS;
    const struct timespec deadline = {.tv_sec = (time_t)(limit / 1000000000u),
                                      .tv_nsec = (long)(limit % 1000000000u)};

    while (job->busy)
        (void)pthread_cond_wait(&link->idle, &link->lock);
    /* Not on a dead link: its thread, which would see them end, is gone. */
    while (job->flying > 0 && !atomic_load_explicit(&link->dead, memory_order_relaxed) &&
           pthread_cond_timedwait(&link->idle, &link->lock, &deadline) == 0)
        ;
}

bool pcc_link_abandon(struct pcc_link *link, uint64_t snapshot)
{
    struct pcc_job *job = &link->jobs[snapshot % PCC_SNAPSHOTS];
    bool won = false;

    pcc_link_enter(link);
    (void)pthread_mutex_lock(&link->lock);
    const uint32_t state = atomic_load_explicit(&job->state, memory_order_relaxed);
    if (job->snapshot == snapshot &&
        (pcc_link_word(link, snapshot) == pcc_word(snapshot, PCC_WORD_REQUESTED) ||
         state == PCC_JOB_REQUESTED || state == PCC_JOB_SUBMITTED || job->provisional ||
         !pcc_link_pulled_read(link, job)))
        won = pcc_link_job_abandon(link, job, 0);
    if (won) {
        atomic_store_explicit(&job->stop, true, memory_order_relaxed);
        job_await(link, job);
        if (job->snapshot == snapshot)
            pcc_link_job_end(job);
    }
    (void)pthread_mutex_unlock(&link->lock);
    if (won) {
        pcc_bell_ring(&link->view.page->daemon_bell);
        pcc_bell_ring(&link->view.page->client_bell);
    }
    pcc_link_leave(link);
    return won;
}

int pcc_link_state(struct pcc_link *link, uint64_t snapshot, struct pcc_link_state *out)
{
    const struct pcc_snapshot *entry = pcc_page_snapshot(&link->view, snapshot);
    const struct pcc_job *job = &link->jobs[snapshot % PCC_SNAPSHOTS];
    int error = -ENOENT;

    (void)pthread_mutex_lock(&link->lock);
    if (job->snapshot == snapshot && snapshot != 0) {
        const uint64_t word = pcc_link_word(link, snapshot);
        out->word = word >> 8 == snapshot ? (enum pcc_word_state)(word & 0xff) : PCC_WORD_IDLE;
        if (out->word == PCC_WORD_VOUCHING) /* nobody has been told yet */
            out->word = PCC_WORD_COPYING;
        out->outcome = outcome_of(link, snapshot);
        out->sequence = atomic_load_explicit(&entry->sequence, memory_order_relaxed);
        out->source_read = source_read(link, job);
        out->error = job->error;
        error = 0;
    }
    (void)pthread_mutex_unlock(&link->lock);
    return error;
}
