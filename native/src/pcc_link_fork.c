/* A forked child (a data loader's worker) inherits the attach socket's descriptor, and while it has
 * it open the daemon does not hear of the trainer's death. So every open link is known here, and a
 * child closes their sockets first thing; page and segments are not inherited. */
#include <unistd.h>

#include "pcc_link_private.h"

static pthread_mutex_t known_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_once_t handlers_once = PTHREAD_ONCE_INIT;
static struct pcc_link *known;

static void before_fork(void)
{
    (void)pthread_mutex_lock(&known_lock);
}

static void after_fork_parent(void)
{
    (void)pthread_mutex_unlock(&known_lock);
}

static void after_fork_child(void)
{
    for (struct pcc_link *link = known; link != NULL; link = link->next)
        (void)close(link->socket_fd);
    known = NULL;
    (void)pthread_mutex_unlock(&known_lock);
}

static void handlers_register(void)
{
    /* Without memory for it, children keep the socket: the daemon hears later, nothing breaks. */
    (void)pthread_atfork(before_fork, after_fork_parent, after_fork_child);
}

void pcc_link_remember(struct pcc_link *link)
{
    (void)pthread_once(&handlers_once, handlers_register);
    (void)pthread_mutex_lock(&known_lock);
    link->next = known;
    known = link;
    (void)pthread_mutex_unlock(&known_lock);
}

void pcc_link_forget(struct pcc_link *link)
{
    (void)pthread_mutex_lock(&known_lock);
    for (struct pcc_link **at = &known; *at != NULL; at = &(*at)->next) {
        if (*at == link) {
            *at = link->next;
            break;
        }
    }
    (void)pthread_mutex_unlock(&known_lock);
}
