/* A client's life, its requests and its waits. The thread itself is in pcc_client_run.c. */
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "client/pcc_client_private.h"

/* How long abandoning waits for copies that a GPU makes. It is safe to continue after that: what
 * they read is in no checkpoint, and their chunks are not used before they are done. */
#define ABANDON_PATIENCE_NS 10000000000ull
#define GPU_PATIENCE_NS 60000000000ull
#define CLOSE_PATIENCE_NS 10000000000ull

static int page_map(struct pcc_client *client, int page_fd)
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
    int error = pcc_page_accept(bytes, length, &client->view);
    if (error == 0 && client->view.geometry.page_bytes != length)
        error = -PCC_E_BAD_PEER;
    if (error != 0) {
        (void)munmap(bytes, length);
        client->view.page = NULL;
        return error;
    }
    (void)madvise(bytes, length, MADV_DONTFORK);
    return 0;
}

/* Accepts a client that was opened half-way; its thread does not run. */
static void link_free(struct pcc_client *client)
{
    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++)
        free(client->jobs[i].memory);
    free(client->load.targets);
    free(client->flights);
    free(client->free_chunks);
    free(client->held);
    free(client->chunk_at);
    free(client->segments);
    if (client->view.page != NULL && !client->leaked)
        (void)munmap(client->view.page, client->view.geometry.page_bytes);
    if (client->socket_fd >= 0)
        (void)close(client->socket_fd);
    pcc_crew_close(&client->crew);
    (void)pthread_cond_destroy(&client->idle);
    (void)pthread_mutex_destroy(&client->gpu_lock);
    (void)pthread_mutex_destroy(&client->lock);
    free(client);
}

static bool arrays_make(struct pcc_client *client)
{
    const size_t capacity = client->view.geometry.chunk_capacity;

    client->segments = calloc(capacity, sizeof(*client->segments));
    client->chunk_at = calloc(capacity, sizeof(*client->chunk_at));
    client->held = calloc(capacity, sizeof(*client->held));
    client->free_chunks = calloc(capacity, sizeof(*client->free_chunks));
    client->flights = calloc(capacity, sizeof(*client->flights));
    return client->segments != NULL && client->chunk_at != NULL && client->held != NULL &&
           client->free_chunks != NULL && client->flights != NULL;
}

/* -- forked children --
 *
 * A forked child (a data loader's worker) inherits the attach socket's descriptor. While the child
 * has it open, the daemon does not notice the trainer's death. So all open clients are in a list,
 * and a child first closes their sockets; page and segments are not inherited. */

static pthread_mutex_t known_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t handlers_once = PTHREAD_ONCE_INIT;
static struct pcc_client *known;

static void before_fork(void)
{
    (void)pthread_mutex_lock(&known_lock);
}

static void after_fork_parent(void)
{
    (void)pthread_mutex_unlock(&known_lock);
}

static void after_fork_child(void)
{
    for (struct pcc_client *client = known; client != NULL; client = client->next)
        (void)close(client->socket_fd);
    known = NULL;
    (void)pthread_mutex_unlock(&known_lock);
}

static void handlers_register(void)
{
    /* Without memory for it, children keep the socket: the daemon notices a death later, and
     * nothing breaks. */
    (void)pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

static void remember(struct pcc_client *client)
{
    (void)pthread_once(&handlers_once, handlers_register);
    PCC_LOCKED(&known_lock);
    client->next = known;
    known = client;
}

static void forget(struct pcc_client *client)
{
    PCC_LOCKED(&known_lock);
    for (struct pcc_client **at = &known; *at != NULL; at = &(*at)->next) {
        if (*at == client) {
            *at = client->next;
            break;
        }
    }
}

/* -- life -- */

int pcc_client_open(int socket_fd, int page_fd, struct pcc_client **out)
{
    struct pcc_client *client = calloc(1, sizeof(*client));

    if (client == NULL)
        return -ENOMEM;
    (void)pthread_mutex_init(&client->lock, NULL); /* cannot fail with such attributes */
    (void)pthread_mutex_init(&client->gpu_lock, NULL);
    pcc_condition_make(&client->idle);
    client->landed = (struct pcc_chunk_list){PCC_NO_CHUNK, PCC_NO_CHUNK};
    pcc_crew_open(&client->crew);
    PCC_WRITE(&client->patience_ns, GPU_PATIENCE_NS);
    client->close_patience_ns = CLOSE_PATIENCE_NS;
    PCC_WRITE(&client->ahead_bytes, PCC_CUDA_AHEAD_BYTES);
    int error = 0;
    client->socket_fd = fcntl(socket_fd, F_DUPFD_CLOEXEC, 0);
    if (client->socket_fd < 0)
        error = -errno;
    if (error == 0)
        error = page_map(client, page_fd);
    if (error == 0 && !arrays_make(client))
        error = -ENOMEM;
    if (error == 0)
        error = pcc_thread_start(&client->thread, pcc_client_run, client, "pcc-client");
    if (error != 0) {
        link_free(client);
        return error;
    }
    remember(client);
    *out = client;
    return 0;
}

void pcc_client_close(struct pcc_client *client)
{
    if (client == NULL)
        return;
    forget(client);
    PCC_WRITE_RELEASE(&client->stop, true); /* pairs with pcc_client_run */
    pcc_bell_ring(&client->view.page->client_bell);
    (void)pthread_join(client->thread, NULL);
    /* Words stay as they are: what was handed over whole may still become a checkpoint. But no
     * thread keeps the deadlines any more, so no stream may continue to wait for the daemon. */
    (void)pthread_mutex_lock(&client->lock);
    PCC_WRITE_RELEASE(&client->dead, true); /* pairs with the waits */
    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++) {
        struct pcc_job *job = &client->jobs[i];
        if (job->snapshot == 0)
            continue;
        if (!pcc_client_pulled_read(client, job))
            (void)pcc_client_job_abandon(client, job, -ECONNRESET);
        pcc_client_release_streams(client, job);
        pcc_client_job_end(job);
    }
    (void)pthread_mutex_unlock(&client->lock);
    pcc_client_images_release(client, true);
    pcc_client_load_drain(client); /* as the thread does at a hang-up: waits for a load end */
    pcc_bell_ring(&client->view.page->client_bell);
    (void)pthread_mutex_lock(&client->lock);
    while (client->waiters > 0)
        (void)pthread_cond_wait(&client->idle, &client->lock);
    (void)pthread_mutex_unlock(&client->lock);
    pcc_client_devices_close(client);
    if (!client->leaked)
        /* Release pairs with the daemon's acquire: our writes came before. */
        PCC_WRITE_RELEASE(&client->view.page->quiet, 1);
    link_free(client);
}

bool pcc_client_alive(struct pcc_client *client)
{
    struct pollfd socket = {.fd = client->socket_fd, .events = POLLRDHUP};

    if (PCC_READ_ACQUIRE(&client->dead)) /* pairs with the hang-up */
        return false;
    return poll(&socket, 1, 0) <= 0;
}

int pcc_client_unmapped(const struct pcc_client *client)
{
    return PCC_READ(&client->unmapped);
}

uint32_t pcc_client_chunk_bytes(const struct pcc_client *client)
{
    return client->view.geometry.chunk_bytes;
}

static bool final(enum pcc_outcome outcome)
{
    return outcome >= PCC_OUTCOME_DURABLE;
}

static enum pcc_outcome outcome_of(const struct pcc_client *client, uint64_t snapshot)
{
    /* Acquire pairs with the daemon's release: the sequence is seen with it. */
    const uint64_t outcome = PCC_READ_ACQUIRE(&pcc_page_snapshot(&client->view, snapshot)->outcome);

    return outcome >> 8 == snapshot ? (enum pcc_outcome)(outcome & 0xff) : PCC_OUTCOME_REQUESTED;
}

void pcc_client_job_end(struct pcc_job *job)
{
    /* Release pairs with the acquire in pcc_client_wait, as in pcc_client_job_note. */
    PCC_WRITE_RELEASE(&job->state, PCC_JOB_ENDED);
    free(job->memory);
    job->memory = NULL;
    job->sources = NULL;
}

bool pcc_client_job_abandon(struct pcc_client *client, struct pcc_job *job, int error)
{
    struct pcc_snapshot *entry = pcc_page_snapshot(&client->view, job->snapshot);
    const bool won = pcc_word_move(entry, job->snapshot, PCC_WORD_REQUESTED, PCC_WORD_ABANDONED) ||
                     pcc_word_move(entry, job->snapshot, PCC_WORD_COPYING, PCC_WORD_ABANDONED);

    if (won)
        job->error = error;
    pcc_client_release_streams(client, job);
    return won;
}

/* With the lock held: frees all that belongs to the previous snapshot, except the events. */
static void job_reset(struct pcc_job *job, uint64_t snapshot)
{
    free(job->memory);
    job->memory = NULL;
    job->snapshot = snapshot;
    job->hung_up = false;
    job->asking = job->wanted = job->wanting = false;
    job->provisional = false;
    job->error = 0;
    job->fault = 0;
    job->offers = 0;
    job->pulled = job->pushed = job->held = 0;
    job->deferred = job->withdrawn = job->broken = false;
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        struct pcc_job_device *part = &job->devices[i];
        *part = (struct pcc_job_device){
            .marked = part->marked, .copied = part->copied, .page_used = part->page_used};
    }
    PCC_WRITE(&job->stop, false);
    PCC_WRITE(&job->host_read, false);
    PCC_WRITE(&job->state, PCC_JOB_REQUESTED);
}

int pcc_client_request(struct pcc_client *client, uint64_t snapshot)
{
    struct pcc_snapshot *entry = pcc_page_snapshot(&client->view, snapshot);
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    if (snapshot == 0 || snapshot >> 56 != 0)
        return -EINVAL;
    PCC_LOCKED(&client->lock);
    const uint64_t before = job->snapshot;
    const uint32_t state = PCC_READ(&job->state);
    if (PCC_READ(&client->dead))
        return -ECONNRESET;
    if (snapshot <= client->newest)
        return -EINVAL;
    if (before != 0 &&
        (state == PCC_JOB_SUBMITTED || state == PCC_JOB_READ || job->flights > 0 ||
         pcc_client_open_word(client, before) ||
         pcc_page_word(&client->view, before) == pcc_word(before, PCC_WORD_VOUCHING) ||
         (pcc_page_word(&client->view, before) == pcc_word(before, PCC_WORD_COPIED) &&
          !final(outcome_of(client, before)))))
        return -EBUSY;
    client->newest = snapshot;
    client->asking -= job->asking; /* abandoned before its message was sent */
    client->wanting -= job->wanting;
    job_reset(job, snapshot);
    for (uint32_t i = 0; i < PCC_SAMPLES; i++)
        pcc_page_samples(&client->view, snapshot)[i].length_bytes = 0;
    /* Release pairs with the daemon's acquire. No compare-and-swap: the daemon moves only the
     * word of an earlier snapshot, and that word is final. */
    PCC_WRITE_RELEASE(&entry->word, pcc_word(snapshot, PCC_WORD_REQUESTED));
    return 0;
}

/* Acquire pairs with the thread's release: its last read of the source came before. */
static bool source_read(const struct pcc_client *client, const struct pcc_job *job)
{
    return PCC_READ_ACQUIRE(&job->state) != PCC_JOB_SUBMITTED &&
           pcc_client_pulled_read(client, job);
}

static bool host_read(const struct pcc_job *job)
{
    return PCC_READ_ACQUIRE(&job->state) != PCC_JOB_SUBMITTED || PCC_READ_ACQUIRE(&job->host_read);
}

static bool snapshot_over(struct pcc_client *client, const struct pcc_job *job,
                          enum pcc_wait_for what, int *result)
{
    const uint64_t snapshot = job->snapshot;
    const bool dead = PCC_READ_ACQUIRE(&client->dead);
    bool reached;

    if (what == PCC_WAIT_READ) {
        reached = source_read(client, job);
    } else if (what == PCC_WAIT_HOST_READ) {
        reached = host_read(job);
    } else if (what == PCC_WAIT_DRAINED) {
        reached = job->image != NULL ? pcc_client_image_drained(job)
                                     : PCC_READ_ACQUIRE(&job->state) == PCC_JOB_ENDED;
    } else {
        const uint64_t word = pcc_page_word(&client->view, snapshot);
        reached = word == pcc_word(snapshot, PCC_WORD_ABANDONED) ||
                  word == pcc_word(snapshot, PCC_WORD_REFUSED) ||
                  (word == pcc_word(snapshot, PCC_WORD_COPIED) &&
                   (what == PCC_WAIT_COPIED ||
                    outcome_of(client, snapshot) >=
                        (what == PCC_WAIT_GLOBAL ? PCC_OUTCOME_GLOBAL : PCC_OUTCOME_DURABLE)));
    }
    *result = (reached && job->hung_up) || (!reached && dead) ? -ECONNRESET : 0;
    return reached || (dead && what != PCC_WAIT_READ && what != PCC_WAIT_HOST_READ);
}

/* With the lock held. A snapshot whose entry is used again ended long ago. */
static bool is_over(struct pcc_client *client, uint64_t id, enum pcc_wait_for what, int *result)
{
    const struct pcc_job *job = &client->jobs[id % PCC_SNAPSHOTS];

    if (what == PCC_WAIT_LOAD)
        return pcc_client_load_over(client, id);
    return job->snapshot != id || snapshot_over(client, job, what, result);
}

int pcc_client_wait(struct pcc_client *client, uint64_t id, enum pcc_wait_for what,
                    uint64_t deadline_ns)
{
    _Atomic uint32_t *bell = &client->view.page->client_bell;
    int result = 0;

    PCC_CLIENT_WAITS(client);
    for (;;) {
        const uint32_t rung = pcc_bell_read(bell);
        (void)pthread_mutex_lock(&client->lock);
        const bool over = is_over(client, id, what, &result);
        (void)pthread_mutex_unlock(&client->lock);
        if (over)
            return result;
        if (pcc_now_ns() >= deadline_ns)
            return -ETIMEDOUT;
        pcc_bell_sleep(bell, rung, deadline_ns);
        if (!pcc_client_alive(client) && !PCC_READ(&client->dead))
            pcc_bell_ring(bell); /* the thread ends what is outstanding */
    }
}

/* With the lock held: until the thread and the GPUs have stopped reading. */
static void job_await(struct pcc_client *client, const struct pcc_job *job)
{
    const uint64_t limit = pcc_now_ns() + ABANDON_PATIENCE_NS;

    while (job->busy)
        (void)pthread_cond_wait(&client->idle, &client->lock);
    /* Not on a dead client: its thread, which would see them end, is gone. */
    while (job->flying > 0 && !PCC_READ(&client->dead) &&
           pcc_condition_wait(&client->idle, &client->lock, limit))
        ;
}

bool pcc_client_abandon(struct pcc_client *client, uint64_t snapshot)
{
    return pcc_client_abandon_for(client, snapshot, 0);
}

bool pcc_client_abandon_for(struct pcc_client *client, uint64_t snapshot, int error)
{
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    PCC_CLIENT_WAITS(client);
    PCC_LOCKED(&client->lock);
    const uint32_t state = PCC_READ(&job->state);
    const bool may_abandon =
        job->snapshot == snapshot &&
        (pcc_page_word(&client->view, snapshot) == pcc_word(snapshot, PCC_WORD_REQUESTED) ||
         state == PCC_JOB_REQUESTED || state == PCC_JOB_SUBMITTED || job->provisional ||
         !pcc_client_pulled_read(client, job));
    if (!may_abandon || !pcc_client_job_abandon(client, job, error))
        return false;
    PCC_WRITE(&job->stop, true);
    job_await(client, job);
    if (job->snapshot == snapshot)
        pcc_client_job_end(job);
    pcc_bell_ring(&client->view.page->daemon_bell);
    pcc_bell_ring(&client->view.page->client_bell);
    return true;
}

int pcc_client_state(struct pcc_client *client, uint64_t snapshot, struct pcc_client_state *out)
{
    const struct pcc_snapshot *entry = pcc_page_snapshot(&client->view, snapshot);
    const struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    PCC_LOCKED(&client->lock);
    if (job->snapshot != snapshot || snapshot == 0)
        return -ENOENT;
    const uint64_t word = pcc_page_word(&client->view, snapshot);
    out->word = word >> 8 == snapshot ? (enum pcc_word_state)(word & 0xff) : PCC_WORD_IDLE;
    if (out->word == PCC_WORD_VOUCHING) /* not announced yet */
        out->word = PCC_WORD_COPYING;
    out->outcome = pcc_outcome_read(entry, snapshot, &out->reason);
    /* Until the daemon has said something of this snapshot it is that of the one before. */
    out->sequence = out->outcome != PCC_OUTCOME_REQUESTED ? PCC_READ(&entry->sequence) : 0;
    out->newer = out->outcome == PCC_OUTCOME_SUPERSEDED ? PCC_READ(&entry->newer) : 0;
    out->source_read = source_read(client, job);
    out->error = job->error;
    out->fault = job->fault;
    return 0;
}
