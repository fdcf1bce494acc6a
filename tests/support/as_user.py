"""Runs a module's main() as another uid: python -m tests.support.as_user UID pccheckctl.cli ARG...

Everything is imported before the uid changes: the other user may have no access to the directory of
the interpreter (a virtual environment in root's home).
"""

from __future__ import annotations

import argparse
import codecs
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable
from pathlib import Path

#: No test runs `pccheckctl import` as another user, and torch takes two seconds.
_LEFT_OUT = ("pccheckctl.importing.", "pccheckd.__main__")


def everybody_enters(directory: Path) -> bool:
    """Whether another user may run what lies there: a clone in `mktemp -d` has one user."""
    return all(place.stat().st_mode & 0o001 for place in (directory, *directory.parents))


def _import_all(package: str) -> None:
    found = importlib.import_module(package)
    for module in pkgutil.walk_packages(found.__path__, package + "."):
        if module.name.startswith(_LEFT_OUT):
            continue
        try:
            importlib.import_module(module.name)
        except ModuleNotFoundError:
            if ".integrations." not in module.name:  # of a framework that is not installed
                raise


def import_all(package: str) -> None:
    """Imports what a daemon or a command needs, with what is usually imported late."""
    for name in ("pccheck_wire", "pccheck_native", "pccheck_store", package):
        if name != "tests.support":  # the target has imported what it needs
            _import_all(name)
    if package == "pccheckd":
        for late in ("psutil", "tomllib"):
            importlib.import_module(late)
        import uvloop

        uvloop.new_event_loop().close()
    argparse.ArgumentParser().format_help()
    codecs.lookup("unicode_escape")


def fork_as(uid: int, work: Callable[[], str]) -> str:
    """Runs `work` in a forked child of another uid; returns its result."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            answer = work()
        except BaseException as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(writing, answer.encode()[:4000])
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    return answer


def main() -> int:
    uid, target, *arguments = sys.argv[1:]
    package = target.rpartition(".")[0]
    module = importlib.import_module(target)
    import_all(package)
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    sys.argv = [package, *arguments]
    return int(module.main() or 0)


if __name__ == "__main__":
    sys.exit(main())
