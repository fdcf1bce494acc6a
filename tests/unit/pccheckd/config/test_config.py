"""Flags, variables, defaults; wrong values give one error that names the fix."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pccheck_wire import basics
from pccheck_wire.errors import UsageError
from pccheck_wire.units import GIB, MIB
from pccheckd.config import sources as config
from pccheckd.config.options import OPTIONS, Config, Option


def load(flags: str = "", **environ: str) -> Config:
    line = f"--storage /srv/x --socket /run/x/a.sock --dram 256MiB {flags}".split()
    flags_ = vars(config.parser().parse_args(line))
    return config.Sources(flags_, {"PCCHECK_CONFIG": "/dev/null", **environ}).load()


def test_yes_and_no() -> None:
    assert load(PCCHECK_ALLOW_ANY_FILESYSTEM="1").allow_any_filesystem
    assert not load(PCCHECK_ALLOW_ANY_FILESYSTEM="no").allow_any_filesystem
    assert load("--allow-any-filesystem").allow_any_filesystem


def test_variables_that_nothing_reads_are_named_with_what_was_meant() -> None:
    good = {option.variable for option in OPTIONS} | {"PCCHECK_JOB", "PCCHECK_CONFIG", "SLOTS"}
    assert config.unknown_variables(good) == []
    assert config.unknown_variables(
        [*good, "PCCHECK_SLOTTS", "PCCHECK_MAXSTORAGE", "PCCHECK_ZZ"]
    ) == [
        "PCCHECK_MAXSTORAGE is set, and nothing reads it: did you mean PCCHECK_MAX_STORAGE?",
        "PCCHECK_SLOTTS is set, and nothing reads it: did you mean PCCHECK_SLOTS?",
        "PCCHECK_ZZ is set, and nothing reads it",
    ]


def test_every_variable_that_a_client_reads_is_known() -> None:
    """Otherwise a variable that is in use would be reported as misspelt."""
    client = Path(__file__).parents[4] / "client"
    read = {
        name
        for file in client.rglob("*.py")
        for name in re.findall(r"[\"'](PCCHECK_[A-Z_]+)[\"']", file.read_text())
    }
    assert "PCCHECK_JOB" in read
    assert read - {"PCCHECK_"} <= set(basics.VARIABLES)


@pytest.mark.parametrize("option", ["storage", "socket"])
def test_an_empty_path_is_not_the_directory_here(option: str) -> None:
    """`--storage "$DIR"` of a script in which DIR is not set."""
    given = vars(config.parser().parse_args([f"--{option}="]))
    with pytest.raises(UsageError, match=f"--{option}: '' is not a path"):
        config.Sources(given, {"PCCHECK_CONFIG": "/dev/null"}).load()
    variable = f"PCCHECK_{option.upper()}"
    with pytest.raises(UsageError, match=f"{variable}: '' is not a path"):
        config.Sources({}, {"PCCHECK_CONFIG": "/dev/null", variable: ""}).load()


def test_in_flight_is_slots_minus_keep() -> None:
    assert load("--slots 4 --keep 1").in_flight == 3


def test_the_default_of_dram_is_a_quarter_of_what_the_cgroup_allows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(config.cgroups, "memory_bytes", lambda: (400 * MIB, "memory.max of /job"))
    line = ["--storage", "/srv/x", "--socket", "/run/x/a.sock", "--chunk", "1MiB"]
    given = vars(config.parser().parse_args(line))
    made = config.Sources(given, {"PCCHECK_CONFIG": "/dev/null"}).load()
    assert made.dram_bytes == 100 * MIB
    assert config.warnings(made) == []
    (told,) = config.warnings(load("--dram 500MiB"))
    assert "500 MiB is more than memory.max of /job allows (400 MiB)" in told


def test_too_much_dram_is_refused_with_the_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for, what there is, and whether the host or a cgroup is the limit."""
    monkeypatch.setattr(config.cgroups, "ram_bytes", lambda: 2 * GIB)
    monkeypatch.setattr(config.cgroups, "memory_bytes", lambda: (2 * GIB, "the RAM of this host"))
    with pytest.raises(UsageError) as refused:
        load("--dram 3GiB")
    assert "at most the RAM of this host (2.00 GiB) (got 3.00 GiB)" in refused.value.message
    assert refused.value.hint == ""
    monkeypatch.setattr(config.cgroups, "memory_bytes", lambda: (400 * MIB, "memory.max of /job"))
    with pytest.raises(UsageError) as refused:
        load("--dram 3GiB")
    assert refused.value.hint == "memory.max of /job allows 400 MiB"


@pytest.mark.parametrize(
    ("flags", "environ", "told"),
    [
        ("--slots x", {}, r"--slots: 'x' is not a whole number"),
        ("", {"PCCHECK_SLOTS": "x"}, r"PCCHECK_SLOTS: 'x'"),
        ("--slots 1", {}, r"--slots must be 2 to 32 \(got 1\)"),
        ("--slots 33", {}, r"--slots must be .*got 33"),
        ("--keep 4", {}, r"--keep must be less than --slots \(got 4 and 4\)"),
        ("--keep 0", {}, r"--keep must be at least 1, less than slots \(got 0\)"),
        ("--writers 0", {}, r"--writers must be .*got 0"),
        ("--chunk 5000", {}, r"--chunk must be a multiple of 1MiB \(got 5000 bytes"),
        ("--chunk 4KiB", {}, r"--chunk must be a multiple of 1MiB \(got 4096 bytes"),
        ("", {"PCCHECK_CHUNK": "1GiB"}, r"PCCHECK_CHUNK must be 4KiB to 256MiB.*got 1073741824 "),
        ("--log-level loud", {}, r"--log-level: 'loud' is not one of debug"),
        ("--metrics here", {}, r"--metrics: 'here'"),
        ("--stall-limit 0", {}, r"--stall-limit must be at least 0.1s \(got 0s\)"),
        ("--block-bytes 1000", {}, r"--block-bytes must be a power of two"),
        ("--dram 1MiB", {}, r"at least two chunks \(32.0 MiB\).* \(got 1.00 MiB\)"),
        (
            "--max-dram-per-user 31MiB",
            {},
            r"at least two chunks \(32.0 MiB\), or 0 for no limit \(got 31.0 MiB\)",
        ),
        ("--dram 8GB", {}, r"--dram: '8GB' is not a size"),
        ("--engine aio", {}, r"--engine: 'aio' is not one of pwrite, mmap, pmem"),
        ("--log-format xml", {}, r"--log-format: 'xml'"),
        (
            "--expire-finished 7",
            {},
            r"--expire-finished must be at least 1h, or 0 for never \(got 7s",
        ),
        ("--drain-limit soon", {}, r"--drain-limit"),
        ("", {"PCCHECK_ALLOW_ANY_FILESYSTEM": "maybe"}, r"neither yes nor no"),
        (
            "--socket /tmp/" + "x" * 90 + "/a.sock",
            {},
            r"--socket must be in a directory whose path",
        ),
        ("--storage /mnt/\udcff", {}, r"--storage must be a path in UTF-8 \(got /mnt/.\)"),
        ("--socket /tmp/\udcff/a.sock", {}, r"--socket must be a path in UTF-8 \(got /tmp/./a"),
    ],
)
def test_wrong_values_name_the_fix(flags: str, environ: dict[str, str], told: str) -> None:
    with pytest.raises(UsageError, match=told):
        load(flags, **environ)


def test_storage_is_required() -> None:
    with pytest.raises(UsageError, match=r"--storage is missing"):
        config.Sources({}, {"PCCHECK_CONFIG": "/dev/null"}).load()


def test_small_blocks_allow_small_chunks() -> None:
    chosen = load("--block-bytes 512 --chunk 4KiB")
    assert (chosen.block_bytes, chosen.chunk_bytes) == (512, 4096)


def test_paths_become_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert load("--storage here").storage == tmp_path / "here"


def test_every_option_has_a_variable() -> None:
    assert {o.flag: o.variable for o in OPTIONS}["--max-storage"] == "PCCHECK_MAX_STORAGE"


@pytest.mark.parametrize("option", OPTIONS, ids=lambda option: option.key)
def test_what_is_shown_as_default_can_be_given(option: Option) -> None:
    if option.default is not None:
        assert option.kind.parse(option.kind.show(option.default)) == option.default
    assert option.help and option.help[-1] != "."


def test_times_have_units() -> None:
    assert load("--drain-limit 5min").drain_limit_s == 300
    assert load("--drain-limit 90").drain_limit_s == 90
