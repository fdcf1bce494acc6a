/* The order between the trainer's streams and the copies: sample, mark, hold, release.
 *
 * A release of a stream first moves the snapshot's word and then stores `done`, so that no update
 * can run while the snapshot may still become COPIED (P4). The caller of hold looks at the word
 * again after it has enqueued the wait: either it sees the final word, or the process that makes
 * the word final stores `done` afterwards. */
#include "client/pcc_client_private.h"
#include "shared/pcc_sample.h"

bool pcc_client_pulled_read(const struct pcc_client *client, const struct pcc_job *job)
{
    if (job->pulled == 0 || job->broken || !pcc_client_open_word(client, job->snapshot))
        return true;
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        /* Acquire pairs with the daemon's release: its reads came before our next update. */
        if ((job->pulled >> i & 1) != 0 &&
            PCC_READ_ACQUIRE(&pcc_page_words(&client->view, job->snapshot, i)->done) <
                job->snapshot)
            return false;
    }
    return true;
}

void pcc_client_release_streams(struct pcc_client *client, struct pcc_job *job)
{
    if (job->pulled == 0 || pcc_client_open_word(client, job->snapshot))
        return;
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        if ((job->pulled >> i & 1) == 0)
            continue;
        _Atomic uint64_t *done = &pcc_page_words(&client->view, job->snapshot, i)->done;
        uint64_t now = PCC_READ(done);
        /* Release: the word's move comes before it. The words only grow. */
        while (now < job->snapshot &&
               !atomic_compare_exchange_weak_explicit(done, &now, job->snapshot,
                                                      memory_order_release, memory_order_relaxed))
            ;
    }
    job->held = 0;
}

/* With lock held: whether a stream that `held` names waits, which the daemon can still release. */
static bool held_back(struct pcc_client *client, struct pcc_job *job)
{
    if (!pcc_client_open_word(client, job->snapshot)) {
        pcc_client_release_streams(client, job);
        return false;
    }
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        if ((job->held >> i & 1) != 0 &&
            PCC_READ(&pcc_page_words(&client->view, job->snapshot, i)->done) >= job->snapshot)
            job->held &= ~(1u << i);
    }
    return job->held != 0;
}

/* With lock held: true when a stream that `held` names has reached the snapshot. Before that the
 * stream is busy with earlier work and does not wait, however far ahead the CPU is. */
static bool has_come(const struct pcc_client *client, const struct pcc_job *job)
{
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        if ((job->held >> i & 1) != 0 &&
            PCC_READ(&pcc_page_words(&client->view, job->snapshot, i)->ready) >= job->snapshot)
            return true;
    }
    return false;
}

uint64_t pcc_client_expire(struct pcc_client *client)
{
    uint64_t nearest = UINT64_MAX;

    if (!PCC_READ(&client->armed)) /* hold rings the bell */
        return nearest;
    PCC_LOCKED(&client->lock);
    const uint64_t now = pcc_now_ns();
    for (uint32_t i = 0; i < PCC_SNAPSHOTS; i++) {
        struct pcc_job *job = &client->jobs[i];
        if (job->held == 0 || !held_back(client, job))
            continue;
        if (!has_come(client, job))
            job->deadline_ns = now + job->limit_ns;
        if (now < job->deadline_ns) {
            nearest = job->deadline_ns < nearest ? job->deadline_ns : nearest;
        } else if (pcc_client_job_abandon(client, job, -ETIMEDOUT)) {
            pcc_client_job_end(job); /* not busy: we are the thread */
            pcc_bell_ring(&client->view.page->daemon_bell);
            pcc_bell_ring(&client->view.page->client_bell);
        }
    }
    if (nearest == UINT64_MAX)
        PCC_WRITE(&client->armed, false);
    return nearest;
}

/* Records the event behind what is on `stream` now, so that close() can tell when the trainer's
 * streams have passed the page. If the event is still pending on another stream, `stream` first
 * waits for that one, so that the event stands for both. */
static CUresult record_behind(const struct pcc_cuda *cuda, CUevent *event, CUstream stream)
{
    CUresult result = CUDA_SUCCESS;

    if (*event == NULL)
        result = cuda->event_create(event, CU_EVENT_DISABLE_TIMING);
    else if (cuda->event_query(*event) == CUDA_ERROR_NOT_READY)
        result = cuda->stream_wait_event(stream, *event, 0);
    return result == CUDA_SUCCESS ? cuda->event_record(*event, stream) : result;
}

/* What is on the stream now reads or writes the page. Within PCC_CLIENT_GPU. */
static void page_used(struct pcc_client *client, uint64_t snapshot, uint32_t device,
                      CUstream stream)
{
    struct pcc_client_device *mine = &client->devices[device];
    struct pcc_job_device *part = &client->jobs[snapshot % PCC_SNAPSHOTS].devices[device];

    PCC_LOCKED(&client->gpu_lock);
    if (record_behind(mine->gpu.cuda, &part->page_used, stream) != CUDA_SUCCESS)
        mine->unfenced = true;
}

/* The page's words of a snapshot, as the GPU's streams see them. */
static CUdeviceptr words_at(const struct pcc_client_device *device, uint64_t snapshot,
                            uint32_t index)
{
    return device->page + offsetof(struct pcc_page, devices) +
           ((snapshot % PCC_SNAPSHOTS) * PCC_DEVICES + index) * sizeof(struct pcc_device_words);
}

/* -- mark -- */

/* Within PCC_CLIENT_GPU. */
static CUresult mark(struct pcc_client *client, uint64_t snapshot, uint32_t index, CUstream stream,
                     bool pull)
{
    struct pcc_client_device *device = &client->devices[index];
    struct pcc_job_device *part = &client->jobs[snapshot % PCC_SNAPSHOTS].devices[index];
    const struct pcc_cuda *cuda = device->gpu.cuda;
    CUresult result = CUDA_SUCCESS;

    if (!pull) {
        if (part->marked == NULL)
            result = cuda->event_create(&part->marked, CU_EVENT_DISABLE_TIMING);
        if (result == CUDA_SUCCESS && part->copied == NULL)
            result = cuda->event_create(&part->copied, CU_EVENT_DISABLE_TIMING);
        return result == CUDA_SUCCESS ? cuda->event_record(part->marked, stream) : result;
    }
    result = cuda->stream_write_value(
        stream, words_at(device, snapshot, index) + offsetof(struct pcc_device_words, ready),
        snapshot, CU_STREAM_WRITE_VALUE_DEFAULT);
    if (result == CUDA_SUCCESS) {
        result = record_behind(cuda, &part->marked, stream);
        if (result != CUDA_SUCCESS)
            device->unfenced = true;
    }
    return result;
}

/* True when the snapshot takes marks; its events are the caller's until the caller marks them. */
static bool takes_marks(struct pcc_client *client, uint64_t snapshot)
{
    const struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    PCC_LOCKED(&client->lock);
    return job->snapshot == snapshot && PCC_READ(&job->state) == PCC_JOB_REQUESTED;
}

int pcc_client_mark(struct pcc_client *client, uint64_t snapshot, uint32_t device, uint64_t stream,
                    bool pull, bool aside)
{
    struct pcc_client_device *mine = pcc_client_device(client, device);
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    if (mine == NULL)
        return -EINVAL;
    if (pull && mine->page == 0)
        return -PCC_E_DEVICE;
    PCC_CLIENT_WAITS(client);
    if (!takes_marks(client, snapshot))
        return 0; /* abandoned or hung up since: nothing to mark */
    PCC_CLIENT_GPU(gpu, mine);
    if (gpu.error != 0)
        return gpu.error;
    CUstream const on = aside ? mine->side : (CUstream)(uintptr_t)stream;
    const int error = pcc_client_gpu_code(mine, mark(client, snapshot, device, on, pull));
    if (error != 0)
        return error;
    PCC_LOCKED(&client->lock);
    if (job->snapshot == snapshot) {
        job->devices[device].is_marked = true;
        job->devices[device].aside = aside;
        *(pull ? &job->pulled : &job->pushed) |= 1u << device;
    }
    return 0;
}

/* -- samples -- */

/* Within PCC_CLIENT_GPU. */
static CUresult samples_take(const struct pcc_client_device *device, uint64_t snapshot,
                             CUstream stream, const struct pcc_range parts[PCC_SAMPLES])
{
    struct pcc_page *page = device->page_at;
    struct pcc_sample *samples = page->samples[snapshot % PCC_SNAPSHOTS];
    CUresult result = CUDA_SUCCESS;

    for (uint32_t i = 0; result == CUDA_SUCCESS && i < PCC_SAMPLES; i++) {
        if (parts[i].length_bytes > 0)
            result = device->gpu.cuda->copy_to_host(samples[i].bytes, parts[i].address,
                                                    parts[i].length_bytes, stream);
    }
    return result;
}

/* A stream has yet to copy samples of the snapshot that had the entry before, perhaps to the place
 * of ours: without samples nothing there counts. */
static bool is_in_use(struct pcc_client *client, uint64_t snapshot, uint32_t device)
{
    const struct pcc_job_device *part = &client->jobs[snapshot % PCC_SNAPSHOTS].devices[device];

    PCC_LOCKED(&client->gpu_lock);
    return part->page_used != NULL &&
           client->devices[device].gpu.cuda->event_query(part->page_used) == CUDA_ERROR_NOT_READY;
}

int pcc_client_sample(struct pcc_client *client, uint64_t snapshot, uint32_t device,
                      uint64_t stream, const struct pcc_device_range *ranges, uint64_t range_count)
{
    struct pcc_client_device *mine = pcc_client_device(client, device);
    struct pcc_range parts[PCC_SAMPLES];

    if (mine == NULL || !pcc_samples_can_be_of(ranges, range_count))
        return -EINVAL;
    if (mine->page_at == NULL)
        return 0;
    PCC_CLIENT_WAITS(client);
    if (!takes_marks(client, snapshot))
        return 0;
    PCC_CLIENT_GPU(gpu, mine);
    if (gpu.error != 0)
        return gpu.error;
    if (is_in_use(client, snapshot, device))
        return 0;
    pcc_samples_choose(&client->view, snapshot, device, ranges, range_count, parts);
    CUstream const on = (CUstream)(uintptr_t)stream;
    const CUresult result = samples_take(mine, snapshot, on, parts);
    page_used(client, snapshot, device, on);
    return pcc_client_gpu_code(mine, result);
}

/* -- what has been reached -- */

bool pcc_client_reached(struct pcc_client *client, uint64_t snapshot)
{
    const struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    PCC_CLIENT_WAITS(client);
    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        struct pcc_client_device *device = pcc_client_device(client, i);
        (void)pthread_mutex_lock(&client->lock);
        const bool marked = job->snapshot == snapshot && job->devices[i].is_marked;
        CUevent const event = job->devices[i].marked; /* made once, and kept */
        (void)pthread_mutex_unlock(&client->lock);
        if (!marked || device == NULL)
            continue;
        PCC_CLIENT_GPU(gpu, device);
        if (gpu.error == 0 && device->gpu.cuda->event_query(event) == CUDA_ERROR_NOT_READY)
            return false;
    }
    return true;
}

bool pcc_client_sound(struct pcc_client *client, uint64_t snapshot)
{
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    for (uint32_t i = 0; i < PCC_DEVICES; i++) {
        struct pcc_client_device *device = pcc_client_device(client, i);
        (void)pthread_mutex_lock(&client->lock);
        const bool asked = job->snapshot == snapshot && job->deferred && job->devices[i].is_marked;
        CUevent const event = job->devices[i].marked; /* made once, and kept */
        (void)pthread_mutex_unlock(&client->lock);
        if (!asked || device == NULL)
            continue;
        PCC_CLIENT_GPU(gpu, device);
        const CUresult result = gpu.error == 0 ? device->gpu.cuda->event_query(event) : 0;
        if (gpu.error != 0 || (result != CUDA_SUCCESS && result != CUDA_ERROR_NOT_READY))
            return false;
    }
    return true;
}

/* -- hold -- */

enum hold_way {
    HOLD_NOT,   /* nothing to wait for */
    HOLD_LATER, /* the host waits first: for copies to be enqueued (push), or for the proof (pull)
                 */
    HOLD_EVENT,
    HOLD_WORD,
    HOLD_BOTH,     /* the daemon reads a part of this GPU, and the client the rest */
    HOLD_WITHDRAW, /* it does not wait: from here on the snapshot is gone */
};

/* The daemon may still ask what this GPU holds (pcc_client_prove). On a GPU with one hardware queue
 * the copies of the answer would stay behind a stream that waits for the daemon, for ever. So the
 * host waits instead, once for an exposure. */
static bool is_to_prove(const struct pcc_client *client, uint64_t snapshot, uint32_t device)
{
    return PCC_READ(&client->view.page->proof.proven[device]) !=
           pcc_page_request(&client->view, snapshot)->map;
}

/* With lock held. `staging`: for what overwrites what was staged. */
static enum hold_way hold_way(struct pcc_client *client, uint64_t snapshot, uint32_t device,
                              bool staging, CUevent *event_out)
{
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];
    const struct pcc_job_device *part = &job->devices[device];
    const uint32_t state = PCC_READ(&job->state);

    if (job->snapshot != snapshot || !part->is_marked)
        return HOLD_NOT;
    if (!pcc_client_open_word(client, snapshot)) {
        pcc_client_release_streams(client, job);
        return HOLD_NOT;
    }
    const bool aside = part->aside && !staging;
    *event_out = aside ? part->marked : part->copied;
    if (job->deferred && (job->pulled >> device & 1) != 0) {
        *event_out = aside ? part->marked : NULL;
        return HOLD_WITHDRAW;
    }
    if (aside)
        return HOLD_EVENT;
    /* Acquire pairs with the daemon's release of done. */
    const bool by_word =
        (job->pulled >> device & 1) != 0 &&
        PCC_READ_ACQUIRE(&pcc_page_words(&client->view, snapshot, device)->done) < snapshot;
    if (by_word && is_to_prove(client, snapshot, device))
        return HOLD_LATER;
    if ((job->pushed >> device & 1) == 0)
        return by_word ? HOLD_WORD : HOLD_NOT;
    if (part->enqueued)
        return by_word ? HOLD_BOTH : HOLD_EVENT;
    if (state == PCC_JOB_REQUESTED && !PCC_READ(&client->dead))
        return HOLD_LATER;
    if (state == PCC_JOB_SUBMITTED && part->end_bytes > 0)
        return HOLD_LATER;
    return by_word ? HOLD_WORD : HOLD_NOT;
}

/* Has all copies of this snapshot and of those before it enqueued now, since a stream is about to
 * wait for them. */
static void copies_all(struct pcc_client *client, uint64_t snapshot)
{
    uint64_t newest = PCC_READ(&client->at_gate);

    while (newest < snapshot &&
           !atomic_compare_exchange_weak_explicit(&client->at_gate, &newest, snapshot,
                                                  memory_order_relaxed, memory_order_relaxed))
        ;
    if (newest < snapshot)
        pcc_bell_ring(&client->view.page->client_bell);
}

/* Waits on the host while the way is HOLD_LATER, at most until then. */
static enum hold_way hold_await(struct pcc_client *client, uint64_t snapshot, uint32_t device,
                                bool staging, CUevent *event_out, uint64_t until_ns)
{
    _Atomic uint32_t *bell = &client->view.page->client_bell;

    for (;;) {
        const uint32_t rung = pcc_bell_read(bell);
        (void)pthread_mutex_lock(&client->lock);
        const enum hold_way way = hold_way(client, snapshot, device, staging, event_out);
        (void)pthread_mutex_unlock(&client->lock);
        if (way != HOLD_LATER || pcc_now_ns() >= until_ns)
            return way;
        copies_all(client, snapshot);
        pcc_bell_sleep(bell, rung, until_ns);
        if (!pcc_client_alive(client) && !PCC_READ(&client->dead))
            pcc_bell_ring(bell); /* the thread ends what is outstanding */
    }
}

/* The deadline is the thread's to keep; before the wait is enqueued, so that there is no moment at
 * which the stream waits without a deadline. */
static void hold_arm(struct pcc_client *client, uint64_t snapshot, uint32_t device,
                     uint64_t deadline_ns)
{
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    (void)pthread_mutex_lock(&client->lock);
    if (job->snapshot == snapshot) {
        if (job->held == 0 || deadline_ns < job->deadline_ns) {
            const uint64_t now = pcc_now_ns();
            job->deadline_ns = deadline_ns;
            job->limit_ns = deadline_ns > now ? deadline_ns - now : 1;
        }
        job->held |= 1u << device;
        PCC_WRITE(&client->armed, true);
    }
    (void)pthread_mutex_unlock(&client->lock);
    pcc_bell_ring(&client->view.page->client_bell);
}

static void hold_recheck(struct pcc_client *client, uint64_t snapshot)
{
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    PCC_LOCKED(&client->lock);
    if (job->snapshot == snapshot)
        pcc_client_release_streams(client, job);
}

/* Either its owner wants it on the disk (pcc_client_write) or streams withdraw it, never both.
 * False: it is wanted by now, or has ended. *first_out: no other stream withdraws it yet. */
static bool withdraw_begin(struct pcc_client *client, uint64_t snapshot, bool *first_out)
{
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    PCC_LOCKED(&client->lock);
    const bool mine = job->snapshot == snapshot && job->deferred;
    *first_out = mine && !job->withdrawn;
    job->withdrawn = job->withdrawn || mine;
    return mine;
}

/* No stream will: its owner may have it copied before the memory changes. */
static void withdraw_fail(struct pcc_client *client, uint64_t snapshot)
{
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    PCC_LOCKED(&client->lock);
    if (job->snapshot == snapshot)
        job->withdrawn = false;
}

/* In stream order: what comes next changes the memory. A copy on the device that reads it (`event`)
 * comes first. Within PCC_CLIENT_GPU. */
static int withdraw(struct pcc_client *client, uint64_t snapshot, uint32_t device, CUstream stream,
                    CUevent event)
{
    struct pcc_client_device *mine = &client->devices[device];
    CUresult result = CUDA_SUCCESS;

    if (event != NULL)
        result = mine->gpu.cuda->stream_wait_event(stream, event, 0);
    if (result == CUDA_SUCCESS)
        result = mine->gpu.cuda->stream_write_value(
            stream, words_at(mine, snapshot, device) + offsetof(struct pcc_device_words, withdrawn),
            snapshot, CU_STREAM_WRITE_VALUE_DEFAULT);
    if (result == CUDA_SUCCESS)
        page_used(client, snapshot, device, stream);
    return pcc_client_gpu_code(mine, result);
}

/* The stream waits, for an event, for a word of the page or for both; or withdraws the snapshot. */
static int hold_enqueue(struct pcc_client *client, uint64_t snapshot, uint32_t device,
                        CUstream stream, enum hold_way way, CUevent event)
{
    struct pcc_client_device *mine = &client->devices[device];

    PCC_CLIENT_GPU(gpu, mine);
    if (gpu.error != 0)
        return gpu.error;
    if (way == HOLD_WITHDRAW)
        return withdraw(client, snapshot, device, stream, event);
    if (event != NULL) {
        const int error =
            pcc_client_gpu_code(mine, mine->gpu.cuda->stream_wait_event(stream, event, 0));
        if (error != 0 || way == HOLD_EVENT)
            return error;
    }
    const CUresult result = mine->gpu.cuda->stream_wait_value(
        stream, words_at(mine, snapshot, device) + offsetof(struct pcc_device_words, done),
        snapshot, CU_STREAM_WAIT_VALUE_GEQ);
    if (result == CUDA_SUCCESS)
        page_used(client, snapshot, device, stream);
    return pcc_client_gpu_code(mine, result);
}

int pcc_client_hold(struct pcc_client *client, uint64_t snapshot, uint32_t device, uint64_t stream,
                    uint64_t deadline_ns)
{
    struct pcc_client_device *mine = pcc_client_device(client, device);
    const bool staging = stream == PCC_STAGING;
    CUevent event = NULL;
    bool first = false;

    if (mine == NULL)
        return -EINVAL;
    PCC_CLIENT_WAITS(client);
    enum hold_way way;
    do
        way = hold_await(client, snapshot, device, staging, &event, deadline_ns);
    while (way == HOLD_WITHDRAW && !withdraw_begin(client, snapshot, &first));
    if (way == HOLD_LATER || way == HOLD_NOT)
        return way == HOLD_LATER ? -ETIMEDOUT : 0;
    const bool by_word = way == HOLD_WORD || way == HOLD_BOTH;
    if (by_word)
        hold_arm(client, snapshot, device, deadline_ns);
    CUstream const on = staging ? mine->side : (CUstream)(uintptr_t)stream;
    const int error =
        hold_enqueue(client, snapshot, device, on, way, way == HOLD_WORD ? NULL : event);
    if (by_word)
        hold_recheck(client, snapshot);
    if (first && error != 0)
        withdraw_fail(client, snapshot);
    /* The driver's want of memory for the wait: it is not enqueued. */
    return error == -ENOMEM ? -PCC_E_DEVICE : error;
}

bool pcc_client_hold_ready(struct pcc_client *client, uint64_t snapshot, uint32_t device,
                           uint64_t stream, uint64_t until_ns)
{
    CUevent ignored;

    if (pcc_client_device(client, device) == NULL)
        return true;
    PCC_CLIENT_WAITS(client);
    return hold_await(client, snapshot, device, stream == PCC_STAGING, &ignored, until_ns) !=
           HOLD_LATER;
}
