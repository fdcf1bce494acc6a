"""What a program of the project starts with `subprocess`, forked from a process that has imported
torch: each import of torch takes three seconds of CPU time.

`begin()` forks a server before the program has done anything. Later `subprocess.Popen([python,
SCRIPT or -m MODULE, ...])` in the program asks that server for a fork, which becomes a child of the
program, as Popen's children are. Everything else is started as always, also daemons and the command
line, which import no torch."""

from __future__ import annotations

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from typing import Any

PR_SET_CHILD_SUBREAPER = 36
COLD = ("pccheckd", "pccheckctl", "tests.support.forked")
Main = Callable[[list[str]], None]


def begin(main: Main) -> None:
    """`main(words)` runs in the forks."""
    sys.stdout.flush()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        ours.close()
        try:
            _serve(theirs, main)
        finally:
            os._exit(0)
    theirs.close()
    Popen.server = ours
    subprocess.Popen = Popen  # type: ignore[misc]


class Popen(subprocess.Popen[Any]):
    server: socket.socket

    def _execute_child(self, args: Any, executable: Any, *rest: Any) -> None:
        (preexec, _, pass_fds, cwd, env, _, _, shell, stdin, _, _, stdout, _, stderr) = rest[:14]
        environment = dict(os.environ if env is None else env)
        words = [] if isinstance(args, (str, bytes, os.PathLike)) else list(map(os.fspath, args))
        words = _script(words)
        if not words or executable or preexec or pass_fds or shell or "LD_PRELOAD" in environment:
            super()._execute_child(args, executable, *rest)  # type: ignore[misc]
            return
        request = json.dumps([words, str(cwd or os.getcwd()), environment, rest[-2]])  # noqa: PTH109
        given = [own if each == -1 else each for own, each in enumerate((stdin, stdout, stderr))]
        sys.stdout.flush()
        _adopt(True)
        socket.send_fds(self.server, [request.encode()], given)
        self.pid = int(self.server.recv(32))
        _adopt(False)
        self._child_created = True
        self._close_pipe_fds(*rest[8:14])  # type: ignore[attr-defined]


def _script(words: list[str]) -> list[str]:
    """The script or `-m`, module, and flags; [] when this is not Python, or imports no torch."""
    if len(words) < 2 or words[0] != sys.executable:
        return []
    words = words[2:] if words[1] == "-u" else words[1:]
    if words[0].endswith(".py"):
        return words
    return words[1:] if words[0] == "-m" and words[1] not in COLD else []


def _adopt(on: bool) -> None:
    """Whether orphans among the descendants of this process become its children."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(on), 0, 0, 0)


def _serve(control: socket.socket, main: Main) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the program
    while True:
        request, given, _, _ = socket.recv_fds(control, 1 << 20, 3)
        if not request:
            return
        (told, tell), (ready, go) = os.pipe(), os.pipe()
        between = os.fork()
        if between == 0:
            child = os.fork()
            if child == 0:
                for each in (told, tell, go, control.fileno()):
                    os.close(each)
                os.read(ready, 1)  # until it is a child of the program
                os.close(ready)
                os._exit(_run(request, given, main))
            os.write(tell, str(child).encode())
            os._exit(0)
        number = os.read(told, 32)
        os.waitpid(between, 0)
        control.send(number)
        for each in (*given, told, tell, ready, go):
            os.close(each)


def _run(request: bytes, given: list[int], main: Main) -> int:
    words, directory, environment, new_session = json.loads(request)
    for number, each in enumerate(given):
        os.dup2(each, number)
        os.close(each)
    if new_session:
        os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environment)
    return called(main, words)


def called(main: Callable[..., Any], *arguments: Any) -> int:
    """The exit code of a program that is this function, after what ends with the interpreter."""
    code = 0
    try:
        code = main(*arguments) or 0
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    return code
