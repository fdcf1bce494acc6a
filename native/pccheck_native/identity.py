"""What identifies a stored checkpoint, in tables, documents, messages and logs."""

from __future__ import annotations

from typing import NamedTuple

UNKNOWN = bytes(16)  # the id of a start that is not known


class CheckpointId(NamedTuple):
    """One rank's part of a checkpoint. A number may repeat when a volume was away while a start
    began; the id of the start and the digest do not."""

    uid: int
    job: str
    rank: int  # whose part it is: the shard that was stored
    sequence: int
    step: int
    incarnation: int  # orders the starts of a job
    start: bytes  # the random id of the start that saved it, 16 bytes; or UNKNOWN
    world_size: int  # of that start
    digest: bytes  # of its manifest: of all its bytes, 16 bytes; b"": not known

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
