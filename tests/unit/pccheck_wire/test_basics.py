"""What the first message needs."""

from __future__ import annotations

import os
import resource

import pytest

from pccheck_wire.basics import arrives

LARGE = 1500  #: above what select() takes


def test_a_large_descriptor_is_waited_for() -> None:
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] <= LARGE:
        pytest.skip("this process may not open so many files")
    read, write = os.pipe()
    os.dup2(read, LARGE)
    try:
        assert not arrives(LARGE, 0)
        os.write(write, b"x")
        assert arrives(LARGE, 60)
        os.read(LARGE, 1)
        assert not arrives(LARGE, -1)
        os.close(write)
        assert arrives(LARGE, 60)  # the end
    finally:
        os.close(read)
        os.close(LARGE)
