#include "pcc_queue.h"

#include <stdlib.h>

#include "pcc_futex.h"

#define SLEEP_NS 1000000000u /* a bound only: every push rings */

/* A cell's turn counts who may touch it next: position p means the producer of position p, p + 1
 * its consumer, p + capacity the producer of the next round. */
int pcc_queue_init(struct pcc_queue *queue, uint64_t capacity)
{
    PCC_ASSERT(capacity >= 2 && (capacity & (capacity - 1)) == 0);
    queue->cells = calloc(capacity, sizeof *queue->cells);
    if (!queue->cells)
        return -ENOMEM;
    queue->mask = capacity - 1;
    for (uint64_t i = 0; i < capacity; i++)
        atomic_init(&queue->cells[i].turn, i);
    atomic_init(&queue->tail, 0);
    atomic_init(&queue->head, 0);
    atomic_init(&queue->bell, 0);
    atomic_init(&queue->sleepers, 0);
    atomic_init(&queue->closed, false);
    return 0;
}

void pcc_queue_destroy(struct pcc_queue *queue)
{
    free(queue->cells);
    queue->cells = NULL;
}

static void ring(struct pcc_queue *queue)
{
    /* Sequentially consistent on both words here and in pop_wait: either we see the sleeper, or it
     * sees the new bell and does not sleep. */
    (void)atomic_fetch_add_explicit(&queue->bell, 1, memory_order_seq_cst);
    if (atomic_load_explicit(&queue->sleepers, memory_order_seq_cst) > 0)
        (void)syscall(SYS_futex, &queue->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

bool pcc_queue_push(struct pcc_queue *queue, uint64_t value)
{
    uint64_t at = atomic_load_explicit(&queue->tail, memory_order_relaxed);

    for (;;) {
        struct pcc_queue_cell *cell = &queue->cells[at & queue->mask];
        /* Acquire: pairs with the release of the consumer that emptied the cell. */
        const uint64_t turn = atomic_load_explicit(&cell->turn, memory_order_acquire);
        if (turn == at) {
            if (atomic_compare_exchange_weak_explicit(&queue->tail, &at, at + 1,
                                                      memory_order_relaxed, memory_order_relaxed)) {
                cell->value = value;
                /* Release: pairs with the acquire in pop. */
                atomic_store_explicit(&cell->turn, at + 1, memory_order_release);
                ring(queue);
                return true;
            }
        } else if ((int64_t)(turn - at) < 0) {
            return false;
        } else {
            at = atomic_load_explicit(&queue->tail, memory_order_relaxed);
        }
    }
}

bool pcc_queue_pop(struct pcc_queue *queue, uint64_t *out)
{
    uint64_t at = atomic_load_explicit(&queue->head, memory_order_relaxed);

    for (;;) {
        struct pcc_queue_cell *cell = &queue->cells[at & queue->mask];
        /* Acquire: pairs with the release in push. */
        const uint64_t turn = atomic_load_explicit(&cell->turn, memory_order_acquire);
        if (turn == at + 1) {
            if (atomic_compare_exchange_weak_explicit(&queue->head, &at, at + 1,
                                                      memory_order_relaxed, memory_order_relaxed)) {
                *out = cell->value;
                /* Release: the producer of the next round may overwrite the value from here. */
                atomic_store_explicit(&cell->turn, at + queue->mask + 1, memory_order_release);
                return true;
            }
        } else if ((int64_t)(turn - (at + 1)) < 0) {
            return false;
        } else {
            at = atomic_load_explicit(&queue->head, memory_order_relaxed);
        }
    }
}

bool pcc_queue_pop_wait(struct pcc_queue *queue, uint64_t *out)
{
    for (;;) {
        if (pcc_queue_pop(queue, out))
            return true;
        (void)atomic_fetch_add_explicit(&queue->sleepers, 1, memory_order_seq_cst);
        const uint32_t bell = atomic_load_explicit(&queue->bell, memory_order_seq_cst);
        /* Look once more after the bell was read: what was pushed before is found here, what is
         * pushed after changes the bell and the sleep returns at once. */
        const bool found = pcc_queue_pop(queue, out);
        const bool closed = atomic_load_explicit(&queue->closed, memory_order_seq_cst);
        if (!found && !closed)
            pcc_futex_wait(&queue->bell, bell, SLEEP_NS);
        (void)atomic_fetch_sub_explicit(&queue->sleepers, 1, memory_order_seq_cst);
        if (found)
            return true;
        if (closed)
            return false;
    }
}

void pcc_queue_close(struct pcc_queue *queue)
{
    atomic_store_explicit(&queue->closed, true, memory_order_seq_cst);
    (void)atomic_fetch_add_explicit(&queue->bell, 1, memory_order_seq_cst);
    (void)syscall(SYS_futex, &queue->bell, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

uint64_t pcc_queue_count(const struct pcc_queue *queue)
{
    const uint64_t head = atomic_load_explicit(&queue->head, memory_order_relaxed);
    const uint64_t tail = atomic_load_explicit(&queue->tail, memory_order_relaxed);

    return tail > head ? tail - head : 0;
}
