/* The link's thread: messages, grants, deadlines, hang-up. */
#include "base/pcc_futex.h"
#include "client/pcc_link_private.h"

#define BUSY_NS 100000000u /* something is outstanding: look for a hang-up this often */
#define IDLE_NS 1000000000u
#define POLL_NS_MIN 50000u  /* a GPU copies: ask it this often, */
#define POLL_NS_MAX 500000u /* and less often while it has nothing to say */

bool pcc_link_tell(struct pcc_link *link, const struct pcc_message *message)
{
    if (pcc_ring_push(&link->view.to_daemon, message) != 0)
        return false;
    pcc_bell_ring(&link->view.page->daemon_bell);
    return true;
}

static bool take_free(struct pcc_link *link, uint32_t chunk)
{
    if (chunk >= link->view.geometry.chunk_capacity)
        return false;
    /* Its segment was sent before the message, but the socket was read before that. */
    if (link->chunk_at[chunk] == NULL &&
        (!pcc_link_take_grants(link) || link->chunk_at[chunk] == NULL))
        return false;
    if (link->held[chunk])
        return false;
    link->held[chunk] = true;
    link->free_chunks[link->free_count++] = chunk;
    return true;
}

static bool take_message(struct pcc_link *link, const struct pcc_message *message)
{
    struct pcc_message answer = {.kind = PCC_MSG_TAKEN, .chunk = message->chunk, .id = message->id};

    switch (message->kind) {
    case PCC_MSG_FREE:
        return take_free(link, message->chunk);
    case PCC_MSG_DATA:
        if (message->chunk >= link->view.geometry.chunk_capacity ||
            message->length_bytes > link->view.geometry.chunk_bytes ||
            (link->chunk_at[message->chunk] == NULL &&
             (!pcc_link_take_grants(link) || link->chunk_at[message->chunk] == NULL)) ||
            link->held[message->chunk] || link->flights[message->chunk].loading)
            return false;
        return !pcc_link_take_data(link, message) || pcc_link_tell(link, &answer);
    case PCC_MSG_END:
        pcc_link_take_end(link, message);
        return true;
    case PCC_MSG_RETIRE:
        return pcc_link_take_retire(link, message);
    default:
        return false;
    }
}

static bool take_messages(struct pcc_link *link)
{
    struct pcc_message message;
    int result;

    while ((result = pcc_ring_pop(&link->view.to_client, &message)) > 0) {
        if (atomic_load_explicit(&link->stop, memory_order_relaxed))
            return true;
        if (!take_message(link, &message))
            return false;
    }
    return result == 0;
}

/* A load must not wait for chunks that lie idle here. */
static bool give_back(struct pcc_link *link)
{
    (void)pthread_mutex_lock(&link->lock);
    const bool wanted = link->load.active && !link->load.ended && !pcc_link_copying(link);
    (void)pthread_mutex_unlock(&link->lock);
    while (wanted && link->free_count > 0) {
        const uint32_t chunk = link->free_chunks[--link->free_count];
        const struct pcc_message message = {.kind = PCC_MSG_TAKEN, .chunk = chunk};
        link->held[chunk] = false;
        if (!pcc_link_tell(link, &message))
            return false;
    }
    return true;
}

/* Nobody listens any more: everything outstanding ends here, and every stream is let go. */
static void hang_up(struct pcc_link *link)
{
    (void)pthread_mutex_lock(&link->lock);
    atomic_store_explicit(&link->dead, true, memory_order_release); /* pairs with the waits */
    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++) {
        struct pcc_job *job = &link->jobs[i];
        if (job->snapshot == 0)
            continue;
        if (pcc_link_job_abandon(link, job, -ECONNRESET))
            job->hung_up = true;
        pcc_link_job_end(job);
    }
    (void)pthread_cond_broadcast(&link->idle);
    (void)pthread_mutex_unlock(&link->lock);
    pcc_bell_ring(&link->view.page->client_bell);
    pcc_link_load_drain(link); /* after the streams were let go: nothing holds the driver up */
}

/* How long the thread may sleep when nothing rings. */
static uint64_t sleep_ns(struct pcc_link *link, uint64_t deadline_ns, uint64_t *poll_ns)
{
    (void)pthread_mutex_lock(&link->lock);
    const bool outstanding = pcc_link_copying(link) || (link->load.active && !link->load.ended);
    (void)pthread_mutex_unlock(&link->lock);
    uint64_t sleep = outstanding ? BUSY_NS : IDLE_NS;

    if (link->polling) {
        sleep = *poll_ns;
        *poll_ns = *poll_ns * 2 < POLL_NS_MAX ? *poll_ns * 2 : POLL_NS_MAX;
    }
    const uint64_t now = pcc_now_ns();
    const uint64_t left = deadline_ns > now ? deadline_ns - now : 0;
    return left < sleep ? left : sleep;
}

void *pcc_link_run(void *argument)
{
    struct pcc_link *link = argument;
    _Atomic uint32_t *bell = &link->view.page->client_bell;
    uint64_t poll_ns = POLL_NS_MIN;

    for (;;) {
        const uint32_t rung = pcc_bell_read(bell);
        if (atomic_load_explicit(&link->stop, memory_order_acquire))
            return NULL;
        const uint64_t deadline_ns = pcc_link_expire(link);
        if (pcc_link_ended(link) || !pcc_link_take_grants(link) || !take_messages(link))
            break;
        const int worked = pcc_link_work(link);
        const int retired = worked < 0 ? -1 : pcc_link_retire(link); /* it adds to `polling` */
        if (retired < 0)
            break;
        if (worked > 0 || retired > 0) {
            poll_ns = POLL_NS_MIN;
            continue;
        }
        if (!give_back(link))
            break;
        pcc_futex_wait(bell, rung, sleep_ns(link, deadline_ns, &poll_ns));
    }
    hang_up(link);
    return NULL;
}
