/* A channel's life: opening, volumes, the attached session. */
#include "pcc_channel.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "pcc_channel_private.h"
#include "pcc_futex.h"
#include "pcc_numa.h"
#include "pcc_thread.h"

#define PULL_LIMIT_NS (30ull * 1000000000u)
/* A process that was killed closes its sockets some time before it has ended: its GPU's driver
 * takes the GPU's memory apart in between. */
#define DEATH_LIMIT_MS 2000

/* Copied, writing and ended for each save; a load's end, a broken peer and the detachment. */
#define CHANNEL_EVENTS (3u * PCC_CHANNEL_SAVES + 3u)

int pcc_channel_open(struct pcc_pool *pool, struct pcc_events *events, struct pcc_gpus *gpus,
                     const struct pcc_channel_spec *spec, struct pcc_channel **out)
{
    pthread_condattr_t monotonic;
    struct pcc_page_geometry geometry;
    const int error =
        pcc_page_plan(spec->chunk_bytes, spec->block_bytes, spec->chunk_capacity, &geometry);

    if (error != 0)
        return error;
    struct pcc_channel *channel = calloc(1, sizeof(*channel));
    if (channel == NULL)
        return -ENOMEM;
    channel->chunks = calloc(spec->chunk_capacity, sizeof(*channel->chunks));
    channel->segments = calloc(spec->chunk_capacity, sizeof(*channel->segments));
    channel->checksums = calloc(geometry.blocks_per_chunk, sizeof(*channel->checksums));
    if (channel->chunks == NULL || channel->segments == NULL || channel->checksums == NULL ||
        pcc_events_reserve(events, CHANNEL_EVENTS) != 0) {
        free(channel->checksums);
        free(channel->segments);
        free(channel->chunks);
        free(channel);
        return -ENOMEM;
    }
    (void)pthread_mutex_init(&channel->control, NULL); /* cannot fail with default attributes */
    (void)pthread_mutex_init(&channel->growing, NULL);
    (void)pthread_mutex_init(&channel->lock, NULL);
    (void)pthread_cond_init(&channel->chunk_back, NULL);
    (void)pthread_condattr_init(&monotonic);
    (void)pthread_condattr_setclock(&monotonic, CLOCK_MONOTONIC);
    (void)pthread_cond_init(&channel->pull.part_ended, &monotonic);
    (void)pthread_condattr_destroy(&monotonic);
    channel->pull.limit_ns = PULL_LIMIT_NS;
    channel->pool = pool;
    channel->events = events;
    channel->gpus = gpus;
    channel->spec = *spec;
    channel->spec.label = channel->label;
    if (spec->label != NULL)
        (void)snprintf(channel->label, sizeof(channel->label), "%s", spec->label);
    channel->geometry = geometry;
    channel->bound = PCC_CHANNEL_VOLUMES;
    channel->socket_fd = -1;
    channel->trainer_fd = -1;
    atomic_init(&channel->trainer_node, PCC_NUMA_ANYWHERE);
    atomic_init(&channel->numa_node, PCC_NUMA_ANYWHERE);
    *out = channel;
    return 0;
}

void pcc_channel_close(struct pcc_channel *channel)
{
    if (channel == NULL)
        return;
    pcc_channel_detach(channel);
    for (uint32_t i = 0; i < PCC_CHANNEL_VOLUMES; i++) {
        if (channel->bindings[i].volume != NULL) {
            pcc_saver_close(channel->bindings[i].saver);
            pcc_channel_kept_drop(channel, &channel->bindings[i]);
        }
    }
    for (uint32_t i = 0; i < channel->segment_count; i++)
        pcc_channel_segment_return(channel, &channel->segments[i]);
    pcc_channel_pin_stop(channel);
    for (uint32_t i = 0; i < PCC_CHANNEL_SAVES; i++)
        free(channel->saves[i].seen);
    (void)pthread_cond_destroy(&channel->pull.part_ended);
    (void)pthread_cond_destroy(&channel->chunk_back);
    (void)pthread_mutex_destroy(&channel->lock);
    (void)pthread_mutex_destroy(&channel->growing);
    (void)pthread_mutex_destroy(&channel->control);
    pcc_events_unreserve(channel->events, CHANNEL_EVENTS);
    free(channel->checksums);
    free(channel->segments);
    free(channel->chunks);
    free(channel);
}

uint32_t pcc_channel_binding_find(const struct pcc_channel *channel,
                                  const struct pcc_volume *volume)
{
    uint32_t i = 0;

    while (i < PCC_CHANNEL_VOLUMES && channel->bindings[i].volume != volume)
        i++;
    return i;
}

int pcc_channel_binding_open(struct pcc_channel *channel, uint32_t index, struct pcc_volume *volume)
{
    struct pcc_channel_binding *binding = &channel->bindings[index];
    const struct pcc_saver_spec spec = {.lanes = channel->spec.lanes,
                                        .writers_per_lane = channel->spec.writers_per_lane,
                                        .chunk_bytes = channel->spec.chunk_bytes,
                                        .events = &pcc_channel_save_events,
                                        .owner = channel,
                                        .near_node = &channel->numa_node,
                                        .kept =
                                            binding->kept.bytes != NULL ? &binding->kept : NULL};
    struct pcc_saver *saver;

    const int error = pcc_saver_open(volume, &spec, &saver);
    if (error != 0)
        return error;
    pcc_channel_lock(channel);
    binding->volume = volume;
    binding->saver = saver;
    binding->active = 0;
    channel->bound = index;
    pcc_channel_unlock(channel);
    return 0;
}

static int bind_fresh(struct pcc_channel *channel, struct pcc_volume *volume)
{
    const uint32_t index = pcc_channel_binding_find(channel, NULL);

    if (index == PCC_CHANNEL_VOLUMES)
        return -EBUSY;
    struct pcc_channel_binding *binding = &channel->bindings[index];
    int error = pcc_channel_kept_make(channel, binding, volume);
    if (error == 0)
        error = pcc_channel_binding_open(channel, index, volume);
    if (error != 0)
        pcc_channel_kept_drop(channel, binding);
    return error;
}

int pcc_channel_bind(struct pcc_channel *channel, struct pcc_volume *volume)
{
    int error = 0;

    if (pcc_volume_geometry(volume).block_bytes != channel->spec.block_bytes)
        return -EINVAL; /* the client's checksums would not be the volume's */
    (void)pthread_mutex_lock(&channel->control);
    const uint32_t index = pcc_channel_binding_find(channel, volume);
    if (index == PCC_CHANNEL_VOLUMES) {
        error = bind_fresh(channel, volume);
    } else {
        pcc_channel_lock(channel);
        channel->bound = index;
        pcc_channel_unlock(channel);
    }
    (void)pthread_mutex_unlock(&channel->control);
    return error;
}

int pcc_channel_unbind(struct pcc_channel *channel, struct pcc_volume *volume)
{
    struct pcc_saver *saver = NULL;
    struct pcc_channel_binding gone = {0};
    int error = 0;

    (void)pthread_mutex_lock(&channel->control);
    pcc_channel_lock(channel);
    const uint32_t index = pcc_channel_binding_find(channel, volume);
    if (channel->load.active && channel->load.volume == volume) {
        error = -EBUSY;
    } else if (index < PCC_CHANNEL_VOLUMES) {
        struct pcc_channel_binding *binding = &channel->bindings[index];
        const struct pcc_channel_save *settling = channel->settling;
        if (binding->active > 0 || (settling != NULL && settling->binding == index)) {
            error = -EBUSY;
        } else {
            saver = binding->saver;
            gone = *binding;
            *binding = (struct pcc_channel_binding){0};
            if (channel->bound == index)
                channel->bound = PCC_CHANNEL_VOLUMES;
        }
    }
    pcc_channel_unlock(channel);
    if (saver != NULL) {
        pcc_saver_close(saver);
        pcc_channel_kept_drop(channel, &gone);
    }
    (void)pthread_mutex_unlock(&channel->control);
    return error;
}

/* With the lock held: nobody has any segment. */
static void grants_forget(struct pcc_channel *channel)
{
    for (uint32_t i = 0; i < channel->segment_count; i++)
        channel->segments[i].granted = false;
}

static int attach(struct pcc_channel *channel, int socket_fd, uint64_t session, int32_t pid,
                  int *page_fd_out)
{
    int page_fd;
    void *bytes;
    const int socket_copy = fcntl(socket_fd, F_DUPFD_CLOEXEC, 0);

    if (socket_copy < 0)
        return -errno;
    const int trainer_fd = pcc_process_watch(pid);
    struct pcc_process trainer = pcc_process_open(channel->gpus != NULL ? pid : 0);
    int error = pcc_memfd_make("pccheck-page", channel->geometry.page_bytes, &page_fd, &bytes);
    if (error != 0)
        goto fail;
    atomic_store_explicit(&channel->trainer_node, pcc_numa_of_process(pid), memory_order_relaxed);
    pcc_channel_lock(channel);
    pcc_page_make(bytes, &channel->geometry, session, &channel->view);
    channel->session = session;
    channel->socket_fd = socket_copy;
    channel->trainer_fd = trainer_fd;
    channel->broken = false;
    channel->pull.trainer = trainer;
    atomic_store_explicit(&channel->stopping, false, memory_order_relaxed);
    channel->attached = true;
    pcc_channel_unlock(channel);

    error = pcc_thread_start(&channel->drain, pcc_channel_drain_run, channel, "pcc-drain");
    if (error == 0) {
        *page_fd_out = page_fd;
        return 0;
    }
    pcc_channel_lock(channel);
    grants_forget(channel);
    channel->attached = false;
    pcc_channel_unlock(channel);
    (void)munmap(bytes, channel->geometry.page_bytes);
    (void)close(page_fd);
fail:
    channel->pull.trainer = (struct pcc_process){0};
    pcc_process_close(&trainer);
    if (trainer_fd >= 0)
        (void)close(trainer_fd);
    channel->trainer_fd = -1;
    (void)close(socket_copy);
    return error;
}

int pcc_channel_attach(struct pcc_channel *channel, int socket_fd, uint64_t session, int32_t pid,
                       int *page_fd_out)
{
    (void)pthread_mutex_lock(&channel->control);
    const int error =
        channel->attached ? -EBUSY : attach(channel, socket_fd, session, pid, page_fd_out);
    (void)pthread_mutex_unlock(&channel->control);
    return error;
}

/* The ring was drained: the client is granted nothing more. True when nothing of it can still write
 * to a chunk: it has closed, or its process is known to have ended. */
static bool is_quiet(struct pcc_channel *channel)
{
    pcc_channel_lock(channel);
    channel->broken = true;
    const bool any = channel->granted_count > 0;
    /* Acquire pairs with the client's release. */
    const bool closed = atomic_load_explicit(&channel->view.page->quiet, memory_order_acquire) != 0;
    pcc_channel_unlock(channel);
    return !any || closed || pcc_process_ended(channel->trainer_fd, DEATH_LIMIT_MS);
}

/* With the lock held, after the ring was drained: nothing of the session goes on but copied saves.
 * What the client had to fill it may still fill, unless it is `quiet`. */
static void session_end(struct pcc_channel *channel, bool quiet)
{
    for (uint32_t i = 0; i < PCC_CHANNEL_SAVES; i++) {
        if (channel->saves[i].session == channel->session)
            pcc_channel_give_up(channel, &channel->saves[i], -PCC_E_ABORTED);
    }
    for (uint32_t i = 0; i < channel->chunk_count; i++) {
        struct pcc_channel_chunk *chunk = &channel->chunks[i];
        if (chunk->state == PCC_CHUNK_LENT && chunk->lent_cached) {
            chunk->state = PCC_CHUNK_CACHED;
            chunk->lent_cached = false;
        } else if (chunk->state == PCC_CHUNK_GRANTED && !quiet) {
            chunk->state = PCC_CHUNK_LEFT;
        } else if (chunk->state == PCC_CHUNK_LENT || chunk->state == PCC_CHUNK_GRANTED) {
            pcc_channel_chunk_free(channel, i);
        }
    }
    /* Release pairs with the client's acquire. */
    atomic_store_explicit(&channel->view.page->ended, 1, memory_order_release);
    pcc_channel_wake_client(channel);
    grants_forget(channel);
    channel->granted_count = 0;
    channel->load.lent = 0;
    channel->attached = false;
}

void pcc_channel_detach(struct pcc_channel *channel)
{
    (void)pthread_mutex_lock(&channel->control);
    if (channel->attached) {
        /* Release pairs with the drain thread's acquire. */
        atomic_store_explicit(&channel->stopping, true, memory_order_release);
        pcc_bell_ring(&channel->view.page->daemon_bell);
        (void)pthread_join(channel->drain, NULL);
        pcc_channel_load_stop(channel);
        const bool quiet = is_quiet(channel);

        pcc_channel_lock(channel);
        session_end(channel, quiet);
        void *page = channel->view.page;
        channel->view.page = NULL;
        pcc_channel_unlock(channel);
        (void)munmap(page, channel->geometry.page_bytes);
        (void)close(channel->socket_fd);
        channel->socket_fd = -1;
        if (channel->trainer_fd >= 0)
            (void)close(channel->trainer_fd);
        channel->trainer_fd = -1;
        pcc_channel_pull_end(channel);

        pcc_channel_lock(channel);
        const struct pcc_event event = {.kind = PCC_EVENT_DETACHED, .session = channel->session};
        pcc_channel_put(channel, &event);
        pcc_channel_unlock(channel);
    }
    (void)pthread_mutex_unlock(&channel->control);
}
