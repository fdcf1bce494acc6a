/* Offers: what probably has not changed is read where it is, and the daemon gets its checksums. If
 * they equal those of the snapshot's base, nothing is copied; else the piece is read once more,
 * into a chunk. The source counts as read when every offer has been answered and what was wanted is
 * copied.
 *
 * The last piece of a payload is never offered: the client may keep its chunk until it has decided
 * that the daemon may accept the snapshot. That chunk is filled after all answers, so that it is
 * never missing for a piece that has changed. */
#include "client/pcc_client_private.h"

/* False also for one whose snapshot ended before it was answered. */
static bool is_open(const struct pcc_offer *offer)
{
    return offer->state != PCC_OFFER_NONE && offer->job->snapshot == offer->snapshot &&
           PCC_READ(&offer->job->state) != PCC_JOB_ENDED;
}

static bool may_offer(const struct pcc_client *client, const struct pcc_job *job)
{
    /* Relaxed: the word, which says COPYING, has published it. */
    return job->filled_bytes < job->offered_end &&
           PCC_READ(&pcc_page_snapshot(&client->view, job->snapshot)->base) != 0;
}

/* An unused row; NULL: none now. Offers of snapshots that have ended may still be in the ring,
 * which has room for PCC_OFFERS of them. */
static struct pcc_offer *row_find(struct pcc_client *client)
{
    if (pcc_ring_used(&client->view.to_daemon) >= PCC_OFFERS) {
        client->polling = true;
        return NULL;
    }
    for (uint32_t i = 0; i < PCC_OFFERS; i++)
        if (!is_open(&client->offers[i]))
            return &client->offers[i];
    return NULL;
}

static struct pcc_offer *wanted_find(struct pcc_client *client, const struct pcc_job *job)
{
    for (uint32_t i = 0; job->offers > 0 && i < PCC_OFFERS; i++) {
        struct pcc_offer *offer = &client->offers[i];
        if (offer->state == PCC_OFFER_WANTED && offer->job == job && is_open(offer))
            return offer;
    }
    return NULL;
}

enum pcc_turn pcc_client_turn(struct pcc_client *client, struct pcc_job *job,
                              struct pcc_offer **offer_out)
{
    const uint64_t left = job->payload_bytes - job->filled_bytes;

    *offer_out = client->free_count > 0 ? wanted_find(client, job) : NULL;
    if (*offer_out != NULL)
        return PCC_TURN_WANTED;
    if (left == 0)
        return PCC_TURN_NONE;
    if (may_offer(client, job)) {
        *offer_out = row_find(client);
        return *offer_out != NULL ? PCC_TURN_OFFER : PCC_TURN_NONE;
    }
    if (client->free_count == 0 || (left <= client->view.geometry.chunk_bytes && job->offers > 0))
        return PCC_TURN_NONE;
    return PCC_TURN_FILL;
}

uint64_t *pcc_client_offer_checksums(const struct pcc_client *client, const struct pcc_offer *offer)
{
    return pcc_page_offer(&client->view, (uint32_t)(offer - client->offers));
}

bool pcc_client_offer_make(struct pcc_client *client, struct pcc_job *job, struct pcc_offer *offer,
                           uint64_t length_bytes)
{
    const struct pcc_message message = {.kind = PCC_MSG_OFFER,
                                        .chunk = (uint32_t)(offer - client->offers),
                                        .id = job->snapshot,
                                        .offset_bytes = job->filled_bytes,
                                        .length_bytes = (uint32_t)length_bytes};

    *offer = (struct pcc_offer){.state = PCC_OFFER_ASKED,
                                .job = job,
                                .snapshot = job->snapshot,
                                .offset_bytes = job->filled_bytes,
                                .length_bytes = length_bytes};
    job->offers++;
    return pcc_client_tell(client, &message);
}

void pcc_client_offer_done(struct pcc_offer *offer)
{
    offer->state = PCC_OFFER_NONE;
    offer->job->offers--;
}

void pcc_client_take_answer(struct pcc_client *client, const struct pcc_message *message)
{
    PCC_LOCKED(&client->lock);
    for (uint32_t i = 0; i < PCC_OFFERS; i++) {
        struct pcc_offer *offer = &client->offers[i];
        if (offer->state != PCC_OFFER_ASKED || !is_open(offer) || offer->snapshot != message->id ||
            offer->offset_bytes != message->offset_bytes)
            continue;
        if (message->result == 0) {
            offer->state = PCC_OFFER_WANTED;
        } else {
            offer->job->left_bytes -= offer->length_bytes;
            pcc_client_offer_done(offer);
            pcc_client_job_note(client, offer->job);
        }
        break;
    }
}
