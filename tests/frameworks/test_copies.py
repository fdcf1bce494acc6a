"""Copies of the callbacks leave the live client out, and make one of their own for the same job."""

from __future__ import annotations

import copy
import importlib.util
import pickle
from pathlib import Path
from typing import Any

import pytest

from pccheck import PCcheckClient, UsageError
from tests.support.daemon import Daemon


def needs(name: str) -> pytest.MarkDecorator:
    missing = not importlib.util.find_spec(name)
    return pytest.mark.skipif(missing, reason=f"{name} is not installed")


def copies(thing: Any) -> list[Any]:
    return [copy.copy(thing), copy.deepcopy(thing), pickle.loads(pickle.dumps(thing))]


@needs("transformers")
def test_a_copy_of_the_callback_for_trainer_has_its_settings(daemon: Daemon) -> None:
    from pccheck.integrations.huggingface import PCcheckCallback

    with PCcheckClient(job="job", socket=daemon.socket) as client:
        given = PCcheckCallback(every_n_steps=7, client=client)
        for made in copies(given):
            assert (made.every_n_steps, made._options["job"]) == (7, "job")
            assert made._client is None and made._given is None
        own = PCcheckCallback(3, "other", socket=daemon.socket)
        assert [one._options for one in copies(own)] == [own._options] * 3
        assert client.connected and not client.closed and given._client is client


@needs("lightning")
def test_a_trainer_of_lightning_with_the_callback_is_copied(daemon: Daemon, tmp_path: Path) -> None:
    import lightning
    from lightning.pytorch.demos.boring_classes import BoringModel

    from pccheck.integrations.lightning import PCcheckCallback

    with PCcheckClient(job="job", socket=daemon.socket) as client:
        trainer = lightning.Trainer(
            max_steps=2, accelerator="cpu", callbacks=[PCcheckCallback(client=client)],
            logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, default_root_dir=tmp_path,
        )  # fmt: skip
        copies(trainer)
        trainer.fit(BoringModel())
        for made in (copy.deepcopy(trainer), pickle.loads(pickle.dumps(trainer))):
            (callback,) = (one for one in made.callbacks if isinstance(one, PCcheckCallback))
            assert callback._options["job"] == "job"
            with pytest.raises(UsageError, match="a copy of PCcheckIO has no client"):
                _ = made.strategy.checkpoint_io.client
        assert client.connected and not client.closed
        assert client.recover().step == 2
