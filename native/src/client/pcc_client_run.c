/* The client's thread: messages, grants, deadlines, hang-up. */
#include "client/pcc_client_private.h"

#define BUSY_NS 100000000u /* something is outstanding: look for a hang-up this often */
#define IDLE_NS 1000000000u
#define POLL_NS_MIN 50000u  /* a GPU copies: ask it this often, */
#define POLL_NS_MAX 500000u /* and less often while it has nothing to say */

bool pcc_client_tell(struct pcc_client *client, const struct pcc_message *message)
{
    if (pcc_ring_push(&client->view.to_daemon, message) != 0)
        return false;
    pcc_bell_ring(&client->view.page->daemon_bell);
    return true;
}

/* A chunk that the daemon names. Its segment was sent before the message, but the socket may have
 * been read before both. */
static bool is_granted(struct pcc_client *client, uint32_t chunk)
{
    if (chunk >= client->view.geometry.chunk_capacity)
        return false;
    return client->chunk_at[chunk] != NULL ||
           (pcc_client_take_grants(client) && client->chunk_at[chunk] != NULL);
}

static bool take_free(struct pcc_client *client, uint32_t chunk)
{
    if (!is_granted(client, chunk) || client->held[chunk])
        return false;
    client->held[chunk] = true;
    client->free_chunks[client->free_count++] = chunk;
    return true;
}

static bool take_message(struct pcc_client *client, const struct pcc_message *message)
{
    struct pcc_message answer = {.kind = PCC_MSG_TAKEN, .chunk = message->chunk, .id = message->id};

    switch (message->kind) {
    case PCC_MSG_FREE:
        return take_free(client, message->chunk);
    case PCC_MSG_DATA:
        if (!is_granted(client, message->chunk) ||
            message->length_bytes > client->view.geometry.chunk_bytes ||
            client->held[message->chunk] || client->flights[message->chunk].loading)
            return false;
        return !pcc_client_take_data(client, message, &answer.result) ||
               pcc_client_tell(client, &answer);
    case PCC_MSG_END:
        pcc_client_take_end(client, message);
        return true;
    case PCC_MSG_ANSWER:
        pcc_client_take_answer(client, message);
        return true;
    case PCC_MSG_RETIRE:
        return pcc_client_take_retire(client, message);
    default:
        return false;
    }
}

static bool take_messages(struct pcc_client *client)
{
    struct pcc_message message;
    int result;

    while ((result = pcc_ring_pop(&client->view.to_client, &message)) > 0) {
        if (PCC_READ(&client->stop))
            return true;
        if (!take_message(client, &message))
            return false;
    }
    return result == 0;
}

/* With lock held: the oldest snapshot whose message is to be sent; NULL. */
static struct pcc_job *asking_next(struct pcc_client *client)
{
    struct pcc_job *oldest = NULL;

    for (uint32_t i = 0; client->asking > 0 && i < PCC_SNAPSHOTS; i++) {
        struct pcc_job *job = &client->jobs[i];
        if (job->asking && (oldest == NULL || job->snapshot < oldest->snapshot))
            oldest = job;
    }
    return oldest;
}

/* With lock held: after its request. One that was never submitted stays here until its entry is
 * used again. */
static bool send_wanted(struct pcc_client *client)
{
    for (uint32_t i = 0; client->wanting > 0 && i < PCC_SNAPSHOTS; i++) {
        struct pcc_job *job = &client->jobs[i];
        const struct pcc_message message = {.kind = PCC_MSG_WRITE, .id = job->snapshot};
        if (!job->wanting || PCC_READ(&job->state) == PCC_JOB_REQUESTED)
            continue;
        job->wanting = false;
        client->wanting--;
        if (!pcc_client_tell(client, &message))
            return false;
    }
    return true;
}

/* Tells the daemon of the requests in the page, in their order, and of what is to be written. An
 * abandoned one is over. */
static bool send_requests(struct pcc_client *client)
{
    struct pcc_job *job;

    PCC_LOCKED(&client->lock);
    while ((job = asking_next(client)) != NULL) {
        const struct pcc_message message = {.kind = PCC_MSG_REQUEST, .id = job->snapshot};
        job->asking = false;
        client->asking--;
        if (pcc_client_open_word(client, job->snapshot) && !pcc_client_tell(client, &message))
            return false;
    }
    return send_wanted(client);
}

/* A load must not wait for chunks that lie idle here. */
static bool give_back(struct pcc_client *client)
{
    (void)pthread_mutex_lock(&client->lock);
    const bool wanted = client->load.active && !client->load.ended && !pcc_client_copying(client);
    (void)pthread_mutex_unlock(&client->lock);
    while (wanted && client->free_count > 0) {
        const uint32_t chunk = client->free_chunks[--client->free_count];
        const struct pcc_message message = {.kind = PCC_MSG_TAKEN, .chunk = chunk};
        client->held[chunk] = false;
        if (!pcc_client_tell(client, &message))
            return false;
    }
    return true;
}

/* The daemon is gone: ends everything outstanding, and releases every stream. */
static void hang_up(struct pcc_client *client)
{
    (void)pthread_mutex_lock(&client->lock);
    PCC_WRITE_RELEASE(&client->dead, true); /* pairs with the waits */
    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++) {
        struct pcc_job *job = &client->jobs[i];
        if (job->snapshot == 0)
            continue;
        if (pcc_client_job_abandon(client, job, -ECONNRESET))
            job->hung_up = true;
        pcc_client_job_end(job);
    }
    (void)pthread_cond_broadcast(&client->idle);
    (void)pthread_mutex_unlock(&client->lock);
    pcc_bell_ring(&client->view.page->client_bell);
    pcc_client_images_release(client, true);
    pcc_client_load_drain(client); /* the streams are released: nothing holds the driver up */
}

/* How long the thread may sleep when nothing rings. */
static uint64_t sleep_ns(struct pcc_client *client, uint64_t deadline_ns, uint64_t *poll_ns)
{
    (void)pthread_mutex_lock(&client->lock);
    const bool outstanding =
        pcc_client_copying(client) || (client->load.active && !client->load.ended);
    (void)pthread_mutex_unlock(&client->lock);
    uint64_t sleep = outstanding ? BUSY_NS : IDLE_NS;

    if (client->polling) {
        sleep = *poll_ns;
        *poll_ns = *poll_ns * 2 < POLL_NS_MAX ? *poll_ns * 2 : POLL_NS_MAX;
    }
    const uint64_t now = pcc_now_ns();
    const uint64_t left = deadline_ns > now ? deadline_ns - now : 0;
    return left < sleep ? left : sleep;
}

void *pcc_client_run(void *argument)
{
    struct pcc_client *client = argument;
    _Atomic uint32_t *bell = &client->view.page->client_bell;
    uint64_t poll_ns = POLL_NS_MIN;

    for (;;) {
        const uint32_t rung = pcc_bell_read(bell);
        if (PCC_READ_ACQUIRE(&client->stop))
            return NULL;
        pcc_life_tell(client->view.page);
        const uint64_t deadline_ns = pcc_client_expire(client);
        if (pcc_client_ended(client) || !send_requests(client) || !pcc_client_take_grants(client) ||
            !take_messages(client))
            break;
        const int worked = pcc_client_work(client);
        const int retired = worked < 0 ? -1 : pcc_client_retire(client); /* it adds to `polling` */
        if (retired < 0)
            break;
        const int proved = pcc_client_prove(client); /* and so does this */
        if (worked > 0 || retired > 0 || proved > 0) {
            poll_ns = POLL_NS_MIN;
            continue;
        }
        if (!give_back(client))
            break;
        pcc_futex_wait(bell, rung, sleep_ns(client, deadline_ns, &poll_ns));
    }
    hang_up(client);
    return NULL;
}
