/* A tenant's life: opening, volumes, the attached session. */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "daemon/pcc_tenant_private.h"

#define PULL_LIMIT_NS (30ull * 1000000000u)

/* Requested, begun, wanted, copied, writing and ended for each save, which includes all that wait;
 * that the first one waits, a load's end, a broken peer and the detachment. */
#define TENANT_EVENTS (6u * PCC_TENANT_SAVES + 4u)

static void memory_free(struct pcc_tenant *tenant)
{
    free(tenant->checksums);
    free(tenant->segments);
    free(tenant->chunks);
    free(tenant);
}

int pcc_tenant_open(struct pcc_pool *pool, struct pcc_events *events, struct pcc_gpus *gpus,
                    const struct pcc_tenant_spec *spec, struct pcc_tenant **out)
{
    struct pcc_page_geometry geometry;
    const int error =
        pcc_page_plan(spec->chunk_bytes, spec->block_bytes, spec->chunk_capacity, &geometry);

    if (error != 0)
        return error;
    struct pcc_tenant *tenant = calloc(1, sizeof(*tenant));
    if (tenant == NULL)
        return -ENOMEM;
    tenant->chunks = calloc(spec->chunk_capacity, sizeof(*tenant->chunks));
    tenant->segments = calloc(spec->chunk_capacity, sizeof(*tenant->segments));
    tenant->checksums = calloc(geometry.blocks_per_chunk, sizeof(*tenant->checksums));
    if (tenant->chunks == NULL || tenant->segments == NULL || tenant->checksums == NULL ||
        pcc_events_reserve(events, TENANT_EVENTS) != 0) {
        memory_free(tenant);
        return -ENOMEM;
    }
    (void)pthread_mutex_init(&tenant->control, NULL); /* cannot fail with default attributes */
    (void)pthread_mutex_init(&tenant->growing, NULL);
    (void)pthread_mutex_init(&tenant->lock, NULL);
    (void)pthread_cond_init(&tenant->chunk_back, NULL);
    pcc_condition_make(&tenant->pull.part_ended);
    tenant->pull.limit_ns = PULL_LIMIT_NS;
    tenant->pool = pool;
    tenant->events = events;
    tenant->gpus = gpus;
    tenant->spec = *spec;
    tenant->spec.label = tenant->label;
    if (spec->label != NULL)
        (void)snprintf(tenant->label, sizeof(tenant->label), "%s", spec->label);
    tenant->geometry = geometry;
    pcc_tenant_lists_clear(tenant);
    tenant->bound = PCC_TENANT_VOLUMES;
    tenant->socket_fd = -1;
    tenant->trainer_fd = -1;
    *out = tenant;
    return 0;
}

/* With all savers closed: the descriptor store keeps what has no id here. */
static void parked_leave(struct pcc_tenant *tenant)
{
    bool any = false;

    for (uint32_t i = 0; i < PCC_TENANT_VOLUMES; i++) {
        struct pcc_tenant_binding *binding = &tenant->bindings[i];
        if (binding->active == 0 || binding->kept.bytes == NULL)
            continue;
        binding->kept_id = 0;
        any = true;
    }
    for (uint32_t i = 0; any && i < tenant->segment_count; i++)
        tenant->segments[i].memory.id = 0;
}

void pcc_tenant_close(struct pcc_tenant *tenant)
{
    if (tenant == NULL)
        return;
    (void)pcc_tenant_detach(tenant, NULL, 0);
    for (uint32_t i = 0; i < PCC_TENANT_VOLUMES; i++)
        pcc_saver_close(tenant->bindings[i].saver);
    parked_leave(tenant);
    for (uint32_t i = 0; i < PCC_TENANT_VOLUMES; i++)
        pcc_tenant_kept_drop(tenant, &tenant->bindings[i]);
    for (uint32_t i = 0; i < tenant->segment_count; i++)
        pcc_tenant_segment_return(tenant, &tenant->segments[i]);
    pcc_tenant_pinners_set(tenant, NULL);
    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++)
        free(tenant->saves[i].seen);
    (void)pthread_cond_destroy(&tenant->pull.part_ended);
    (void)pthread_cond_destroy(&tenant->chunk_back);
    (void)pthread_mutex_destroy(&tenant->lock);
    (void)pthread_mutex_destroy(&tenant->growing);
    (void)pthread_mutex_destroy(&tenant->control);
    pcc_events_unreserve(tenant->events, TENANT_EVENTS);
    memory_free(tenant);
}

uint32_t pcc_tenant_binding_find(const struct pcc_tenant *tenant, const struct pcc_volume *volume)
{
    uint32_t i = 0;

    while (i < PCC_TENANT_VOLUMES && tenant->bindings[i].volume != volume)
        i++;
    return i;
}

int pcc_tenant_binding_open(struct pcc_tenant *tenant, uint32_t index, struct pcc_volume *volume)
{
    struct pcc_tenant_binding *binding = &tenant->bindings[index];
    const struct pcc_saver_spec spec = {.lanes = tenant->spec.lanes,
                                        .writers_per_lane = tenant->spec.writers_per_lane,
                                        .chunk_bytes = tenant->spec.chunk_bytes,
                                        .events = &pcc_tenant_save_events,
                                        .owner = tenant,
                                        .kept =
                                            binding->kept.bytes != NULL ? &binding->kept : NULL};
    struct pcc_saver *saver;

    const int error = pcc_saver_open(volume, &spec, &saver);
    if (error != 0)
        return error;
    PCC_LOCKED(&tenant->lock);
    binding->volume = volume;
    binding->saver = saver;
    binding->active = 0;
    binding->lost = false;
    tenant->bound = index;
    pcc_tenant_queue_look(tenant);
    return 0;
}

static int bind_fresh(struct pcc_tenant *tenant, struct pcc_volume *volume)
{
    const uint32_t index = pcc_tenant_binding_find(tenant, NULL);

    if (index == PCC_TENANT_VOLUMES)
        return -EBUSY;
    struct pcc_tenant_binding *binding = &tenant->bindings[index];
    int error = pcc_tenant_kept_make(tenant, binding, volume);
    if (error == 0)
        error = pcc_tenant_binding_open(tenant, index, volume);
    if (error != 0)
        pcc_tenant_kept_drop(tenant, binding);
    return error;
}

int pcc_tenant_bind(struct pcc_tenant *tenant, struct pcc_volume *volume)
{
    if (pcc_volume_geometry(volume).block_bytes != tenant->spec.block_bytes)
        return -EINVAL; /* the client's checksums would not be the volume's */
    PCC_LOCKED(&tenant->control);
    const uint32_t index = pcc_tenant_binding_find(tenant, volume);
    if (index == PCC_TENANT_VOLUMES)
        return bind_fresh(tenant, volume);
    PCC_LOCKED(&tenant->lock);
    tenant->bound = index;
    pcc_tenant_queue_look(tenant);
    return 0;
}

/* The binding of the volume, if there is one, leaves the table. */
static int binding_leave(struct pcc_tenant *tenant, const struct pcc_volume *volume,
                         struct pcc_tenant_binding *gone_out)
{
    PCC_LOCKED(&tenant->lock);
    const uint32_t index = pcc_tenant_binding_find(tenant, volume);
    if (tenant->load.active && tenant->load.volume == volume)
        return -EBUSY;
    if (index == PCC_TENANT_VOLUMES)
        return 0;
    if (tenant->bindings[index].active > 0 || pcc_tenant_is_filled(tenant, index))
        return -EBUSY;
    *gone_out = tenant->bindings[index];
    tenant->bindings[index] = (struct pcc_tenant_binding){0};
    if (tenant->bound == index)
        tenant->bound = PCC_TENANT_VOLUMES;
    return 0;
}

int pcc_tenant_unbind(struct pcc_tenant *tenant, struct pcc_volume *volume)
{
    struct pcc_tenant_binding gone = {0};

    PCC_LOCKED(&tenant->control);
    const int error = binding_leave(tenant, volume, &gone);
    if (gone.saver != NULL) {
        pcc_saver_close(gone.saver);
        pcc_tenant_kept_drop(tenant, &gone);
    }
    return error;
}

/* With the lock held: no client has any segment. */
static void grants_forget(struct pcc_tenant *tenant)
{
    for (uint32_t i = 0; i < tenant->segment_count; i++)
        tenant->segments[i].granted = false;
}

static int attach(struct pcc_tenant *tenant, int socket_fd, uint64_t session, int32_t pid,
                  int *page_fd_out)
{
    int page_fd;
    void *bytes;
    const int socket_copy = fcntl(socket_fd, F_DUPFD_CLOEXEC, 0);

    if (socket_copy < 0)
        return -errno;
    const int trainer_fd = pcc_process_watch(pid);
    int error = pcc_memfd_make("pccheck-page", tenant->geometry.page_bytes, &page_fd, &bytes);
    if (error != 0)
        goto fail;
    pcc_tenant_lock(tenant);
    pcc_page_make(bytes, &tenant->geometry, session, &tenant->view);
    tenant->session = session;
    tenant->socket_fd = socket_copy;
    tenant->trainer_fd = trainer_fd;
    tenant->broken = false;
    tenant->pull.distrusted = 0;
    if (tenant->pull.readers == 0) /* else another rank reads what the session before had */
        tenant->pull.whole_at_end = 0;
    PCC_WRITE(&tenant->stopping, false);
    tenant->attached = true;
    pcc_tenant_unlock(tenant);

    error = pcc_thread_start(&tenant->drain, pcc_tenant_drain_run, tenant, "pcc-drain");
    if (error == 0) {
        *page_fd_out = page_fd;
        return 0;
    }
    pcc_tenant_lock(tenant);
    grants_forget(tenant);
    tenant->attached = false;
    pcc_tenant_unlock(tenant);
    (void)munmap(bytes, tenant->geometry.page_bytes);
    (void)close(page_fd);
fail:
    if (trainer_fd >= 0)
        (void)close(trainer_fd);
    tenant->trainer_fd = -1;
    (void)close(socket_copy);
    return error;
}

int pcc_tenant_attach(struct pcc_tenant *tenant, int socket_fd, uint64_t session, int32_t pid,
                      int *page_fd_out)
{
    PCC_LOCKED(&tenant->control);
    return tenant->attached ? -EBUSY : attach(tenant, socket_fd, session, pid, page_fd_out);
}

/* With the lock held, after the ring was drained: only the copied saves of the session continue. */
static void session_end(struct pcc_tenant *tenant)
{
    tenant->broken = true; /* the client is granted nothing more */
    pcc_tenant_queue_end(tenant);
    for (uint32_t i = 0; i < PCC_TENANT_SAVES; i++) {
        if (tenant->saves[i].session == tenant->session)
            pcc_tenant_abort(tenant, &tenant->saves[i], -PCC_E_ABORTED);
    }
    for (uint32_t i = 0; i < tenant->chunk_count; i++) {
        struct pcc_tenant_chunk *chunk = &tenant->chunks[i];
        if (chunk->state == PCC_CHUNK_LENT && chunk->lent_cached) {
            chunk->lent_cached = chunk->lent_unchecked = false;
            pcc_tenant_chunk_set(tenant, chunk, PCC_CHUNK_CACHED);
        } else if (chunk->state == PCC_CHUNK_LENT) {
            pcc_tenant_chunk_free(tenant, i);
        }
    }
    /* Release pairs with the client's acquire. */
    PCC_WRITE_RELEASE(&tenant->view.page->ended, 1);
    pcc_tenant_wake_client(tenant);
    grants_forget(tenant);
    tenant->load.lent = 0;
    tenant->attached = false;
}

int32_t pcc_tenant_detach(struct pcc_tenant *tenant, struct pcc_tenant *const *others,
                          uint32_t count)
{
    static const struct pcc_source_ops *const sources[] = {&pcc_source_push, &pcc_source_pull};
    int32_t lender = -1;

    PCC_LOCKED(&tenant->control);
    if (tenant->attached) {
        /* Release pairs with the drain thread's acquire. */
        PCC_WRITE_RELEASE(&tenant->stopping, true);
        pcc_bell_ring(&tenant->view.page->daemon_bell);
        (void)pthread_join(tenant->drain, NULL);
        pcc_tenant_load_stop(tenant);
        lender = pcc_tenant_last_step(tenant, others, count);
        pcc_tenant_lock(tenant);
        session_end(tenant);
        pcc_tenant_unlock(tenant);
        for (uint32_t i = 0; i < sizeof(sources) / sizeof(*sources); i++)
            sources[i]->leave(tenant);

        pcc_tenant_lock(tenant);
        void *page = tenant->view.page;
        tenant->view.page = NULL;
        pcc_tenant_unlock(tenant);
        (void)munmap(page, tenant->geometry.page_bytes);
        (void)close(tenant->socket_fd);
        tenant->socket_fd = -1;
        if (tenant->trainer_fd >= 0)
            (void)close(tenant->trainer_fd);
        tenant->trainer_fd = -1;

        pcc_tenant_lock(tenant);
        pcc_tenant_put(tenant,
                       (struct pcc_event){.kind = PCC_EVENT_DETACHED, .session = tenant->session});
        pcc_tenant_unlock(tenant);
    }
    return lender;
}
