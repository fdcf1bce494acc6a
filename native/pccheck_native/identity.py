"""What identifies a checkpoint of a rank, on its way and stored, in tables, documents and logs."""

from __future__ import annotations

from typing import NamedTuple

UNKNOWN = bytes(16)  # the id of a start that is not known


class CheckpointId(NamedTuple):
    """One rank's part of a checkpoint. A number may repeat when a volume was away while a start
    began; the id of the start and the digest do not. Callers rely on the order: [:3] says whose it
    is, [3:7] what is equal on all ranks."""

    uid: int
    job: str
    rank: int  # whose part it is: the shard that was stored
    sequence: int  # 0: it has no number yet
    step: int
    incarnation: int  # orders the starts of a job
    world_size: int  # of the start that saved it
    start: bytes = UNKNOWN  # the random id of that start, 16 bytes
    digest: bytes = b""  # of its manifest: of all its bytes, 16 bytes; b"": not known

    def document(self) -> dict[str, object]:
        """As in the `--json` documents."""
        ids = {"start": hexadecimal(self.start), "digest": hexadecimal(self.digest)}
        return {**self._asdict(), **ids}

    @classmethod
    def of_document(cls, item: dict[str, object]) -> CheckpointId:
        """The inverse. Raises KeyError, TypeError and ValueError for what is no such document."""
        ids = {
            name: bytes.fromhex(str(item[name] or default.hex()))
            for name, default in (("start", UNKNOWN), ("digest", b""))
        }
        return cls(**{name: item[name] for name in cls._fields} | ids)  # type: ignore[arg-type]


def hexadecimal(found: bytes) -> str | None:
    """An id in documents; None if it is not known."""
    return found.hex() if any(found) else None
