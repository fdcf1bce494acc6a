"""Work without the garbage collector leaves the collector as it was."""

from __future__ import annotations

import gc

import pytest

from pccheck.garbage import no_collection


def test_ctrl_c_as_the_collector_stops_does_not_leave_it_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stop = gc.disable

    def interrupted() -> None:
        stop()
        raise KeyboardInterrupt

    monkeypatch.setattr(gc, "disable", interrupted)
    try:
        with pytest.raises(KeyboardInterrupt), no_collection():
            pass
        assert gc.isenabled()
    finally:
        gc.enable()


def test_a_collector_that_the_script_has_stopped_stays_off() -> None:
    gc.disable()
    try:
        with no_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
