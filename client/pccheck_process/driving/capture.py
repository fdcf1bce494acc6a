"""Takes what CRIU dumps: each file's pipe goes to the session, which reads it into the pool."""

from __future__ import annotations

import os
import threading

from pccheck_process.driving import streaming
from pccheck_process.driving.criu import PrivatePlace
from pccheck_process.index import ImageIndex
from pccheck_process.saving import ImageSession
from pccheck_wire.basics import Closing
from pccheck_wire.errors import CheckpointFailedError, PccheckError, ProtocolError

#: The last file of every dump; without it the others are no image.
INVENTORY = "inventory.img"
#: Files that every process has.
_OF_A_PROCESS = ("core-{}.img", "mm-{}.img", "fs-{}.img", "pagemap-{}.img")


class Capture(Closing):
    """A thread that answers CRIU. It is a thread of this process, so it ends with it."""

    def __init__(self, place: PrivatePlace, session: ImageSession) -> None:
        self._conversation = streaming.Conversation(place.path, streaming.CAPTURE)
        self._session = session
        self.names: list[str] = []
        self.error: Exception | None = None
        self._last = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="criu-capture")
        self._thread.start()

    def index(self, pids: list[int], limit_s: float) -> ImageIndex:
        """All of the image, when CRIU has closed its files. Raises CheckpointFailedError when a
        part of it is missing."""
        came = self._last.wait(limit_s)
        if self.error is not None:
            raise _as_ours(self.error)
        if not came:
            raise CheckpointFailedError(f"criu wrote no {INVENTORY}: the image is not complete")
        index = self._session.drained(limit_s)
        wanted = ["pstree.img"]
        wanted += [name.format(pid) for pid in pids for name in _OF_A_PROCESS]
        for name in wanted:
            if name not in index.streams or not index.streams[name].nbytes:
                raise CheckpointFailedError(f"criu wrote no {name}: the image is not complete")
        return index

    def close(self) -> None:
        self._conversation.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            if not self._conversation.accept():
                return
            while (name := self._conversation.filename()) is not None:
                if name in self.names:
                    raise ProtocolError(f"criu wrote {name} twice")
                descriptor = self._conversation.descriptor()
                try:
                    self._session.stream(name, descriptor)
                    self.names.append(name)
                    if name == INVENTORY:
                        self._last.set()
                finally:
                    os.close(descriptor)
        except Exception as error:
            self.error = error
            self._last.set()
            self._session.abandon()
            self._conversation.close()


def _as_ours(error: Exception) -> PccheckError:
    return error if isinstance(error, PccheckError) else ProtocolError(f"criu's stream: {error}")
