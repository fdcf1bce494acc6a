"""How the ranks of one job on several nodes agree on a checkpoint: the rules.

Each node has one daemon, which saves at its own disk's speed and never asks the others before it
does. Agreement decides one thing only: which checkpoint is *global*, so that all ranks can go back
to it, and when an older one may go. The functions here are pure; small values travel between the
nodes through a store that may lose, delay and repeat them. The same functions run in
`tests/support/nodesmodel.py`, which visits every state that a small job can reach.

**Words.** A *start* is one launch of all ranks, with a random id. A *member* is a node's part of a
start; member 0 has rank 0. A *part* is what one rank stores of a checkpoint. A *round* is a restore
that all ranks of a start make together; round 0 is what the start began from. A later round is like
a start within the start: what it saves is newer than what it restored, and that is newer than what
earlier rounds saved.

**Names** (`facts.py`). A checkpoint is (start, base, descents, step, row): the round that its
states come from, how often the step went down since, the step, how often that step was repeated.
Ranks that make equal calls make equal names, and the names of one start are ordered. Starts are
ordered by who saw whom: B is newer than A if an offer to B named A. Nothing is ordered by step,
clock, launch id or restart count.

**Facts.** A node publishes what it offers, what it has or may get, how far it has asked, and the
globals that it knows. A checkpoint is *global* when every member offers it. It is *given up* when
some member has passed it and has it neither durable nor in flight. Nothing is given up because a
node is silent. Both facts stay true for ever.

**What a node promises.**
N1. What was offered stays until a fact frees it: somebody may count on it.
N2. Who said "I will never have x" never offers x in this start, also after the daemon's restart. So
    no checkpoint is both global and given up. A failed copy is destroyed before the node says so.
N3. Only what is durable is offered.
N4. After a promise to a newer start or round (on the disk before the offer): no save, offer or
    recycling for an older one, and none for the newer one before its answer is recorded here. A
    start that was displaced here never comes back.

**What a node may recycle** (`facts.stays`), and nothing else.
1. What is older than the newest global known here, and not one of the `keep` newest.
2. What is given up.
3. What was never offered: the node drops it, and so has passed it.
4. What is of an older start or round, was not restored by this one, and is not one of the `keep`
   newest globals. What was restored counts as a global: it stays until `keep` newer ones are known.
One slot stays without a promise (slots = N + keep + 1), so no save waits for a message.

**How a start begins** (`lists.py`, `offers.py`, `beginning.py`).
1. Each node says hello: its id, the processes of its ranks, the number of its newest promise.
2. Somebody makes a list of the newest process of each rank, with a random id and the number that
   follows the highest promise. Only the first writer of a place in the store succeeds.
3. A node that finds its living processes in the list, and no other ones, promises and offers: its
   records of starts, known globals, shards, and answers of this start that it knows. It refuses a
   list whose (number, id) is not above its promise. A refused start ends; its number never changes.
4. With the offers of all members one member decides, and the first answer written is the answer.
   An answer that an offer repeats is the answer, so the store and the decider may be lost.
5. Each node records the answer; then its ranks restore. A later restore() of all ranks repeats 3 to
   5 as the next round of the same start.

A start that cannot know that nothing newer is lost refuses, and says who lacks what and what to
type: `without=` for nodes that will not come back, `step=` for an older checkpoint, `start=` for
one of two that ran apart, `fresh=True`.

**What no rule here removes.** If most nodes come back with old images of their disks, nobody knows
better. Nodes that never heard of the job begin empty. A rank that leaves out a call and goes back
without restore() may give one name to two states.
"""
