"""A large heap with a pattern, of which each step changes a little; its hash is told at the end."""

from __future__ import annotations

import hashlib
import mmap
import random

from tests.transparent.targets.steps import Log, words

BLOCK = 1 << 20


def main() -> None:
    options = words(mib=2048).parse_args()
    log = Log(options)
    pattern = random.Random(7).randbytes(BLOCK)
    heap = mmap.mmap(-1, options.mib * BLOCK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for block in range(options.mib):
        heap[block * BLOCK : (block + 1) * BLOCK] = pattern
        heap[block * BLOCK : block * BLOCK + 8] = block.to_bytes(8, "little")
    for step in range(1, options.steps + 1):
        block = step * 7919 % options.mib
        at = block * BLOCK + step * 4099 % (BLOCK - 8)
        heap[at : at + 8] = (step ^ int.from_bytes(heap[at : at + 8], "little")).to_bytes(8, "big")
        log.step(step, heap[at : at + 8].hex())
    log.line("hash", hashlib.blake2b(heap).hexdigest())


if __name__ == "__main__":
    main()
