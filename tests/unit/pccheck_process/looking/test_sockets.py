"""Sockets whose other end is outside the tree."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from pccheck_process.looking import Attached, look
from pccheck_process.looking.sockets import unix_sockets
from pccheck_process.looking.tcp import connections, parse_address
from pccheck_process.procs.diag import unix_peers

from .children import child, refusals, sentences
from .fakes import FakeProc


def test_the_kernel_tells_peers_and_waiting_connections(tmp_path: Path) -> None:
    one, other = socket.socketpair()
    with one, other, socket.socket(socket.AF_UNIX) as server, socket.socket(socket.AF_UNIX) as asks:
        server.bind(str(tmp_path / "s"))
        server.listen()
        asks.connect(str(tmp_path / "s"))
        peers = unix_peers()
        inode = [os.fstat(each.fileno()).st_ino for each in (one, other, server, asks)]
        assert (peers[inode[0]], peers[inode[1]]) == (inode[1], inode[0])
        assert peers[inode[3]] == inode[2]
        assert inode[2] not in peers


def test_a_unix_socket_to_another_process_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(path)
        server.listen()
        code = f"import socket; s = socket.socket(socket.AF_UNIX); s.connect({path!r})"
        with child(code) as pid:
            waiting = refusals(pid)
            accepted, _ = server.accept()
            with accepted:
                said = refusals(pid)
    me = f"process {os.getpid()} ({Path('/proc/self/comm').read_text().strip()})"
    assert said == [f"P has a unix socket connected to {me} at {path} as descriptor 3"]
    assert waiting == said


def test_each_kind_of_unix_socket_is_looked_at(tmp_path: Path) -> None:
    for kind in (socket.SOCK_SEQPACKET, socket.SOCK_DGRAM):
        path = str(tmp_path / str(int(kind)))
        with socket.socket(socket.AF_UNIX, kind) as server:
            server.bind(path)
            if kind == socket.SOCK_SEQPACKET:
                server.listen()
            make = f"s = socket.socket(socket.AF_UNIX, {int(kind)}); s.connect({path!r})"
            with child("import socket; " + make) as pid:
                assert path in refusals(pid)[0]


def test_an_inherited_socketpair_is_refused() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, child(pass_fds=(theirs.fileno(),)) as pid:
        said = refusals(pid)
    assert len(said) == 1
    assert said[0].startswith(f"P has a unix socket connected to process {os.getpid()} (")


def test_a_listener_with_a_foreign_client_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    code = f"""
import socket
server = socket.socket(socket.AF_UNIX); server.bind({path!r}); server.listen()
"""
    with child(code) as pid, socket.socket(socket.AF_UNIX) as client:
        assert refusals(pid) == []
        client.connect(path)
        said = refusals(pid)
    assert said == [
        f"P has a unix socket at {path} as descriptor 3, to which a process outside is connected"
    ]


def test_sockets_inside_the_tree_are_kept() -> None:
    code = """
import os, socket, sys
one, other = socket.socketpair()
dead, gone = socket.socketpair(); gone.close()
if os.fork() == 0:
    one.close(); sys.stdin.read(); os._exit(0)
other.close()
"""
    with child(code) as pid:
        assert refusals(pid, tree=True) == []


def test_the_sockets_of_pccheckd_are_left_to_the_caller(tmp_path: Path) -> None:
    path = str(tmp_path / "attach")
    (tmp_path / "link").symlink_to(tmp_path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as server:
        server.bind(path)
        server.listen()
        code = f"import socket; s = socket.socket(1, 5); s.connect({path!r})"
        with child(code) as pid:
            accepted, _ = server.accept()
            with accepted:
                for named in (path, str(tmp_path / "link/attach")):
                    looked = look(pid, tree=False, root=True, daemon_sockets=[named])
                    assert looked.refusals == ()
                    assert looked.attached == (Attached(pid, 3, path),)


def test_a_kernel_that_names_no_peers_is_refused(fake: FakeProc) -> None:
    def silent() -> dict[int, int]:
        raise OSError("no unix_diag")

    fake.fd(70, 3, "socket:[8]")
    fake.unix(70, (8, ""))
    said = look(70, tree=False, root=True, proc=fake.root, peers=silent).refusals
    assert [one.what for one in said] == ["the kernel does not list the peers of unix sockets"]


def test_an_unknown_peer_is_another_process(fake: FakeProc) -> None:
    fake.fd(70, 3, "socket:[8]")
    fake.unix(70, (8, ""), (9, "/run/a b"))
    fake.peers = {8: 9, 9: 8}
    said = sentences(fake.look())
    assert "P has a unix socket connected to another process at /run/a b as descriptor 3" in said


def test_tcp_to_another_process_is_refused_with_the_address() -> None:
    for host, family in (("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6)):
        with socket.socket(family) as server:
            server.bind((host, 0))
            server.listen()
            port = server.getsockname()[1]
            code = f"import socket; s = socket.create_connection(({host!r}, {port}))"
            with child(code) as pid:
                accepted, _ = server.accept()
                with accepted:
                    said = refusals(pid)
        shown = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        assert said == [
            f"P has a TCP connection to {shown} (process {os.getpid()}), which is outside the tree"
        ]


def test_tcp_inside_the_tree_needs_root() -> None:
    code = """
import socket
server = socket.socket(socket.AF_INET6); server.bind(("::", 0)); server.listen()
client = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
accepted = server.accept()
"""
    with child(code) as pid:
        as_root = look(pid, tree=False, root=True)
        as_user = look(pid, tree=False, root=False, uid=os.getuid())
    assert as_root.tcp_established
    assert as_root.refusals == ()
    assert as_user.tcp_established
    assert len(as_user.refusals) == 2  # one for each end
    assert all("which only root can snapshot" in one.what for one in as_user.refusals)


def test_a_connection_that_waits_is_refused_until_it_is_accepted() -> None:
    code = """
import socket
server = socket.socket(); server.bind(("127.0.0.1", 0)); server.listen()
client = socket.create_connection(server.getsockname())
"""
    with child(code) as pid:
        looked = look(pid, tree=False, root=True)
    said = sentences(looked)
    assert len(said) == 1
    assert said[0].startswith("P has not accepted 1 connection(s) to port ")
    assert looked.refusals[0].fix == "try again after it has accepted every connection"


def test_other_protocols_are_refused() -> None:
    code = """
import socket
try: socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
except OSError: made = None
else: made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)
raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, 1)
"""
    with child(code) as pid:
        as_root = refusals(pid)
        as_user = sentences(look(pid, tree=False, root=False, uid=os.getuid()))
    multipath = ["P has a MPTCP socket open as descriptor 3, which CRIU cannot snapshot"]
    assert as_root in ([], multipath)
    raw = [one for one in as_user if "RAW" in one]
    assert len(raw) == 1
    assert raw[0].endswith("which only root can snapshot")


def test_tables_of_the_kernel_are_parsed() -> None:
    assert parse_address("0100007F:07E8") == ("127.0.0.1", 2024)
    assert parse_address("0000000000000000FFFF00000100007F:0016") == ("127.0.0.1", 22)
    assert parse_address("00000000000000000000000001000000:0016") == ("::1", 22)
    for bad in ("", "x", "01:1", "0100007F", "0100007F:zz", ":1", "-100007F:1"):
        assert parse_address(bad) is None
    line = "0: 0100007F:07E8 0100007F:0016 01 00000000:00000002 00:0 0 0 0 77 1"
    (one,) = connections(f"head\n{line}\nshort line\n")
    assert (one.state, one.waiting, one.inode) == (1, 2, 77)
    table = "head\n0: 2 0 0 1 01 5 /a b\n0: 2 0 0 1 01 6\nbad\n0: 2 0 0 1 01 x y\n"
    assert {one.inode: one.path for one in unix_sockets(table).values()} == {5: "/a b", 6: ""}
