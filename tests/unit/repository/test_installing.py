"""What is built from the source: the wheel, the source archive, and the end without a tool.

A stand-in compiles nothing, so that a build takes a second; `make wheels` compiles.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from setup import NEEDED

ROOT = Path(__file__).parents[3]
SOURCES = ("client", "native", "pccheckd", "LICENSE", "MANIFEST.in", "NOTICE", "README.md")
BUILT = shutil.ignore_patterns("*.so", "__pycache__", "build", "*.egg-info")
KINDS = (".py", ".pyi", ".css", ".typed")
#: Says much about a header that it does not have, as gcc does, and makes every other file.
COMPILER = """\
#!/bin/sh
case "$*" in
*" -") case "$(cat)" in *"$LACKS"*) printf 'error %s\\n' 1 2 3 >&2; exit 1 ;; esac ;;
*) for word; do [ "$last" = -o ] && : >"$word"; last=$word; done; true ;;
esac
"""


@dataclass(frozen=True)
class Built:
    source: Path
    wheel: Path
    archive: Path

    def names(self) -> set[str]:
        with zipfile.ZipFile(self.wheel) as wheel:
            return set(wheel.namelist())


def setup(
    source: Path, *words: str, lacks: str = "nothing", **variables: str
) -> subprocess.CompletedProcess[str]:
    compiler = source.parent / "compiler"
    compiler.write_text(COMPILER)
    compiler.chmod(0o755)
    environment = os.environ | {"CC": str(compiler), "LACKS": f"<{lacks}>"} | variables
    return subprocess.run(
        [sys.executable, "-W", "ignore", "setup.py", "-q", *words],
        cwd=source, env=environment, text=True, capture_output=True, check=False,
    )  # fmt: skip


def copy(target: Path) -> Path:
    target.mkdir()
    for name in (*SOURCES, "setup.py", "pyproject.toml"):
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, target / name, ignore=BUILT)
        else:
            shutil.copy(ROOT / name, target)
    return target


def wheel_of(source: Path) -> Path:
    ended = setup(source, "bdist_wheel")
    assert ended.returncode == 0, ended.stderr
    (found,) = source.glob("dist/*.whl")
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    source = copy(tmp_path_factory.mktemp("installing") / "source")
    wheel = wheel_of(source)
    assert setup(source, "sdist").returncode == 0
    (archive,) = source.glob("dist/*.tar.gz")
    return Built(source, wheel, archive)


def test_one_wheel_serves_every_python_from_3_11_on(built: Built) -> None:
    assert built.wheel.stem.split("-")[2:4] == ["cp311", "abi3"]


def test_a_wheel_has_every_file_that_the_packages_have(built: Built) -> None:
    wanted = {"pccheck_native/_core.abi3.so"}
    for top in ("client", "native", ""):
        for package in (built.source / top).glob("pccheck*/"):
            wanted |= {
                str(path.relative_to(built.source / top))
                for path in package.rglob("*")
                if path.suffix in KINDS or path.name == "py.typed"
            }
    assert len(wanted) > 100
    packages = {name for name in built.names() if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in packages} == {
        "pccheck", "pccheck_native", "pccheck_process", "pccheck_store", "pccheck_wire",
        "pccheckctl", "pccheckd",
    }  # fmt: skip
    assert packages == wanted


def test_a_wheel_has_both_programs_and_its_licence(built: Built) -> None:
    with zipfile.ZipFile(built.wheel) as wheel:
        (points,) = (n for n in wheel.namelist() if n.endswith("/entry_points.txt"))
        text = wheel.read(points).decode()
    assert "pccheckd = pccheckd.cli:main" in text
    assert "pccheckctl = pccheckctl.__main__:main" in text
    assert {Path(n).name for n in built.names()} >= {"LICENSE", "NOTICE"}


def test_the_source_archive_makes_the_same_wheel(built: Built, tmp_path: Path) -> None:
    with tarfile.open(built.archive) as archive:
        archive.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    assert (source / "native/xxhash.sh").stat().st_mode & 0o100
    with zipfile.ZipFile(wheel_of(source)) as wheel:
        assert set(wheel.namelist()) == built.names()
    c_files = {p.relative_to(built.source) for p in built.source.rglob("native/**/*.[ch]")}
    assert all((source / path).exists() for path in c_files)


@pytest.mark.parametrize("header", NEEDED)
def test_a_missing_header_ends_the_build_with_one_sentence(built: Built, header: str) -> None:
    ended = setup(built.source, "bdist_wheel", lacks=header)
    assert ended.returncode == 1
    assert ended.stderr.strip() == NEEDED[header]
    assert "install " in NEEDED[header]


def test_a_missing_compiler_ends_the_build_with_one_sentence(built: Built) -> None:
    ended = setup(built.source, "build_ext", "--inplace", CC="no-such-compiler")
    assert (ended.returncode, ended.stderr.strip()) == (1, NEEDED["stdlib.h"])


def test_make_stops_at_a_missing_header_before_it_installs(built: Built) -> None:
    ended = setup(built.source, "needed", lacks="xxhash.h")
    assert (ended.returncode, ended.stderr.strip()) == (1, NEEDED["xxhash.h"])
    assert setup(built.source, "needed").returncode == 0


def test_pip_shows_the_sentence_about_xxhash_in_its_last_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = copy(tmp_path / "source")
    monkeypatch.setenv("CC", str(tmp_path / "compiler"))
    monkeypatch.setenv("LACKS", "<xxhash.h>")
    assert setup(source, "needed").returncode == 0
    ended = subprocess.run(
        [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation",
         "--target", tmp_path / "site", source],
        text=True, capture_output=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 1
    lines = [line.strip() for line in ended.stderr.splitlines()]
    assert NEEDED["xxhash.h"] in lines[-8:]
    assert len(lines) < 20
