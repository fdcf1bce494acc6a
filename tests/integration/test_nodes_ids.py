"""Two nodes whose storage directories have one id: of a clone, a backup, or a shared directory."""

from __future__ import annotations

import shutil

import pytest

from tests.support import live
from tests.support.daemon import Daemon, Start
from tests.support.torchstore import TorchStore
from tests.support.trainer import Connect, RemoteError
from tests.support.widejob import end, ranks, restored, save


@pytest.mark.parametrize("older", [False, True], ids=["clone", "backup"])
def test_a_copied_storage_is_refused_and_loses_nothing(
    start_trainer: Connect, start_daemon: Start, nodes: list[Daemon], store: TorchStore,
    older: bool,
) -> None:  # fmt: skip
    """The daemon of the second node runs on a copy of the first node's storage, under the same host
    name; then on its own again."""
    copy = start_daemon()

    def copy_first() -> None:
        copy.stop()
        shutil.rmtree(copy.storage)
        live.copy(nodes[0].storage, copy.storage)
        copy.start()

    group = ranks(start_trainer, nodes, store)
    save(group)
    if older:
        copy_first()
    save(group)
    if not older:
        copy_first()
    end(group)
    again = ranks(start_trainer, [nodes[0], copy], store, "again")
    for trainer in again:
        trainer.post("restore")
    for trainer in again:
        with pytest.raises(RemoteError, match=r"\(rank \d\) and of .* \(rank \d\) has one id"):
            trainer.answer()
    for node, trainer in zip((nodes[0], copy), again, strict=True):
        trainer.step()
        trainer.checkpoint()
        node.logs("was skipped: this start is refused: the storage of host")
    end(again)
    third = ranks(start_trainer, nodes, store, "third")
    assert restored(third) == [2, 2]
    assert save(third) == 3
