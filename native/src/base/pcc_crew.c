#include "base/pcc_crew.h"

#include <sched.h>

#include "base/pcc_thread.h"

/* With the lock held: takes pieces until none is left. */
static void pieces_do(struct pcc_crew *crew)
{
    while (crew->next < crew->count) {
        const uint64_t piece = crew->next++;
        (void)pthread_mutex_unlock(&crew->lock);
        crew->work(crew->context, piece);
        (void)pthread_mutex_lock(&crew->lock);
    }
}

static void *help(void *argument)
{
    struct pcc_crew *crew = argument;

    PCC_LOCKED(&crew->lock);
    while (!crew->closing) {
        if (crew->next >= crew->count || crew->busy >= crew->wanted) {
            (void)pthread_cond_wait(&crew->called, &crew->lock);
            continue;
        }
        crew->busy++;
        pieces_do(crew);
        if (--crew->busy == 0)
            (void)pthread_cond_signal(&crew->done);
    }
    return NULL;
}

static void start(struct pcc_crew *crew)
{
    crew->started = true;
    while (crew->helper_count < PCC_CREW_HELPERS && crew->helper_count + 1 < crew->cpus &&
           pcc_thread_start(&crew->helpers[crew->helper_count], help, crew, "pcc-crew") == 0)
        crew->helper_count++;
}

void pcc_crew_open(struct pcc_crew *crew)
{
    cpu_set_t cpus;

    *crew = (struct pcc_crew){.cpus = 1};
    if (sched_getaffinity(0, sizeof cpus, &cpus) == 0)
        crew->cpus = (uint32_t)CPU_COUNT(&cpus);
    (void)pthread_mutex_init(&crew->lock, NULL); /* cannot fail with default attributes */
    (void)pthread_cond_init(&crew->called, NULL);
    (void)pthread_cond_init(&crew->done, NULL);
}

void pcc_crew_close(struct pcc_crew *crew)
{
    (void)pthread_mutex_lock(&crew->lock);
    crew->closing = true;
    (void)pthread_cond_broadcast(&crew->called);
    (void)pthread_mutex_unlock(&crew->lock);
    for (uint32_t i = 0; i < crew->helper_count; i++)
        (void)pthread_join(crew->helpers[i], NULL);
    (void)pthread_cond_destroy(&crew->done);
    (void)pthread_cond_destroy(&crew->called);
    (void)pthread_mutex_destroy(&crew->lock);
}

uint32_t pcc_crew_half(const struct pcc_crew *crew)
{
    return crew->cpus < 4 ? 0 : crew->cpus / 2 - 1;
}

void pcc_crew_run(struct pcc_crew *crew, uint32_t helpers, uint64_t count,
                  void (*work)(void *, uint64_t), void *context)
{
    if (helpers > 0 && count > 1 && !crew->started)
        start(crew);
    PCC_LOCKED(&crew->lock);
    crew->work = work;
    crew->context = context;
    crew->next = 0;
    crew->count = count;
    crew->wanted = helpers;
    for (uint32_t i = 0; i < crew->helper_count && i < helpers && i + 1 < count; i++)
        (void)pthread_cond_signal(&crew->called);
    pieces_do(crew);
    while (crew->busy > 0)
        (void)pthread_cond_wait(&crew->done, &crew->lock);
}
