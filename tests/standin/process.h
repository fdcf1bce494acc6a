/* What checkpoint.c, outside, and stage.c, inside of a process that is checkpointed, share. */
#pragma once

#include "memory.h"

enum { ORDER_NOTHING, ORDER_OUT, ORDER_IN };

struct process_page {
    _Atomic int state;
    _Atomic int queued;       /* operations in all streams */
    _Atomic int shares;       /* handles given away, memory opened */
    _Atomic int thread;       /* stage.c's; 0: the process does nothing itself */
    _Atomic uint32_t order;   /* for that thread; */
    _Atomic int result;       /* how it went */
    _Atomic uint32_t devices; /* bits: physical devices with a context */
    _Atomic uint64_t start_time;
    uint32_t map[DEVICES_MAX]; /* physical devices, from old to new */
};

extern struct process_page *process_own;

void stage_begin(void);
void stage_order(struct process_page *page, uint32_t order);
