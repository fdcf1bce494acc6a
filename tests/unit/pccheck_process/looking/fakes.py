"""A directory that looks like /proc, with processes that no machine has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from pccheck_process.looking import Looked, look

NAMESPACES = ("pid", "user", "net", "mnt", "ipc", "uts", "cgroup", "time")
_UNIX_HEAD = "Num       RefCount Protocol Flags    Type St Inode Path\n"
_TCP_HEAD = "  sl  local_address rem_address   st tx_queue rx_queue\n"
MAPS = (
    "00400000-00500000 r-xp 00000000 08:01 11 /usr/bin/python3\n"
    "7f0000000000-7f0000100000 rw-p 00000000 00:00 0 [heap]\n"
)


class FakeProc:
    """`uid` owns the processes. `peers` stands for the kernel's answer about unix sockets."""

    def __init__(self, root: Path, uid: int = 1000) -> None:
        self.root = root
        self.uid = uid
        self.peers: dict[int, int] = {}
        self.namespaces("self")

    def namespaces(self, pid: object, **other: str) -> None:
        for number, name in enumerate(NAMESPACES):
            self.link(f"{pid}/ns/{name}", other.get(name, f"{name}:[{number + 100}]"))

    def put(self, name: str, text: str | bytes) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    def link(self, name: str, target: str) -> None:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    def process(
        self, pid: int, *, parent: int = 1, comm: str = "python", state: str = "S",
        session: int | None = None, terminal: int = 0, flags: int = 0, start: int = 500,
        argv: str = "python\0train.py\0", maps: str = MAPS, ns: Mapping[str, str] | None = None,
        **status: str,
    ) -> None:  # fmt: skip
        session = pid if session is None else session
        self.put(
            f"{pid}/stat",
            f"{pid} ({comm}) {state} {parent} {pid} {session} {terminal} -1 {flags} 0 0 0 0 1 1 0 "
            f"0 20 0 1 0 {start} 1000 200\n",
        )
        fields = {"Name": comm, "TracerPid": "0", "Seccomp": "0", "RssShmem": "0 kB"}
        fields |= {name: "\t".join([str(self.uid)] * 4) for name in ("Uid", "Gid")}
        fields |= dict.fromkeys(("CapPrm", "CapInh"), "0000000000000000")
        fields |= status
        text = "".join(f"{name}:\t{value}\n" for name, value in fields.items())
        for name in ("status", f"task/{pid}/status"):
            self.put(f"{pid}/{name}", text)
        self.put(f"{pid}/cmdline", argv)
        self.put(f"{pid}/maps", maps)
        self.put(f"{pid}/smaps_rollup", "head [rollup]\nAnonymous: 2048 kB\nSwap: 1024 kB\n")
        self.link(f"{pid}/root", "/")
        (self.root / f"{pid}/fd").mkdir(exist_ok=True)
        self.namespaces(pid, **(ns or {}))

    def fd(self, pid: int, fd: int, target: str, *, flags: int = 0o2, info: str = "") -> None:
        self.link(f"{pid}/fd/{fd}", target)
        self.put(f"{pid}/fdinfo/{fd}", f"pos:\t0\nflags:\t{flags:o}\nmnt_id:\t1\n{info}")

    def unix(self, pid: int, *lines: tuple[int, str]) -> None:
        """Inode and path of each socket."""
        rows = [f"0000: 00000003 00000000 00000000 0001 03 {inode} {path}" for inode, path in lines]
        self.put(f"{pid}/net/unix", _UNIX_HEAD + "\n".join(rows) + "\n")

    def tcp(self, pid: int, *lines: str, name: str = "tcp") -> None:
        """Lines "LOCAL REMOTE STATE WAITING INODE"."""
        rows = []
        for number, line in enumerate(lines):
            local, remote, state, waiting, inode = line.split()
            rows.append(
                f"{number}: {local} {remote} {state} 00000000:{waiting} 00:00000000 00000000 0 0 "
                f"{inode} 1"
            )
        self.put(f"{pid}/net/{name}", _TCP_HEAD + "\n".join(rows) + "\n")

    def look(
        self, pid: int = 70, *, tree: bool = False, root: bool = True, daemon: str = ""
    ) -> Looked:
        sockets = [daemon] if daemon else []
        return look(
            pid, tree=tree, root=root, daemon_sockets=sockets, proc=self.root, uid=self.uid,
            peers=lambda: self.peers,
        )  # fmt: skip
