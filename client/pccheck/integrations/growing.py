"""A log that only grows, as part of a state: each entry is encoded once, not every time."""

from __future__ import annotations

import json
from itertools import chain
from typing import Any

import numpy as np

from pccheck_native import same_items

#: Entries of a piece, some hundred KiB of text. A checkpoint has an array for each piece.
PIECE_ENTRIES = 4096


def _encode(value: object) -> str:
    return json.dumps(value, default=lambda one: getattr(one, "item", one.__str__)())


class GrowingLog:
    """The JSON text of an object that has a log, a list of dicts, under a key. Full pieces of the
    log are arrays over `bytes`, which never change: checkpoints read them in the background.

    Each call compares the list with the entries that it knows. After a removal, an insertion or a
    replacement the log is encoded again. Another value in an entry has the same effect: at once
    behind the full pieces, else after as many calls as there are pieces.
    """

    def __init__(self, key: str) -> None:
        self._key = key
        self._forget()

    def _forget(self) -> None:
        self._known: list[dict[str, Any]] = []
        self._pieces: list[np.ndarray[Any, Any]] = []
        self._tail: list[str] = []  # the text of each entry behind the pieces
        self._inside: list[tuple[object, ...]] = [()]  # what each piece holds; of the tail, last
        self._turn = 0

    def encoded(self, fields: dict[str, Any]) -> dict[str, Any]:
        """A state from which `text_of` makes the text of `fields`: `text` of all but the log, and
        of the log `pieces` in UTF-8 and `tail`."""
        log = fields[self._key]
        self._known += log[len(self._known) :]
        if not self._holds(log):
            self._forget()
            self._known += log
        self._take()
        others = {key: value for key, value in fields.items() if key != self._key}
        return {
            "key": self._key, "text": _encode(others), "pieces": list(self._pieces),
            "tail": ",".join(self._tail),
        }  # fmt: skip

    def _holds(self, log: list[dict[str, Any]]) -> bool:
        """Whether what was encoded is still so."""
        try:  # objects that are the same ones are not compared further
            if log != self._known:
                return False
        except Exception:  # other ones, which hold arrays
            return False
        last = len(self._pieces)
        self._turn = (self._turn + 1) % (last + 1)
        return all(map(self._unchanged, {self._turn, last}))

    def _unchanged(self, piece: int) -> bool:
        start = piece * PIECE_ENTRIES
        end = start + (len(self._tail) if piece == len(self._pieces) else PIECE_ENTRIES)
        return same_items(self._known[start:end], self._inside[piece])

    def _take(self) -> None:
        """Encodes what is new."""
        while (done := len(self._pieces) * PIECE_ENTRIES + len(self._tail)) < len(self._known):
            some = self._known[done : done + PIECE_ENTRIES - len(self._tail)]
            inside = chain.from_iterable([*chain.from_iterable(d.items()), d] for d in some)
            self._tail += list(map(_encode, some))
            self._inside[-1] += tuple(inside)
            if len(self._tail) == PIECE_ENTRIES:
                self._pieces.append(np.frombuffer(",".join(self._tail).encode(), np.uint8))
                self._tail = []
                self._inside.append(())


def text_of(state: str | dict[str, Any]) -> str:
    """The text that was encoded. Older checkpoints have the text itself."""
    if isinstance(state, str):
        return state
    parts = [*(bytes(piece).decode() for piece in state["pieces"]), state["tail"]]
    log = ",".join(filter(None, parts))
    return f"{state['text'][:-1]}, {json.dumps(state['key'])}: [{log}]}}"
