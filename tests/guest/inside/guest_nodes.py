"""Two daemons under the shipped units, as if each were on a node of its own. Their ranks change
places, and read their parts from the other one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from tests.guest.inside import service
from tests.guest.inside.service import CONFIG, DOCUMENT, UNIT, shown, wait_for
from tests.guest.inside.shell import sh
from tests.guest.inside.user import SOCKET, User, join, read_elsewhere, save
from tests.support.etcd import Server, server

SIZE = 4 << 20
PORT = 7788
KERNEL = ("dev", "proc")  # devices; what a process may say of itself


class Node(NamedTuple):
    unit: str
    socket: Path
    interface: str
    address: str
    storage: Path


FIRST = Node("pccheckd", SOCKET, "node0", "10.99.0.1", Path("/var/lib/pccheck"))
SECOND = Node(
    "pccheckd-b", Path("/run/pccheck-b/attach.sock"), "node1", "10.99.0.2",
    Path("/var/lib/pccheck-b"),
)  # fmt: skip
NODES = (FIRST, SECOND)


@pytest.fixture(scope="module", autouse=True)
def etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Through which the daemons agree: nothing here has torch."""
    sh("useradd -m alice")
    with server(tmp_path_factory.mktemp("etcd")) as made:
        yield made


@pytest.fixture
def users() -> Iterator[list[User]]:
    """The processes of two ranks."""
    with User("alice") as first, User("alice") as second:
        yield [first, second]


def joined(users: list[User], places: tuple[Node, ...], launch: str) -> list[int]:
    """Rank i comes up on places[i]; the step that each restores."""
    begun = [
        user.begin(join, rank, SIZE, node.socket, launch)
        for rank, (user, node) in enumerate(zip(users, places, strict=True))
    ]
    return [one.result(service.LIMIT_S) for one in begun]


def save_on_all(users: list[User], step: int) -> None:
    begun = [user.begin(save, step) for user in users]
    for one in begun:
        one.result(service.LIMIT_S)
    for node in NODES:
        wait = "wait wide --newest --for=global --timeout 5min"
        sh(f"pccheckctl --socket {node.socket} {wait}")


def status(node: Node, *words: str) -> dict[str, Any]:
    told = sh(f"pccheckctl --socket {node.socket} status --json {' '.join(words)}", check=False)
    return dict(json.loads(told))


# The tests build on each other, in this order.


def test_two_daemons_run_under_the_shipped_unit(etcd: Server) -> None:
    service.install()
    for node in NODES:
        sh(f"ip link add {node.interface} type dummy && ip link set {node.interface} up")
        sh(f"ip address add {node.address}/24 dev {node.interface}")
    other = {
        "pccheckd.socket": "pccheckd-b.socket", "pccheckd.service": "pccheckd-b.service",
        "/run/pccheck/": "/run/pccheck-b/", "Directory=pccheck\n": "Directory=pccheck-b\n",
        "ExecStart=pccheckd\n": "ExecStart=pccheckd --config /etc/pccheck-b/pccheckd.toml\n",
    }  # fmt: skip
    for kind in (".service", ".socket"):
        text = UNIT.with_suffix(kind).read_text()
        for old, new in other.items():
            text = text.replace(old, new)
        UNIT.with_name(f"{SECOND.unit}{kind}").write_text(text)
    sh("install -d -o pccheck -g pccheck -m 750 /run/pccheck-b && mkdir /etc/pccheck-b")
    host, port = etcd.place.hosts[0]
    for node in NODES:
        config = CONFIG if node is FIRST else Path("/etc/pccheck-b/pccheckd.toml")
        config.write_text(
            f'storage = "{node.storage}"\nsocket = "{node.socket}"\ndram = "64MiB"\n'
            f'listen = "{node.interface}:{PORT}"\ncoordinator = "etcd://{host}:{port}"\n'
        )
        config.chmod(0o644)
    sh("systemctl daemon-reload && systemctl restart pccheckd")
    sh(f"systemctl start {SECOND.unit}.socket {SECOND.unit}.service")
    assert [shown("ActiveState", f"{node.unit}.service") for node in NODES] == ["active"] * 2


def test_the_ranks_save(users: list[User]) -> None:
    assert joined(users, NODES, "first") == [0, 0]
    for step in (1, 2):
        save_on_all(users, step)
    for node in NODES:
        (servers,) = json.loads(
            sh(f"pccheckctl --socket {node.socket} status --cluster --json", check=False)
        )["jobs"]
        assert [one["addresses"] for one in servers["nodes"]] == [
            [f"{one.address}:{PORT}"] for one in NODES
        ]


def test_the_unit_lets_no_other_node_in_until_it_is_told() -> None:
    """IPAddressDeny=any."""
    told = sh(f"pccheckctl --socket {FIRST.socket} status --cluster", check=False)
    assert told.count("no: 10.99.0.") == 2, told


def test_the_drop_in_of_the_document_lets_the_nodes_in() -> None:
    line = "IPAddressAllow=10.0.0.0/24"
    assert line in DOCUMENT
    for node in NODES:
        drop_in = UNIT.with_name(f"{node.unit}.service.d") / "override.conf"
        drop_in.parent.mkdir(exist_ok=True)
        drop_in.write_text(f"[Service]\n{line.replace('10.0.0.', '10.99.0.')}\n")
    sh("systemctl daemon-reload && systemctl restart pccheckd pccheckd-b")
    wait_for(
        lambda: (
            "would restore step 2 on 2 ranks"
            in sh(f"pccheckctl --socket {FIRST.socket} status --cluster", check=False)
        )
    )


def test_swapped_ranks_read_from_each_other(users: list[User]) -> None:
    assert joined(users, NODES[::-1], "swapped") == [2, 2]
    begun = [user.begin(read_elsewhere) for user in users]
    found = [one.result(service.LIMIT_S) for one in begun]
    assert all(same for _, same in found)
    assert {place for places, _ in found for place in places} == {
        f"{node.address}:{PORT}" for node in NODES
    }
    save_on_all(users, 3)
    assert all(status(node)["daemon"]["state"] == "ok" for node in NODES)


def test_the_peer_servers_are_confined() -> None:
    """As the unit has confined their daemon, and they have given up the rest."""
    found = [
        place.parent
        for place in Path("/proc").glob("[0-9]*/cmdline")
        if b"pccheckd.peer.program" in place.read_bytes()
    ]
    assert len(found) == len(NODES)
    for place in found:
        fields = dict(line.split(":\t", 1) for line in (place / "status").read_text().splitlines())
        assert (fields["NoNewPrivs"], fields["Seccomp"]) == ("1", "2")
        assert int(fields["CapEff"], 16) == int(fields["CapBnd"], 16) == 0
        assert fields["Uid"].split()[0] == sh("id -u pccheck")
        opened = [str(one.readlink()) for one in (place / "fd").iterdir()]
        files = [one for one in opened if one.startswith("/") and one.split("/")[1] not in KERNEL]
        assert all(one.endswith(".pcc") for one in files), files  # of readers that end just now


def test_systemd_has_understood_everything() -> None:
    lines = sh("journalctl -b --no-pager -o cat _PID=1").splitlines()
    assert not [line for line in lines if "pccheckd" in line and "gnor" in line]
