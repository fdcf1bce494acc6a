"""What the members of a start tell each other while it runs: each shows what it has, and the one
with rank 0 says the facts that follow."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Mapping, Sequence

from pccheck_native.nodes.facts import Have, Said, SaveName, say, who_lacks
from pccheck_native.nodes.lists import StartList, joined, listed

from .carriers.carrier import CarrierError
from .carriers.patient import Patient, parsed
from .view import NodesView

#: So long after the last news the member that decides shows what it has itself.
SHOW_AFTER_S = 0.1
#: How often a member that does not decide reads what the others have, and for how long it waits.
LOOK_S, LOOK_LIMIT_S = 10.0, 1.0

#: The facts, and the nodes that will never have what is given up.
Heard = Callable[[Said, Mapping[SaveName, str]], None]


class Exchange:
    """Owned by the member, once its start has begun. `run` is a task of the member."""

    def __init__(
        self, patient: Patient, prefix: str, found: StartList, at: int, view: NodesView,
        heard: Heard,
    ) -> None:  # fmt: skip
        """`prefix`: of the start's keys. `at`: this member."""
        self._patient, self._prefix, self._list, self._at = patient, prefix, found, at
        self._view, self._heard = view, heard
        self._keys = [self._key("have", at) for at in range(len(found.members))]
        self._looked_s = -LOOK_S
        #: What the members have published, as read last, and what that says.
        self._values: list[bytes | None] = [None] * len(found.members)
        self._haves: list[Have | None] = [None] * len(found.members)
        self._mine: Have | None = None  # what this one has, which needs no message
        self._said = Said()
        self._lacking: dict[SaveName, str] = {}  # of what is given up: the nodes that lack it
        self._has_news = asyncio.Event()  # what the others were not told or shown yet
        self._is_shown = True  # what this member has itself; or there is nothing yet

    async def run(self) -> None:
        if self._at:
            await self._listen()
            return
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._decide())
            tasks.create_task(self._tell())

    async def show(self, have: Have) -> None:
        """The other members find it in the store. The one that decides hears a bell, and shows its
        own later: only people wait for that."""
        if self._at == 0:
            self._mine, self._is_shown = have, False
            self._say()
            self._has_news.set()
        else:
            await self._patient.ring(self._keys[self._at], have.to_plain(), self._key("bell"))

    async def look(self) -> None:
        """Reads what the members have published, for a person who asks: the one that decides knows,
        and another one reads every LOOK_S at most. What cannot be read soon is left as it was."""
        now_s = time.monotonic()
        if self._at == 0 or now_s - self._looked_s < LOOK_S:
            return
        self._looked_s = now_s
        with contextlib.suppress(CarrierError, TimeoutError):
            async with asyncio.timeout(LOOK_LIMIT_S):
                self._read(await self._patient.look(self._keys))
                self._view.saw(self._haves)

    # -- the member that decides ---------------------------------------------------------------

    async def _decide(self) -> None:
        """The facts, whenever another member has published."""
        rung = 0
        while True:
            rung, values = await self._patient.hear(self._key("bell"), rung, self._keys)
            self._read(values)
            self._say()
            await asyncio.sleep(0)  # `_tell` sends its message before this task listens again

    def _say(self) -> None:
        """The facts that follow, if they are new."""
        haves = list(self._haves)
        if self._mine is not None:
            haves[:1] = [self._mine]
        self._view.saw(haves)
        if (said := say(haves)) != self._said:
            self._said, self._lacking = said, self._lacks(said, haves)
            self._has_news.set()

    async def _tell(self) -> None:
        """The other members first: a process here that hears of its last checkpoint may end, and
        the store with it."""
        told = Said()
        while True:
            try:
                async with asyncio.timeout(None if self._is_shown else SHOW_AFTER_S):
                    await self._has_news.wait()
            except TimeoutError:
                await self._show_mine()
                continue
            self._has_news.clear()
            said, lacking = self._said, self._lacking
            if set(said.given_up) - set(told.given_up):  # the others read who lacks it
                await self._show_mine()
            if said != told:
                bell = self._key("said", "bell")
                await self._patient.ring(self._key("said"), said.to_plain(), bell)
                told = said
                self._view.heard(said)
                self._heard(said, lacking)

    async def _show_mine(self) -> None:
        if self._mine is not None:
            self._is_shown = True
            await self._patient.set(self._keys[self._at], self._mine.to_plain())

    # -- the others ----------------------------------------------------------------------------

    async def _listen(self) -> None:
        """The facts, as the member with rank 0 says them. Few checkpoints are given up: for each,
        this member reads whose they are."""
        given_up = set[SaveName]()
        bell, key, rung = self._key("said", "bell"), self._key("said"), 0
        while True:
            rung, (value,) = await self._patient.hear(bell, rung, [key])
            if (said := parsed(Said.of_plain, value)) is not None:
                self._view.heard(said)
                lacks: dict[SaveName, str] = {}
                if not given_up.issuperset(said.given_up):
                    self._read(await self._patient.get(self._keys))
                    lacks = self._lacks(said, self._haves)
                given_up = set(said.given_up)
                self._heard(said, lacks)

    def _lacks(self, said: Said, haves: Sequence[Have | None]) -> dict[SaveName, str]:
        """The nodes that will never have what is given up."""
        found, names = self._list, {}
        for name in said.given_up:
            nodes = [found.members[at] for at in who_lacks(haves, name)]
            names[name] = joined([f"{found.name(one)} ({listed(one.ranks)})" for one in nodes])
        return names

    def _read(self, values: Sequence[bytes | None]) -> None:
        """Most of them are what they were the last time."""
        for at, value in enumerate(values):
            if value != self._values[at]:
                self._values[at], self._haves[at] = value, parsed(Have.of_plain, value)

    def _key(self, *words: object) -> str:
        return "/".join([self._prefix, *map(str, words)])
