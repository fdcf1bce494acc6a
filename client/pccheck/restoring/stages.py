"""The states of a restore, and the stages in which it changes what is attached."""

from __future__ import annotations

import enum
from collections import defaultdict
from collections.abc import Callable

from .rebuild import Memory


class State(enum.Enum):
    """What is attached, as far as restores have changed it."""

    WHOLE = "of one step"
    CHANGING = "a restore changes all of it, or did not finish"
    CHANGING_PART = "a restore changes a part of it, or did not finish"
    MIX = "of two steps, though the last restore, of a part, has finished"
    CHANGING_PART_OF_MIX = "the same while a restore changes a part of it"


class Move(enum.Enum):
    ALL = "a restore of all begins to change it"
    PART = "a restore of a part begins to change it"
    END = "the restore has finished"


#: After an error or Ctrl-C the state stays as it is until the next restore begins.
MOVES: dict[State, dict[Move, State]] = {
    State.WHOLE: {Move.ALL: State.CHANGING, Move.PART: State.CHANGING_PART},
    State.CHANGING: {
        Move.ALL: State.CHANGING, Move.PART: State.CHANGING_PART_OF_MIX, Move.END: State.WHOLE
    },
    State.CHANGING_PART: {
        Move.ALL: State.CHANGING, Move.PART: State.CHANGING_PART_OF_MIX, Move.END: State.WHOLE
    },
    State.MIX: {Move.ALL: State.CHANGING, Move.PART: State.CHANGING_PART_OF_MIX},
    State.CHANGING_PART_OF_MIX: {
        Move.ALL: State.CHANGING, Move.PART: State.CHANGING_PART_OF_MIX, Move.END: State.MIX
    },
}  # fmt: skip


class Stage(enum.Enum):
    """In this order. Only OBJECTS comes before the tensors: an object that refuses its state does
    so while the tensors are as they were."""

    OBJECTS = "states without tensors"
    STATES = "states with tensors, of objects, optimizers and dicts"
    GENERATORS = "random generators: nothing may draw after them"


class Stages:
    """What is called in each stage, with the memory in which the checkpoint's tensors are."""

    def __init__(self) -> None:
        self._calls: dict[Stage, list[Callable[[Memory], None]]] = defaultdict(list)

    def add(self, stage: Stage, call: Callable[[Memory], None]) -> None:
        self._calls[stage].append(call)

    def run(self, stage: Stage, memory: Memory) -> None:
        for call in self._calls[stage]:
            call(memory)
