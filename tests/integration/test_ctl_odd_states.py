"""Unusual states and hostile names of another user: no command ends in a traceback, and no name
moves the cursor."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pccheck_wire import tree
from pccheck_wire.tree import Mapping, Node, Scalar, Sequence, Tag, Tensor
from tests.support.ctl import Ctl
from tests.support.volumes import Rank, floats, mapping

HUGE = 7**6000  # more digits than Python turns into text
TENSOR = Tensor([12], [1], "float32", 0, 0, 0)
ESCAPES = "\x1b[2J\x1b]0;pwned\x07"


def save(storage: Path, root: Node) -> Path:
    with Rank(storage) as rank:
        rank.put(1, state=([floats(1, 12)], root))
    return storage


def every_command(storage: Path, ctl: Ctl, tmp_path: Path) -> dict[str, tuple[int, str, str]]:
    """The results of show, verify and export in each format."""
    commands: dict[str, list[str]] = {
        "show": ["show", "job"], "json": ["show", "job", "--json"], "verify": ["verify"],
        "pt": ["export", "job", "-o", str(tmp_path / "a.pt")],
        "safetensors": ["export", "job", "-o", str(tmp_path / "a.safetensors")],
        "dcp": ["export", "job", "--format", "dcp", "-o", str(tmp_path / "dcp")],
    }  # fmt: skip
    ran = {name: ctl(storage, *words) for name, words in commands.items()}
    return {name: (one.code, one.out, one.err) for name, one in ran.items()}


@pytest.mark.parametrize(
    "root",
    [
        mapping(t=TENSOR, value=HUGE),
        Mapping(Tag.DICT, [(HUGE, 1), ("t", TENSOR)]),
        Mapping(Tag.DICT, [(Sequence(Tag.TUPLE, [1, -HUGE]), 1), ("t", TENSOR)]),
        mapping(t=TENSOR, value=Sequence(Tag.SET, [HUGE])),
        Mapping(Tag.DICT, [("\ud800", 1), ("t\udfff", TENSOR)]),
        mapping(t=TENSOR, value="\udcff"),
    ],
)
def test_legal_states_end_no_command_in_a_traceback(tmp_path: Path, ctl: Ctl, root: Node) -> None:
    for name, (code, _, err) in every_command(save(tmp_path / "s", root), ctl, tmp_path).items():
        if name == "dcp" and code:  # which takes dicts with names only
            assert err.startswith("pccheckctl: torch.distributed.checkpoint"), err
            continue
        assert code == 0, (name, err)


def test_values_in_any_language_are_shown_in_any_locale(tmp_path: Path) -> None:
    storage = save(tmp_path / "s", mapping(t=TENSOR, text="caf\u00e9 \u6f22"))
    ran = subprocess.run(
        [sys.executable, "-m", "pccheckctl", "--storage", str(storage), "show", "job"],
        check=False, capture_output=True, text=True,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )  # fmt: skip
    assert (ran.returncode, ran.stderr) == (0, "")
    assert "'caf\\xe9 \\u6f22'" in ran.stdout


def test_metadata_may_hold_them_too(tmp_path: Path, ctl: Ctl) -> None:
    storage = tmp_path / "s"
    with Rank(storage) as rank:
        described = tree.Tree(1, mapping(n=HUGE, t="\ud800"), True, [], mapping(a=1))
        rank.save(1, [], tree.encode(described), step=1)
    assert json.loads(ctl(storage, "show", "job", "--json").out)["metadata"]["n"] == hex(HUGE)
    assert ctl(storage, "show", "job").code == 0
    assert ctl(storage, "export", "job", "-o", tmp_path / "a.safetensors").code == 0


@pytest.mark.parametrize(
    ("root", "formats"),
    [
        (mapping(t=TENSOR, s=Scalar("|O", bytes(8))), ("pt", "dcp")),
        (mapping(t=Tensor([12], [1], "int32", tree.REQUIRES_GRAD, 0, 0)), ("show", "pt", "dcp")),
        (mapping(t=Tensor([2**60], [0], "float32", 0, 0, 0)), ("safetensors", "dcp")),
        (mapping(t=Tensor([2**36], [0], "float32", 0, 0, 0)), ("dcp",)),
    ],
)
def test_what_only_others_write_is_refused_in_words(
    tmp_path: Path, ctl: Ctl, root: Node, formats: tuple[str, ...]
) -> None:
    ran = every_command(save(tmp_path / "s", root), ctl, tmp_path)
    for name in formats:
        code, _, err = ran[name]
        assert code, name
        assert err.startswith("pccheckctl: "), (name, err)


@pytest.mark.parametrize(
    "name",
    [ESCAPES, "\x9b31m", "a\nb  float32  12  48 B", "\u202eevil", "\u2066x", "\x7f", "\ud800"],
)
def test_names_of_others_move_no_cursor_and_forge_no_line(
    tmp_path: Path, ctl: Ctl, name: str
) -> None:
    root = Mapping(Tag.DICT, [(name, 1), (f"t{name}", TENSOR), ("v", name)])
    storage = save(tmp_path / "s", root)
    plain = save(tmp_path / "p", Mapping(Tag.DICT, [("n", 1), ("tn", TENSOR), ("v", "n")]))
    shown = ctl(storage, "show", "job")
    assert shown.out.count("\n") == ctl(plain, "show", "job").out.count("\n")
    lost = ctl(storage, "export", "job", "--only", "none", "-o", tmp_path / "x.pt")
    assert lost.code == 2
    for text in (shown.out, shown.err, lost.err):
        assert all(line.isprintable() for line in text.split("\n")), text
