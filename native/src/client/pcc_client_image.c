/* A process image: the bytes of many pipes, in the order in which they come, read straight into
 * granted chunks. Its length is known at the end. The daemon's writers make the checksums, so that
 * the process that is dumped stands still for one copy only.
 *
 * The caller gives pipes (pcc_client_image_stream), waits until all have ended (PCC_WAIT_DRAINED),
 * learns where the bytes of each lie, and ends the image with its tree. The client's thread reads,
 * and its crew copies.
 * A stream that is not `bulk` is collected, and comes behind all that are: what a process has in
 * memory then lies where it lay in its image before, so that the writers find what has not changed.
 */
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client/pcc_client_private.h"

#define STREAMS_MAX 4096u
#define SMALL_BYTES_MAX (256u << 20)
#define SMALL_BYTES_FIRST 16384u
#define POLL_MS 2
#define POLLED_MAX 64u
#define SIDES 4u
#define SIDE_BYTES (256u << 10)

/* A pipe of ours. Only one thread at a time reads a pipe, so the pages that several threads copy at
 * once are moved into a pipe for each thread. */
struct side {
    int reads, writes; /* -1: there is none */
    uint8_t *to;
    uint64_t bytes;
    int error;
};

struct stream {
    uint32_t index; /* in the table */
    uint32_t number;
    int fd; /* -1: it has ended */
    bool bulk;
    uint8_t *bytes; /* collected; NULL if bulk */
    uint64_t count, room;
};

struct pcc_image {
    /* guarded by the client's lock */
    struct stream *streams; /* the thread alone removes and changes those that it was given */
    uint32_t stream_count, stream_room;
    uint32_t open; /* streams that have not ended */
    struct pcc_image_extent *extents;
    uint64_t extent_count, extent_room;
    uint64_t bytes;     /* of the payload so far */
    uint64_t collected; /* bytes that have no place in it yet */
    bool placed;        /* they have: no stream comes any more */
    uint32_t next;      /* the first stream whose collected bytes may not be in a chunk yet */
    uint8_t *tail;
    uint64_t tail_bytes;
    bool ending; /* the tail is there */
    /* the thread's own */
    uint32_t chunk; /* being filled; PCC_NO_CHUNK */
    uint64_t filled;
    uint8_t *pending; /* goes into the payload next */
    uint64_t pending_bytes, pending_at;
    bool length_sent;
    struct side sides[SIDES];
};

/* -- the caller's side -- */

static int grow(void **items, uint32_t item_bytes, uint64_t count, uint64_t *room)
{
    if (count < *room)
        return 0;
    const uint64_t wanted = *room == 0 ? 64 : *room * 2;
    void *made = realloc(*items, wanted * item_bytes);
    if (made == NULL)
        return -ENOMEM;
    *items = made;
    *room = wanted;
    return 0;
}

/* Without them one thread reads. */
static void sides_open(struct pcc_image *image)
{
    for (uint32_t i = 0; i < SIDES; i++) {
        int ends[2] = {-1, -1};
        if (pipe2(ends, O_CLOEXEC) == 0)
            (void)fcntl(ends[0], F_SETPIPE_SZ, SIDE_BYTES);
        image->sides[i] = (struct side){.reads = ends[0], .writes = ends[1]};
    }
}

static void sides_close(struct pcc_image *image)
{
    for (uint32_t i = 0; i < SIDES; i++) {
        if (image->sides[i].reads < 0)
            continue;
        (void)close(image->sides[i].reads);
        (void)close(image->sides[i].writes);
    }
}

int pcc_client_image_begin(struct pcc_client *client, uint64_t snapshot,
                           const struct pcc_request *request)
{
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];
    struct pcc_image *image = calloc(1, sizeof(*image));

    if (image == NULL)
        return -ENOMEM;
    image->chunk = PCC_NO_CHUNK;
    sides_open(image);
    (void)pthread_mutex_lock(&client->lock);
    int error = 0;
    if (PCC_READ(&client->dead))
        error = -ECONNRESET;
    else if (job->snapshot != snapshot || job->image != NULL)
        error = -ENOENT;
    else if (PCC_READ(&job->state) != PCC_JOB_REQUESTED || request->payload_bytes == 0)
        error = -EINVAL;
    if (error == 0) {
        job->image = image;
        job->cursor = job->source_count = 0;
        job->payload_bytes = job->left_bytes = request->payload_bytes;
        job->trainer_bytes = job->host_bytes = UINT64_MAX; /* read when it has ended */
        job->filled_bytes = job->offered_end = 0;
        job->flights++; /* the image, until the thread has let it go */
        client->images++;
        pcc_client_job_ask(client, job, request);
        PCC_WRITE(&job->state, PCC_JOB_SUBMITTED);
    }
    (void)pthread_mutex_unlock(&client->lock);
    if (error != 0) {
        sides_close(image);
        free(image);
    }
    pcc_bell_ring(&client->view.page->client_bell);
    return error;
}

/* With the lock held: the image of a snapshot that goes on; NULL. */
static struct pcc_image *image_of(struct pcc_client *client, uint64_t snapshot)
{
    struct pcc_job *job = &client->jobs[snapshot % PCC_SNAPSHOTS];

    return job->snapshot == snapshot && PCC_READ(&job->state) == PCC_JOB_SUBMITTED ? job->image
                                                                                   : NULL;
}

static int stream_add(struct pcc_client *client, struct pcc_image *image, struct stream stream)
{
    uint64_t room = image->stream_room;

    if (image->placed || image->stream_count == STREAMS_MAX)
        return -EINVAL;
    const int error = grow((void **)&image->streams, sizeof(stream), image->stream_count, &room);
    if (error != 0)
        return error;
    image->stream_room = (uint32_t)room;
    stream.index = image->stream_count;
    image->streams[image->stream_count++] = stream;
    image->open++;
    pcc_bell_ring(&client->view.page->client_bell);
    return 0;
}

int pcc_client_image_stream(struct pcc_client *client, uint64_t snapshot, int fd, uint32_t number,
                            bool bulk)
{
    const int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
    const int flags = own < 0 ? -1 : fcntl(own, F_GETFL);

    if (flags < 0 || fcntl(own, F_SETFL, flags | O_NONBLOCK) < 0) {
        const int error = -errno;
        if (own >= 0)
            (void)close(own);
        return error;
    }
    (void)pthread_mutex_lock(&client->lock);
    struct pcc_image *image = image_of(client, snapshot);
    const struct stream stream = {.number = number, .fd = own, .bulk = bulk};
    const int error = image == NULL ? -ENOENT : stream_add(client, image, stream);
    (void)pthread_mutex_unlock(&client->lock);
    if (error != 0)
        (void)close(own);
    return error;
}

/* With the lock held: bytes of a stream go to the end of the payload. */
static int extent_add(struct pcc_image *image, uint32_t number, uint64_t count)
{
    struct pcc_image_extent *last =
        image->extent_count > 0 ? &image->extents[image->extent_count - 1] : NULL;

    if (last != NULL && last->stream == number &&
        last->offset_bytes + last->length_bytes == image->bytes) {
        last->length_bytes += count;
    } else {
        const int error = grow((void **)&image->extents, sizeof(*image->extents),
                               image->extent_count, &image->extent_room);
        if (error != 0)
            return error;
        image->extents[image->extent_count++] = (struct pcc_image_extent){
            .stream = number, .offset_bytes = image->bytes, .length_bytes = count};
    }
    image->bytes += count;
    return 0;
}

/* With the lock held: whatever was collected gets its place. */
static int place_collected(struct pcc_image *image)
{
    int error = 0;

    for (uint32_t i = 0; error == 0 && !image->placed && i < image->stream_count; i++)
        if (image->streams[i].count > 0)
            error = extent_add(image, image->streams[i].number, image->streams[i].count);
    image->placed = error == 0;
    image->collected = 0;
    return error;
}

int pcc_client_image_extents(struct pcc_client *client, uint64_t snapshot,
                             struct pcc_image_extent **out, uint64_t *out_count)
{
    PCC_LOCKED(&client->lock);
    struct pcc_image *image = image_of(client, snapshot);
    if (image == NULL)
        return -ENOENT;
    if (image->open > 0)
        return -EBUSY;
    const int error = place_collected(image);
    if (error != 0)
        return error;
    *out = malloc((image->extent_count + 1) * sizeof(**out));
    if (*out == NULL)
        return -ENOMEM;
    if (image->extent_count > 0)
        memcpy(*out, image->extents, image->extent_count * sizeof(**out));
    *out_count = image->extent_count;
    return 0;
}

uint64_t pcc_client_image_bytes(struct pcc_client *client, uint64_t snapshot)
{
    PCC_LOCKED(&client->lock);
    const struct pcc_image *image = image_of(client, snapshot);
    return image != NULL ? image->bytes + image->collected : 0;
}

int pcc_client_image_end(struct pcc_client *client, uint64_t snapshot, const void *tail,
                         uint64_t tail_bytes)
{
    uint8_t *copy = tail_bytes == 0 || tail_bytes > UINT32_MAX ? NULL : malloc(tail_bytes);

    if (copy == NULL)
        return tail_bytes == 0 || tail_bytes > UINT32_MAX ? -EINVAL : -ENOMEM;
    memcpy(copy, tail, tail_bytes);
    (void)pthread_mutex_lock(&client->lock);
    struct pcc_image *image = image_of(client, snapshot);
    int error = 0;
    if (image == NULL)
        error = -ENOENT;
    else if (!image->placed || image->ending)
        error = -EBUSY;
    if (error == 0) {
        image->tail = copy;
        image->tail_bytes = tail_bytes;
        image->ending = true;
    }
    (void)pthread_mutex_unlock(&client->lock);
    if (error != 0)
        free(copy);
    pcc_bell_ring(&client->view.page->client_bell);
    return error;
}

bool pcc_client_image_drained(const struct pcc_job *job)
{
    return PCC_READ(&job->state) != PCC_JOB_SUBMITTED || job->image->open == 0;
}

/* -- the thread's side -- */

enum step {
    STEP_ON,    /* something was read */
    STEP_WAITS, /* nothing is there */
    STEP_DONE,  /* the payload is complete */
};

/* With the lock held. */
static void stream_end(struct pcc_client *client, struct pcc_image *image, struct stream *stream)
{
    (void)close(stream->fd);
    stream->fd = -1;
    image->open--;
    if (image->open == 0)
        pcc_bell_ring(&client->view.page->client_bell);
}

static void copy_side(void *context, uint64_t index)
{
    struct side *side = &((struct pcc_image *)context)->sides[index];

    while (side->bytes > 0 && side->error == 0) {
        const ssize_t count = read(side->reads, side->to, side->bytes);
        if (count > 0) {
            side->to += count;
            side->bytes -= (uint64_t)count;
        } else if (count == 0 || errno != EINTR) {
            side->error = count == 0 ? -EIO : -errno;
        }
    }
}

/* Some of what the pipe has now, up to `room` bytes. As read(). */
static ssize_t read_some(struct pcc_client *client, struct pcc_image *image, int fd, uint8_t *bytes,
                         uint64_t room)
{
    uint64_t count = 0;
    uint32_t used = 0;

    if (image->sides[0].reads < 0)
        return read(fd, bytes, room);
    for (; used < SIDES && image->sides[used].reads >= 0 && count < room; used++) {
        struct side *side = &image->sides[used];
        const uint64_t left = room - count;
        const ssize_t moved = splice(fd, NULL, side->writes, NULL,
                                     left < SIDE_BYTES ? left : SIDE_BYTES, SPLICE_F_NONBLOCK);
        if (moved <= 0 && used == 0)
            return moved;
        if (moved <= 0)
            break;
        side->to = bytes + count;
        side->bytes = (uint64_t)moved;
        count += (uint64_t)moved;
    }
    pcc_crew_run(&client->crew, SIDES - 1, used, copy_side, image);
    for (uint32_t i = 0; i < used; i++) {
        if (image->sides[i].error != 0) {
            errno = -image->sides[i].error;
            return -1;
        }
    }
    return (ssize_t)count;
}

/* Reads a bulk stream into the chunk, as long as something comes. 1 = something did, 0 = nothing
 * was there, or a negative code. */
static int read_bulk(struct pcc_client *client, struct pcc_image *image, struct stream stream)
{
    const uint64_t room = client->view.geometry.chunk_bytes - image->filled;
    uint8_t *bytes = client->chunk_at[image->chunk] + image->filled;
    uint64_t count = 0;
    ssize_t last = 1;

    while (count < room && last > 0) {
        last = read_some(client, image, stream.fd, bytes + count, room - count);
        count += last > 0 ? (uint64_t)last : 0;
    }
    if (last < 0 && errno != EAGAIN && errno != EINTR)
        return -errno;
    PCC_LOCKED(&client->lock);
    image->filled += count;
    if (count > 0 && extent_add(image, stream.number, count) != 0)
        return -ENOMEM;
    if (last == 0)
        stream_end(client, image, &image->streams[stream.index]);
    return count > 0 || last == 0;
}

/* The same for a stream that is collected. */
static int read_small(struct pcc_client *client, struct pcc_image *image, struct stream stream)
{
    struct stream *place;

    if (stream.count == stream.room) {
        const uint64_t room = stream.room == 0 ? SMALL_BYTES_FIRST : stream.room * 2;
        uint8_t *bytes = room > SMALL_BYTES_MAX ? NULL : realloc(stream.bytes, room);
        if (bytes == NULL)
            return room > SMALL_BYTES_MAX ? -E2BIG : -ENOMEM;
        stream.bytes = bytes;
        stream.room = room;
    }
    const ssize_t count =
        read(stream.fd, stream.bytes + stream.count, (size_t)(stream.room - stream.count));
    PCC_LOCKED(&client->lock);
    stream.count += count > 0 ? (uint64_t)count : 0;
    image->collected += count > 0 ? (uint64_t)count : 0;
    place = &image->streams[stream.index];
    *place = stream;
    if (count < 0)
        return errno == EAGAIN || errno == EINTR ? 0 : -errno;
    if (count == 0)
        stream_end(client, image, place);
    return 1;
}

/* With the lock held: the next collected bytes are pending. False: there are none. */
static bool take_collected(struct pcc_image *image)
{
    while (image->next < image->stream_count && image->streams[image->next].count == 0)
        image->next++;
    if (image->next == image->stream_count)
        return false;
    struct stream *stream = &image->streams[image->next++];
    image->pending = stream->bytes;
    image->pending_bytes = stream->count;
    image->pending_at = 0;
    stream->bytes = NULL;
    return true;
}

/* Puts what is pending into the chunk, as far as there is room. */
static void copy_pending(struct pcc_client *client, struct pcc_image *image)
{
    const uint64_t room = client->view.geometry.chunk_bytes - image->filled;
    const uint64_t left = image->pending_bytes - image->pending_at;
    const uint64_t count = left < room ? left : room;

    if (count > 0)
        memcpy(client->chunk_at[image->chunk] + image->filled, image->pending + image->pending_at,
               count);
    image->filled += count;
    image->pending_at += count;
    if (image->pending_at == image->pending_bytes) {
        free(image->pending);
        image->pending = NULL;
    }
}

/* A stream with something to read, or at its end. Waits for a moment. Ended streams keep their
 * place. */
static bool ready_next(struct pcc_client *client, const struct pcc_image *image, struct stream *out)
{
    struct pollfd polled[POLLED_MAX];
    struct stream streams[POLLED_MAX];
    uint32_t count = 0;

    (void)pthread_mutex_lock(&client->lock);
    for (uint32_t i = 0; i < image->stream_count && count < POLLED_MAX; i++) {
        if (image->streams[i].fd < 0)
            continue;
        polled[count] = (struct pollfd){.fd = image->streams[i].fd, .events = POLLIN};
        streams[count++] = image->streams[i];
    }
    (void)pthread_mutex_unlock(&client->lock);
    const int ready = poll(polled, count, POLL_MS);
    for (uint32_t i = 0; ready > 0 && i < count; i++) {
        if (polled[i].revents != 0) {
            *out = streams[i];
            return true;
        }
    }
    return false;
}

/* With the lock held: tells the daemon where the payload ends, which is with the tail. */
static int length_send(struct pcc_client *client, struct pcc_job *job)
{
    struct pcc_image *image = job->image;
    const uint64_t payload_bytes = image->bytes + image->tail_bytes;
    const struct pcc_message message = {.kind = PCC_MSG_LENGTH,
                                        .id = job->snapshot,
                                        .offset_bytes = image->bytes,
                                        .length_bytes = (uint32_t)image->tail_bytes};

    if (payload_bytes > job->payload_bytes)
        return -EFBIG;
    image->length_sent = true;
    image->pending = image->tail;
    image->pending_bytes = image->tail_bytes;
    image->pending_at = 0;
    image->tail = NULL;
    job->payload_bytes = payload_bytes;
    job->left_bytes = payload_bytes - job->filled_bytes;
    return pcc_client_tell(client, &message) ? 1 : -ECONNRESET;
}

/* What comes after the pipes: STEP_WAITS before that, or a negative code. */
static int finish(struct pcc_client *client, struct pcc_job *job)
{
    PCC_LOCKED(&client->lock);
    if (job->image->placed && take_collected(job->image))
        return STEP_ON;
    if (!job->image->ending)
        return STEP_WAITS;
    const int result = length_send(client, job);
    return result < 0 ? result : STEP_ON;
}

/* One step towards a full chunk; STEP_*, or a negative code. */
static int step(struct pcc_client *client, struct pcc_job *job)
{
    struct pcc_image *image = job->image;

    if (image->pending != NULL) {
        copy_pending(client, image);
        return STEP_ON;
    }
    if (image->length_sent)
        return STEP_DONE;
    int result = finish(client, job);
    struct stream stream;
    if (result != STEP_WAITS || !ready_next(client, image, &stream))
        return result;
    result = stream.bulk ? read_bulk(client, image, stream) : read_small(client, image, stream);
    return result < 0 ? result : STEP_ON;
}

/* With the lock held. */
static int chunk_full(struct pcc_client *client, struct pcc_job *job)
{
    struct pcc_image *image = job->image;
    const uint32_t chunk = image->chunk;
    uint8_t *bytes = client->chunk_at[chunk];
    const struct pcc_message message = {.kind = PCC_MSG_FULL,
                                        .chunk = chunk,
                                        .id = job->snapshot,
                                        .offset_bytes = job->filled_bytes,
                                        .length_bytes = (uint32_t)image->filled,
                                        .result = PCC_FULL_BARE};

    memset(bytes + image->filled, 0, pcc_align_up(image->filled, PCC_IO_ALIGN) - image->filled);
    job->filled_bytes += image->filled;
    job->left_bytes -= image->filled;
    image->chunk = PCC_NO_CHUNK;
    image->filled = 0;
    client->held[chunk] = false;
    if (!pcc_client_tell(client, &message))
        return -ECONNRESET;
    pcc_client_job_note(client, job); /* after the last one it ends the job */
    return 0;
}

/* Fills at most one chunk, or gives up when there is nothing. As pcc_client_work. */
static int fill(struct pcc_client *client, struct pcc_job *job)
{
    struct pcc_image *image = job->image;
    const uint64_t chunk_bytes = client->view.geometry.chunk_bytes;
    int result = STEP_ON;

    if (image->chunk == PCC_NO_CHUNK)
        image->chunk = client->free_chunks[--client->free_count];
    while (result == STEP_ON && image->filled < chunk_bytes && !PCC_READ(&job->stop) &&
           !pcc_client_ended(client))
        result = step(client, job);
    if (result < 0)
        return result;
    PCC_LOCKED(&client->lock);
    /* While the length is open there must be room for what may follow: the last chunk goes with
     * the length, and one that fills the bound is too long. */
    if (!image->length_sent && job->filled_bytes + image->filled >= job->payload_bytes)
        return -EFBIG;
    if (!PCC_READ(&job->stop) && image->filled > 0 &&
        (image->filled == chunk_bytes || result == STEP_DONE))
        return chunk_full(client, job);
    return 0;
}

bool pcc_client_image_turn(const struct pcc_client *client, const struct pcc_job *job)
{
    return job->image->chunk != PCC_NO_CHUNK || client->free_count > 0;
}

int pcc_client_image_work(struct pcc_client *client, struct pcc_job *job)
{
    const int result = fill(client, job);

    PCC_LOCKED(&client->lock);
    job->busy = false;
    if (result < 0 && result != -ECONNRESET && pcc_client_job_abandon(client, job, result)) {
        pcc_client_job_end(job);
        pcc_bell_ring(&client->view.page->daemon_bell);
        pcc_bell_ring(&client->view.page->client_bell);
    }
    (void)pthread_cond_broadcast(&client->idle);
    return result == -ECONNRESET ? -1 : 1;
}

/* -- its end -- */

static void image_free(struct pcc_image *image)
{
    for (uint32_t i = 0; i < image->stream_count; i++) {
        if (image->streams[i].fd >= 0)
            (void)close(image->streams[i].fd);
        free(image->streams[i].bytes);
    }
    sides_close(image);
    free(image->streams);
    free(image->extents);
    free(image->tail);
    free(image->pending);
    free(image);
}

void pcc_client_images_release(struct pcc_client *client, bool all)
{
    for (uint32_t i = 0; PCC_READ(&client->images) > 0 && i < PCC_SNAPSHOTS; i++) {
        struct pcc_job *job = &client->jobs[i];
        PCC_LOCKED(&client->lock);
        if (job->image == NULL)
            continue;
        const bool over =
            PCC_READ(&job->state) == PCC_JOB_ENDED || !pcc_client_open_word(client, job->snapshot);
        if (!over && !all)
            continue;
        if (job->image->chunk != PCC_NO_CHUNK) /* it was not handed over: it stays ours */
            client->free_chunks[client->free_count++] = job->image->chunk;
        image_free(job->image);
        job->image = NULL;
        job->flights--;
        client->images--;
    }
}
