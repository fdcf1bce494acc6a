/* A daemon that is killed after each store to its state memfd in turn, and what the next daemon
 * recovers. The daemon is a child process with tenant, volume and client; the service manager that
 * keeps its descriptors is a thread of the test. */
#include <signal.h>
#include <time.h>

#include "store_fixture.h"
#include "tenant_fixture.h"

/* -- one life of the daemon -- */

static uint64_t stores_left; /* the child kills itself at zero; 0 from the start: never */

static struct fixture *watched; /* whose tenant makes the stores */

/* The mark is set before the client can see COPIED, and not while the client can still abandon. */
static void order_check(void)
{
    static bool seen[16];
    const struct pcc_kept *kept = &watched->tenant->bindings[0].kept;

    for (uint32_t i = 0; i < pcc_kept_header(kept)->places; i++) {
        const uint64_t commit = atomic_load(&pcc_kept_save(kept, i)->commit);
        if (commit == 0 || seen[commit % 16])
            continue;
        seen[commit % 16] = true;
        CHECK(atomic_load(&pcc_page_snapshot(&watched->tenant->view, commit)->word) ==
              pcc_word(commit, PCC_WORD_VOUCHING));
    }
}

void pcc_kept_stored(void);

void pcc_kept_stored(void)
{
    static pthread_mutex_t one_by_one = PTHREAD_MUTEX_INITIALIZER;

    (void)pthread_mutex_lock(&one_by_one);
    if (watched != NULL)
        order_check();
    if (stores_left > 0 && --stores_left == 0)
        (void)kill(getpid(), SIGKILL);
    (void)pthread_mutex_unlock(&one_by_one);
}

struct trial {
    uint64_t payload_bytes;
    uint64_t memory_bytes;
    uint64_t frozen_bytes; /* the same in all snapshots; the first one is durable before the kill */
    uint32_t snapshots;
    bool bare;     /* chunks come without checksums, as those that a GPU has filled */
    bool unhashed; /* no writer had got to the chunks, which the daemon had pulled */
    bool shrinks;  /* memory comes and goes all the time */
    bool twice;    /* the daemon that takes over is killed, too */
    bool numbered; /* as one of several ranks: the loop gives number, marks and name */
    bool parks;    /* of level memory; each one is dropped for the next, and the last one written */
};

static bool is_bare; /* of the trial */

int __real_pcc_push_take_full(struct pcc_tenant *tenant, const struct pcc_message *message);
int __wrap_pcc_push_take_full(struct pcc_tenant *tenant, const struct pcc_message *message);

int __wrap_pcc_push_take_full(struct pcc_tenant *tenant, const struct pcc_message *message)
{
    struct pcc_message changed = *message;

    if (is_bare) {
        changed.result = PCC_FULL_BARE;
        memset(pcc_page_checksums(&tenant->view, message->chunk), 0x77,
               CHUNK / BLOCK * sizeof(uint64_t));
    }
    return __real_pcc_push_take_full(tenant, &changed);
}

static const struct pcc_tenant_end replaced = {.outcome = PCC_OUTCOME_SUPERSEDED};

static void daemon_open(struct fixture *f, const struct trial *trial, uint64_t bytes_per_second)
{
    const struct pcc_tenant_spec spec = tenant_spec(LABEL);
    struct pcc_store *store;

    f->frozen_bytes = trial->frozen_bytes;
    f->level = trial->parks ? PCC_LEVEL_MEMORY : PCC_LEVEL_DISK;
    CHECK_EQUAL(volume_open(f->path, true, bytes_per_second, &f->volume), 0);
    CHECK(pcc_pool_open(trial->memory_bytes, &f->pool) == 0);
    CHECK(pcc_store_open(manager.address, STORED_MAX, 0, &store) == 0);
    pcc_pool_keep(f->pool, store);
    CHECK(pcc_events_open(1024, &f->events) == 0);
    CHECK(pcc_tenant_open(f->pool, f->events, NULL, &spec, &f->tenant) == 0);
    pcc_tenant_policy(f->tenant, &alone);
}

static void *shrink_run(void *argument)
{
    const struct fixture *f = argument;
    struct pcc_tenant_holding holding;
    uint64_t granted;

    for (;;) {
        pcc_tenant_shrink(f->tenant, 2 * CHUNK, &holding);
        if (holding.bytes == holding.lasting_bytes)
            CHECK(pcc_tenant_grow(f->tenant, holding.bytes + CHUNK, &granted) == 0);
        (void)nanosleep(&(struct timespec){.tv_nsec = 50000}, NULL);
    }
}

static const struct pcc_number numbered = {.incarnation = 1,
                                           .world_size = 1,
                                           .marks = PCC_SLOT_OFFERED,
                                           .name_base = 1,
                                           .name_descents = 2,
                                           .name_row = 3};

static void content(const struct trial *trial, uint8_t *bytes, uint64_t snapshot)
{
    pattern(bytes, trial->payload_bytes, snapshot);
    pattern(bytes, trial->frozen_bytes, 77);
}

/* Writes to the pipe which snapshot its client has seen as copied. Never returns. */
static _Noreturn void daemon_live(struct fixture *f, const struct trial *trial, uint64_t kill_at,
                                  int pipe_fd)
{
    uint8_t *bytes = malloc(trial->payload_bytes);
    pthread_t thread;

    CHECK(bytes != NULL);
    is_bare = trial->bare;
    daemon_open(f, trial, 4u << 20); /* copied long before durable */
    if (trial->numbered)
        pcc_tenant_policy(f->tenant, &asks);
    CHECK(pcc_tenant_bind(f->tenant, f->volume) == 0);
    grow(f, trial->memory_bytes, trial->shrinks ? CHUNK : 0);
    link_open(f);
    stores_left = trial->frozen_bytes == 0 ? kill_at : 0;
    watched = f;
    CHECK(!trial->shrinks || pthread_create(&thread, NULL, shrink_run, f) == 0);
    for (uint64_t snapshot = 1; snapshot <= trial->snapshots; snapshot++) {
        content(trial, bytes, snapshot);
        submit(f, snapshot, bytes, trial->payload_bytes);
        CHECK(begin_wait(f, snapshot, trial->payload_bytes) == (trial->numbered ? 0 : snapshot));
        struct pcc_number number = numbered;
        number.sequence = snapshot;
        CHECK(!trial->numbered || pcc_tenant_number(f->tenant, snapshot, &number) == 0);
        CHECK(pcc_client_wait(f->client, snapshot, PCC_WAIT_COPIED, soon()) == 0);
        const uint8_t told = (uint8_t)snapshot;
        CHECK(write(pipe_fd, &told, 1) == 1);
        if (trial->parks && snapshot > 1)
            CHECK(pcc_tenant_drop(f->tenant, snapshot - 1, &replaced));
        if (trial->frozen_bytes > 0 && snapshot == 1) { /* the base of those that follow */
            CHECK(pcc_client_wait(f->client, snapshot, PCC_WAIT_DURABLE, soon()) == 0);
            CHECK(event_until(f, PCC_EVENT_DURABLE).id == 1);
            stores_left = kill_at;
        }
    }
    if (trial->parks)
        CHECK(pcc_tenant_write(f->tenant, trial->snapshots) == 0);
    CHECK(pcc_client_wait(f->client, trial->snapshots, PCC_WAIT_DURABLE, soon()) == 0);
    _exit(0);
}

/* -- the next one -- */

#define STORES_OF_TAKING_OVER 24u /* about so many, until all that goes on is durable */

/* The state as it is when chunks came without checksums. What was written had got them. */
static void checksums_drop(int state_fd)
{
    struct pcc_kept kept;
    void *bytes;
    uint64_t length;

    CHECK(pcc_pool_state_map(state_fd, &bytes, &length) == 0);
    CHECK(pcc_kept_accept(&kept, bytes, length) == 0);
    for (uint32_t place = 0; place < pcc_kept_header(&kept)->places; place++) {
        for (uint32_t i = 0; i < kept.piece_capacity; i++) {
            struct pcc_kept_piece *piece = pcc_kept_piece(&kept, place, i);
            if (piece->segment == 0 || (piece->flags & PCC_KEPT_WRITTEN) != 0)
                continue;
            piece->flags = 0;
            memset(pcc_kept_manifest(&kept, place) + sizeof(struct pcc_manifest_header) +
                       i * (CHUNK / BLOCK) * sizeof(uint64_t),
                   0xee, CHUNK / BLOCK * sizeof(uint64_t));
        }
    }
    CHECK(munmap(bytes, length) == 0);
}

/* Takes over what the manager has; how many saves continue. */
static uint32_t take_over(struct fixture *f, bool unhashed)
{
    struct pcc_kept_outcome outcomes[PCC_KEPT_OUTCOMES_MAX];
    struct pcc_tenant_usage usage;
    int state_fd = -1;
    uint64_t state_id = 0;
    uint32_t count = 0, going_on = 0;

    (void)pthread_mutex_lock(&manager.lock);
    for (uint32_t i = 0; i < manager.count; i++) {
        unsigned long long id;
        const struct stored *item = &manager.items[i];
        const int fd = dup(item->fd);
        CHECK(fd >= 0);
        if (sscanf(item->name, LABEL "-segment-%llx", &id) == 1) {
            CHECK(pcc_tenant_adopt(f->tenant, fd, id) == 0);
        } else {
            CHECK(sscanf(item->name, LABEL "-state-%llx", &id) == 1 && state_fd < 0);
            state_fd = fd;
            state_id = id;
        }
    }
    (void)pthread_mutex_unlock(&manager.lock);
    CHECK(state_fd >= 0);
    /* The client of the daemon before lives, and may still fill what it had been granted. */
    pcc_tenant_usage(f->tenant, &usage);
    CHECK_EQUAL(usage.left_chunks * CHUNK, usage.bytes);
    if (unhashed)
        checksums_drop(state_fd);
    CHECK(pcc_tenant_bind_kept(f->tenant, f->volume, state_fd, state_id, outcomes, &count) == 0);
    CHECK(close(state_fd) == 0);
    for (uint32_t i = 0; i < count; i++) {
        CHECK(outcomes[i].error == 0 || outcomes[i].error == -EALREADY);
        going_on += outcomes[i].error == 0;
    }
    pcc_tenant_settle(f->tenant);
    for (uint32_t i = 0; i < going_on; i++) {
        struct pcc_event event;
        do
            event = event_next(f);
        while (event.kind == PCC_EVENT_WRITING);
        CHECK(event.kind == PCC_EVENT_DURABLE || event.kind == PCC_EVENT_SUPERSEDED);
        CHECK(event.session == 0 && event.id == event.sequence);
    }
    return going_on;
}

static void daemon_end(struct fixture *f)
{
    pcc_tenant_close(f->tenant);
    pcc_events_close(f->events);
    pcc_pool_close(f->pool);
    pcc_volume_close(f->volume);
}

/* Takes over, and is killed before that (0), or after that many stores, if there are so many. */
static void daemon_between(struct fixture *f, const struct trial *trial, uint64_t kill_at)
{
    int status;

    (void)pthread_mutex_lock(&manager.lock); /* so that the child finds it whole */
    const pid_t child = fork();
    (void)pthread_mutex_unlock(&manager.lock);
    CHECK(child >= 0);
    if (child == 0) {
        daemon_open(f, trial, 4u << 20);
        if (kill_at == 0)
            (void)kill(getpid(), SIGKILL);
        stores_left = kill_at;
        (void)take_over(f, trial->unhashed);
        _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : status == 0);
    (void)manager_count();
}

/* What the number said is in the record and in the manifest, whichever daemon has written them. */
static void number_check(struct pcc_volume *volume, uint64_t sequence)
{
    struct pcc_load *load;

    CHECK_EQUAL(pcc_load_open(volume, sequence, &load), 0);
    const struct pcc_manifest_notes *notes = &pcc_load_manifest(load)->notes;
    CHECK_EQUAL(pcc_load_entry(load)->flags & PCC_SLOT_MARKS, numbered.marks);
    CHECK(notes->name_base == numbered.name_base && notes->name_row == numbered.name_row &&
          notes->name_descents == numbered.name_descents);
    pcc_load_close(load);
}

/* False when the child came to its end before it was killed. */
static bool trial_run(const struct trial *trial, uint64_t kill_at, uint32_t *going_on_out)
{
    struct fixture f = {0};
    int ends[2], status;
    uint8_t told, copied = 0;

    (void)snprintf(f.path, sizeof(f.path), "%s.volume", manager.address);
    volume_make(f.path, trial->payload_bytes, 1);
    CHECK(pipe(ends) == 0);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0)
        daemon_live(&f, trial, kill_at, ends[1]);
    CHECK(close(ends[1]) == 0);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK(WIFSIGNALED(status) ? WTERMSIG(status) == SIGKILL : status == 0);
    while (read(ends[0], &told, 1) == 1)
        copied = told;
    CHECK(close(ends[0]) == 0);
    (void)manager_count(); /* the last message of the dead daemon has arrived */

    for (uint64_t i = 0; trial->twice && i < 3; i++) /* again and again, not twice at one place */
        daemon_between(&f, trial, i == 0 ? 0 : 1 + (kill_at * i) % STORES_OF_TAKING_OVER);
    daemon_open(&f, trial, 0);
    *going_on_out = take_over(&f, trial->unhashed);
    const uint64_t newest = pcc_volume_superseding(f.volume);
    CHECK(newest >= copied);
    if (newest > 0 && trial->numbered)
        number_check(f.volume, newest);
    if (newest > 0) {
        uint8_t *bytes = malloc(trial->payload_bytes);
        CHECK(bytes != NULL);
        content(trial, bytes, newest);
        link_open(&f);
        f.level = PCC_LEVEL_DISK;
        renew(&f, &(struct settings){.memory_bytes = trial->memory_bytes});
        load_equals(&f, newest, 1, bytes, trial->payload_bytes);
        CHECK(save(&f, 1, bytes, trial->payload_bytes) > newest);
        detach(&f);
        free(bytes);
    }
    daemon_end(&f);
    CHECK(unlink(f.path) == 0);
    CHECK_EQUAL(manager_count(), 0);
    return WIFSIGNALED(status);
}

static void enumerate(const struct trial *trial)
{
    uint64_t kill_at = 1;
    uint32_t going_on, went_on = 0;

    while (trial_run(trial, kill_at, &going_on)) {
        went_on += going_on > 0;
        kill_at++;
    }
    printf("  killed after each of %llu stores; %u times something went on\n",
           (unsigned long long)(kill_at - 1), went_on);
    CHECK(kill_at > 20 && went_on > 2);
}

static void test_killed_after_every_store(void)
{
    enumerate(&(struct trial){
        .payload_bytes = 5 * CHUNK + 99, .memory_bytes = 8 * CHUNK, .snapshots = 2});
}

static void test_killed_as_one_of_several_ranks(void)
{
    enumerate(&(struct trial){.payload_bytes = 3 * CHUNK + 99,
                              .memory_bytes = 6 * CHUNK,
                              .snapshots = 2,
                              .numbered = true});
}

static void test_killed_with_little_memory(void)
{
    enumerate(&(struct trial){
        .payload_bytes = 6 * CHUNK + 99, .memory_bytes = 3 * CHUNK, .snapshots = 1});
}

static void test_killed_while_it_takes_over(void)
{
    enumerate(&(struct trial){
        .payload_bytes = 5 * CHUNK + 99, .memory_bytes = 8 * CHUNK, .snapshots = 2, .twice = true});
    enumerate(&(struct trial){
        .payload_bytes = 6 * CHUNK + 99, .memory_bytes = 3 * CHUNK, .snapshots = 1, .twice = true});
}

static void test_chunks_without_checksums(void)
{
    enumerate(&(struct trial){.payload_bytes = 5 * CHUNK + 99,
                              .memory_bytes = 8 * CHUNK,
                              .snapshots = 2,
                              .unhashed = true});
    enumerate(&(struct trial){
        .payload_bytes = 5 * CHUNK + 99, .memory_bytes = 8 * CHUNK, .snapshots = 2, .bare = true});
}

/* What is frozen has no chunk: the next daemon finds it in the base. */
static void test_killed_when_a_part_was_not_copied(void)
{
    struct trial trial = {.payload_bytes = 7 * CHUNK + 99,
                          .memory_bytes = 8 * CHUNK,
                          .frozen_bytes = 4 * CHUNK + 99,
                          .snapshots = 3};

    enumerate(&trial);
    trial.twice = true;
    enumerate(&trial);
}

static void test_killed_while_memory_goes(void)
{
    enumerate(&(struct trial){.payload_bytes = 5 * CHUNK + 99,
                              .memory_bytes = 8 * CHUNK,
                              .snapshots = 2,
                              .shrinks = true});
}

static void test_killed_while_something_is_parked(void)
{
    struct trial trial = {
        .payload_bytes = 5 * CHUNK + 99, .memory_bytes = 13 * CHUNK, .snapshots = 3, .parks = true};

    enumerate(&trial);
    trial.twice = true;
    enumerate(&trial);
}

/* A daemon that is stopped waits for no disk: the next one finds what nobody had written. */
static void test_what_is_parked_outlives_a_stop(void)
{
    const struct trial trial = {
        .payload_bytes = 5 * CHUNK + 99, .memory_bytes = 8 * CHUNK, .parks = true};
    uint8_t *bytes = malloc(trial.payload_bytes);
    struct fixture f = {0};

    CHECK(bytes != NULL);
    content(&trial, bytes, 1);
    (void)snprintf(f.path, sizeof(f.path), "%s.volume", manager.address);
    volume_make(f.path, trial.payload_bytes, 1);
    daemon_open(&f, &trial, 0);
    CHECK(pcc_tenant_bind(f.tenant, f.volume) == 0);
    grow(&f, trial.memory_bytes, 0);
    link_open(&f);
    submit(&f, 1, bytes, trial.payload_bytes);
    CHECK_EQUAL(begin_wait(&f, 1, trial.payload_bytes), 1);
    CHECK(pcc_client_wait(f.client, 1, PCC_WAIT_COPIED, soon()) == 0);
    detach(&f);
    daemon_end(&f);
    CHECK(manager_count() > 0);

    f = (struct fixture){0};
    (void)snprintf(f.path, sizeof(f.path), "%s.volume", manager.address);
    daemon_open(&f, &trial, 0);
    CHECK_EQUAL(take_over(&f, false), 1);
    link_open(&f);
    renew(&f, &(struct settings){.memory_bytes = trial.memory_bytes});
    load_equals(&f, 1, 1, bytes, trial.payload_bytes);
    detach(&f);
    daemon_end(&f);
    CHECK(unlink(f.path) == 0);
    CHECK_EQUAL(manager_count(), 0);
    free(bytes);
}

int main(void)
{
    manager_start();
    RUN(test_killed_after_every_store);
    RUN(test_killed_as_one_of_several_ranks);
    RUN(test_killed_with_little_memory);
    RUN(test_killed_while_it_takes_over);
    RUN(test_chunks_without_checksums);
    RUN(test_killed_when_a_part_was_not_copied);
    RUN(test_killed_while_memory_goes);
    RUN(test_killed_while_something_is_parked);
    RUN(test_what_is_parked_outlives_a_stop);
    manager_end();
    return 0;
}
