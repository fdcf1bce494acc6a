"""etcd as a carrier: against a stand-in for its gateway, or against etcd (`make etcd-check`)."""

from __future__ import annotations

import asyncio
import dataclasses
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from pccheckd.config.coordinator import Coordinator
from pccheckd.nodes.carriers.carrier import VALUE_MAX, CarrierError
from pccheckd.nodes.carriers.etcd import KEYS_AT_ONCE, LEASE_S, RENEWED_AFTER, Etcd
from pccheckd.nodes.carriers.gateway import THREADS, AnsweredError, Gateway
from tests.support import certificates
from tests.support import etcd as servers
from tests.support.etcd import Server, StandIn

pytestmark = pytest.mark.anyio

stand_in_only = pytest.mark.skipif(bool(servers.PROGRAM), reason="a fault of the stand-in's")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with servers.server(tmp_path) as made:
        yield made


@pytest.fixture
def open_etcd(stack: ExitStack) -> Callable[..., Etcd]:
    """A node's carrier; all have the same prefix."""

    def opened(
        place: Coordinator, credentials: Path | None = None, prefix: str = "pccheck/u/job/",
        **options: object,
    ) -> Etcd:  # fmt: skip
        gateway = Gateway(place, credentials)
        stack.callback(gateway.close)
        return Etcd(gateway, prefix, **options)  # type: ignore[arg-type]

    return opened


@pytest.fixture
def etcd(server: Server, open_etcd: Callable[..., Etcd]) -> Etcd:
    return open_etcd(server.place)


class Clock:
    """Seconds that only the test moves."""

    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


# -- the interface -----------------------------------------------------------------------------


async def test_nodes_share_what_etcd_holds(server: Server, open_etcd: Callable[..., Etcd]) -> None:
    one, other = open_etcd(server.place), open_etcd(server.place)
    await one.set("a", b"\0\xff any bytes \n")
    await one.set("empty", b"")
    assert await one.swap("b", b"mine") == b"mine"
    assert await other.swap("b", b"yours") == b"mine"
    assert [await one.add("n", 2), await other.add("n", -5)] == [2, -3]
    assert await other.get(["b", "absent", "n", "a", "empty"]) == [
        b"mine", None, b"-3", b"\0\xff any bytes \n", b"",
    ]  # fmt: skip
    await other.set("a", b"newer")
    assert await one.get(["a"]) == [b"newer"]
    assert await one.get([]) == []


async def test_jobs_are_apart(server: Server, open_etcd: Callable[..., Etcd]) -> None:
    one, other = (open_etcd(server.place, prefix=f"pccheck/u/{name}/") for name in "ab")
    await one.set("key", b"value")
    assert await other.get(["key"]) == [None]


async def test_many_that_add_at_once_are_all_counted(
    server: Server, open_etcd: Callable[..., Etcd]
) -> None:
    nodes = [open_etcd(server.place) for _ in range(4)]
    sums = await asyncio.gather(*(node.add("n", 1) for node in nodes for _ in range(5)))
    assert sorted(sums) == list(range(1, 21))


async def test_of_many_that_swap_at_once_one_wins(
    server: Server, open_etcd: Callable[..., Etcd]
) -> None:
    nodes = [open_etcd(server.place) for _ in range(4)]
    won = await asyncio.gather(*(node.swap("k", b"%d" % n) for n, node in enumerate(nodes)))
    assert len(set(won)) == 1


async def test_more_keys_than_etcd_takes_at_once(etcd: Etcd) -> None:
    keys = [str(n) for n in range(2 * KEYS_AT_ONCE + 1)]
    for key in keys[::2]:
        await etcd.set(key, key.encode())
    assert await etcd.get(keys) == [None if n % 2 else key.encode() for n, key in enumerate(keys)]


async def test_the_largest_values(etcd: Etcd) -> None:
    for key in "abcdefgh":
        await etcd.set(key, key.encode() * VALUE_MAX)
    assert await etcd.get([*"abcdefgh"]) == [key.encode() * VALUE_MAX for key in "abcdefgh"]


async def test_a_bell_is_heard_with_what_it_rang_for(etcd: Etcd) -> None:
    assert await etcd.listen("bell", 0, ["key"], 0.0) is None
    heard = asyncio.create_task(etcd.listen("bell", 0, ["key", "absent"], 60))
    others = [asyncio.create_task(etcd.listen("never", 0, [], 60)) for _ in range(2 * THREADS)]
    assert await etcd.listen("other", 0, [], 0.01) is None  # it delays no other call
    assert await etcd.ring("key", b"one", "bell") == 1
    assert await heard == (1, [b"one", None])
    assert await etcd.listen("bell", 1, [], 0.0) is None
    assert await etcd.ring("key", b"two", "bell") == 2
    assert await etcd.listen("bell", 1, ["key"], 60) == (2, [b"two"])
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)


async def test_many_that_ring_at_once_are_all_heard(
    server: Server, open_etcd: Callable[..., Etcd]
) -> None:
    nodes = [open_etcd(server.place) for _ in range(4)]
    await asyncio.gather(*(node.ring(str(n), b"%d" % n, "bell") for n, node in enumerate(nodes)))
    found = await nodes[0].listen("bell", 3, [*"0123"], 60)
    assert found == (4, [b"0", b"1", b"2", b"3"])


async def test_a_number_is_wanted_where_one_adds(etcd: Etcd) -> None:
    await etcd.set("n", b"text")
    with pytest.raises(CarrierError, match="n in etcd holds no number"):
        await etcd.add("n", 1)


# -- its ends ----------------------------------------------------------------------------------


async def test_a_restarted_etcd_is_found_again(server: Server, etcd: Etcd) -> None:
    await etcd.set("key", b"value")
    server.kill()
    with pytest.raises(CarrierError, match=r"etcd at 127\.0\.0\.1:\d+: .*refused"):
        await etcd.get(["key"])
    server.start()
    assert await etcd.get(["key"]) == [b"value"]
    server.kill()
    server.start()  # the kept connection has ended, and nobody noticed
    await etcd.set("key", b"newer")
    assert await etcd.add("n", 1) == 1


async def test_an_etcd_that_lost_everything_is_used_again(server: Server, etcd: Etcd) -> None:
    await etcd.set("key", b"value")
    server.kill()
    server.forget()
    assert await etcd.get(["key"]) == [None]
    await etcd.set("key", b"again")  # the lease was lost, too
    assert await etcd.swap("other", b"first") == b"first"
    assert await etcd.get(["key"]) == [b"again"]


async def test_a_stopped_etcd_costs_the_limit_and_no_more(
    server: Server, open_etcd: Callable[..., Etcd]
) -> None:
    etcd = open_etcd(server.place)
    await etcd.set("key", b"value")
    etcd.limit_s = 0.2
    server.hang()
    calls = [
        etcd.get(["key"]),
        etcd.set("key", b""),
        etcd.add("n", 1),
        etcd.ring("key", b"", "bell"),
        etcd.listen("bell", 5, [], 5),
    ]
    for ended in await asyncio.gather(*calls, *(etcd.get(["x"]) for _ in range(THREADS)),
                                      return_exceptions=True):  # fmt: skip
        assert isinstance(ended, CarrierError) and ended.retryable
        assert "no answer in time" in str(ended) or "did not answer" in str(ended)
    server.heal()
    assert await open_etcd(server.place).get(["absent"]) == [None]


async def test_the_next_member_answers_for_one_that_does_not(
    server: Server, tmp_path: Path, open_etcd: Callable[..., Etcd]
) -> None:
    (tmp_path / "other").mkdir()
    with servers.server(tmp_path / "other") as hung:
        gone = servers.server(tmp_path)
        hosts = (("a..b", 1), *gone.place.hosts, *hung.place.hosts, *server.place.hosts)
        etcd = open_etcd(Coordinator(hosts, tls=False), limit_s=3.0)
        hung.hang()
        await etcd.set("key", b"value")
        assert await etcd.add("n", 1) == 1  # the one that answered is asked first, and only that
        server.kill()
        with pytest.raises(CarrierError) as caught:
            await etcd.get(["key"])
        assert all(f":{port}: " in str(caught.value) for _, port in hosts)
        hung.heal()


@stand_in_only
async def test_what_may_arrive_twice_is_asked_again(server: StandIn, etcd: Etcd) -> None:
    await etcd.set("key", b"value")
    for fault in ("close", "unanswered"):
        server.faults = [fault]
        await etcd.set("key", fault.encode())
        server.faults = [fault]
        assert await etcd.swap(fault, b"mine") == b"mine"
        server.faults = [fault]
        assert await etcd.get(["key"]) == [fault.encode()]


@stand_in_only
@pytest.mark.parametrize(("fault", "total"), [("close", 1), ("unanswered", 2)])
async def test_an_addition_is_never_asked_again(
    server: StandIn, etcd: Etcd, fault: str, total: int
) -> None:
    assert await etcd.add("n", 1) == 1
    server.faults = ["", fault]  # reads the sum, then adds
    with pytest.raises(CarrierError, match="the connection ended"):
        await etcd.add("n", 1)
    assert await etcd.get(["n"]) == [b"%d" % total]


@stand_in_only
@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ('{"error": "etcdserver: no leader", "code": 14}', "etcdserver: no leader"),
        ("<html>Bad gateway</html>", "answered 503: <html>Bad gateway"),
        ("[]", r"answered 503: \[\]"),
        ("[" * 100_000, r"answered 503: \[\["),
    ],
)
async def test_an_answer_that_is_none(server: StandIn, etcd: Etcd, answer: str, words: str) -> None:
    server.faults = [answer]
    with pytest.raises(CarrierError, match=words):
        await etcd.get(["key"])
    assert await etcd.get(["key"]) == [None]


# -- leases ------------------------------------------------------------------------------------


async def test_keys_are_bound_to_a_lease_that_use_renews(
    server: Server, open_etcd: Callable[..., Etcd]
) -> None:
    clock = Clock()
    etcd = open_etcd(server.place, clock=clock)
    await etcd.set("a", b"")
    await etcd.swap("b", b"")
    await etcd.add("n", 1)
    lease = etcd.lease
    asked = {"ID": lease, "keys": True}
    assert len(server.ask("lease/timetolive", **asked)["keys"]) == 3
    assert int(server.ask("lease/timetolive", **asked)["grantedTTL"]) == LEASE_S
    clock.now_s += 2 * RENEWED_AFTER * LEASE_S
    await etcd.get(["a"])
    assert etcd.lease == lease
    server.ask("lease/revoke", ID=lease)  # what the end of its time does
    clock.now_s += 2 * RENEWED_AFTER * LEASE_S
    assert await etcd.get(["a", "b", "n"]) == [None] * 3
    assert etcd.lease != lease
    server.ask("lease/revoke", ID=etcd.lease)
    await etcd.set("a", b"again")
    assert await etcd.get(["a"]) == [b"again"]


@stand_in_only
async def test_a_lease_is_renewed_only_when_that_is_due(
    server: StandIn, open_etcd: Callable[..., Etcd]
) -> None:
    clock = Clock()
    etcd = open_etcd(server.place, clock=clock)
    for _ in range(3):
        await etcd.set("a", b"")
        await etcd.get(["a"])
    clock.now_s += 2 * RENEWED_AFTER * LEASE_S
    await etcd.get(["a"])
    assert server.requests == ["lease/grant", *["kv/txn"] * 6, "lease/keepalive", "kv/txn"]


# -- who may -----------------------------------------------------------------------------------


@pytest.fixture
def credentials(tmp_path: Path) -> Path:
    path = tmp_path / "credentials.toml"
    path.write_text('user = "pccheck"\npassword = "one"\n')
    path.chmod(0o600)
    return path


async def test_a_user_gets_a_token_and_a_new_one_when_that_ends(
    server: Server, credentials: Path, open_etcd: Callable[..., Etcd]
) -> None:
    server.admit("pccheck", "one", "pccheck/")
    etcd = open_etcd(server.place, credentials)
    await etcd.set("key", b"value")
    server.widen("more/")
    assert await etcd.get(["key"]) == [b"value"]
    server.widen("again/")
    assert await etcd.add("n", 1) == 1
    with pytest.raises(CarrierError, match=r"permission denied \(grant .* pccheck/") as caught:
        await open_etcd(server.place, credentials, prefix="other/").get(["key"])
    assert not caught.value.retryable
    with pytest.raises(CarrierError, match="user name is empty"):
        await open_etcd(server.place).get(["key"])


async def test_a_wrong_password_is_named_and_a_renewed_file_is_read(
    server: Server, credentials: Path, open_etcd: Callable[..., Etcd]
) -> None:
    server.admit("pccheck", "two", "pccheck/")
    etcd = open_etcd(server.place, credentials)
    with pytest.raises(CarrierError, match=r"authentication failed.*--coordinator-credentials"):
        await etcd.set("key", b"value")
    credentials.write_text(credentials.read_text().replace("one", "two"))
    await etcd.set("key", b"value")
    assert await etcd.get(["key"]) == [b"value"]


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")
async def test_certificates_of_both_sides(tmp_path: Path, open_etcd: Callable[..., Etcd]) -> None:
    made, others = (certificates.make(tmp_path / name) for name in ("ours", "others"))
    path = tmp_path / "credentials.toml"

    def write(ca: Path, pair: tuple[Path, Path] | None) -> None:
        path.write_text(f'ca = "{ca}"\n')
        if pair:
            path.write_text(path.read_text() + f'certificate = "{pair[0]}"\nkey = "{pair[1]}"\n')

    with servers.server(tmp_path, made) as server:
        write(made.ca, made.client)
        etcd = open_etcd(server.place, path)
        await etcd.set("key", b"value")
        assert await etcd.get(["key"]) == [b"value"]
        for ca, pair, words in (
            (others.ca, made.client, "its certificate is not trusted"),
            (made.ca, others.client, "TLS failed|the connection ended"),
            (made.ca, None, "TLS failed|the connection ended"),
            (tmp_path / "absent", None, "cannot be used: No such file"),
        ):
            write(ca, pair)
            with pytest.raises(CarrierError, match=words):
                await open_etcd(server.place, path).get(["key"])
        plain = dataclasses.replace(server.place, tls=False)
        with pytest.raises(CarrierError):
            await open_etcd(plain).get(["key"])
        server.admit("pccheck", "one", "pccheck/")
        for pair in (made.client, made.server):
            write(made.ca, pair)
            path.write_text(path.read_text() + 'user = "pccheck"\npassword = "one"\n')
            path.chmod(0o600)
            etcd = open_etcd(server.place, path)
            if pair is made.client:
                assert await etcd.get(["key"]) == [b"value"]
            else:
                with pytest.raises(CarrierError, match="certificate must have no CN"):
                    await etcd.get(["key"])


async def test_another_server_is_not_etcd(server: Server, open_etcd: Callable[..., Etcd]) -> None:
    gateway = Gateway(server.place)
    with pytest.raises(AnsweredError, match=r"answered 404: .*etcd 3\.4 or newer"):
        await gateway.ask("nothing", {}, 5.0)
    gateway.close()
    with pytest.raises(CarrierError, match=r"cannot be asked: the threads .* shut down"):
        await gateway.ask("kv/txn", {}, 5.0)
