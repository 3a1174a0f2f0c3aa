# SPDX-License-Identifier: Apache-2.0
"""The loop of work that needs systemd, with work that fails as the test says, and its pauses."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from resctrlmond.api.dbus.library import BusUnavailable
from resctrlmond.daemon import systemd_loop
from resctrlmond.daemon.alerts import Alert
from resctrlmond.daemon.systemd_loop import Retries, SystemdLoop

ALERT = Alert("lamps", "lamps are not lit", "lamps are lit again")


class Lamps:
    """Work that fails while ``error`` is set. ``tries`` has the time of each call."""

    def __init__(self) -> None:
        self.error: Exception | None = BusUnavailable("no bus")
        self.alerts: dict[str, str] = {}
        self.told: list[str] = []
        self.tries: list[float] = []
        self.loop = SystemdLoop(self.alerts, self.work, alert=ALERT, on_error=self.told.append)

    async def work(self) -> None:
        self.tries.append(asyncio.get_running_loop().time())
        if self.error is not None:
            raise self.error
        self.loop.succeeded()
        await self.loop.wait()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        self.loop.start()
        try:
            yield
        finally:
            await self.loop.close()

    async def until_tried(self, count: int) -> None:
        while len(self.tries) < count:
            await asyncio.sleep(0.001)

    @property
    def pauses(self) -> list[float]:
        return [after - before for before, after in zip(self.tries, self.tries[1:], strict=False)]


def run(test: Callable[[Lamps], Awaitable[None]]) -> None:
    async def limited() -> None:
        await asyncio.wait_for(test(Lamps()), 60)

    asyncio.run(limited())


def test_pauses_grow_to_the_longest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd_loop, "_FIRST_PAUSE_S", 0.1)

    async def test(lamps: Lamps) -> None:
        lamps.loop = SystemdLoop(lamps.alerts, lamps.work, alert=ALERT, longest_pause_s=0.3)
        async with lamps.running():
            while len(lamps.tries) < 5:
                lamps.loop.wake()  # a change, which is not a reason to try sooner
                await asyncio.sleep(0.001)
        assert [pause >= least for pause, least in zip(lamps.pauses, (0.1, 0.2, 0.3, 0.3), strict=True)] == [True] * 4

    run(test)


def test_success_brings_the_first_pause_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd_loop, "_FIRST_PAUSE_S", 0.001)

    async def test(lamps: Lamps) -> None:
        async with lamps.running():
            await lamps.until_tried(5)
            assert lamps.loop._pause_s > 0.01
            lamps.error = None
            while lamps.alerts["lamps"]:
                await asyncio.sleep(0.001)
            assert lamps.loop._pause_s == 0.001

    run(test)


def test_start_ends_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd_loop, "_FIRST_PAUSE_S", 3600.0)

    async def test(lamps: Lamps) -> None:
        async with lamps.running():
            await lamps.until_tried(1)
            lamps.error = None
            lamps.loop.start()
            await lamps.until_tried(2)

    run(test)


def test_error_is_an_alert_until_the_next_success(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(systemd_loop, "_FIRST_PAUSE_S", 0.001)
    caplog.set_level(logging.INFO)

    async def test(lamps: Lamps) -> None:
        async with lamps.running():
            await lamps.until_tried(3)
            assert lamps.alerts == {"lamps": "lamps are not lit: no bus"}
            lamps.error = None
            while lamps.alerts["lamps"]:
                await asyncio.sleep(0.001)
        assert set(lamps.told[:-1]) == {"lamps are not lit: no bus"}
        assert lamps.told[-1] == ""
        assert caplog.messages == ["lamps are not lit: no bus", "lamps are lit again"]

    run(test)


def test_defect_is_reported_and_does_not_end_the_loop(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(systemd_loop, "_FIRST_PAUSE_S", 0.001)

    async def test(lamps: Lamps) -> None:
        lamps.error = KeyError("k")
        async with lamps.running():
            await lamps.until_tried(3)
        assert lamps.alerts == {"lamps": "lamps are not lit: a defect of resctrlmond: KeyError('k')"}
        assert "lamps are not lit, because of a defect of resctrlmond: please report it" in caplog.messages

    run(test)


def test_change_ends_the_wait() -> None:
    async def test(lamps: Lamps) -> None:
        lamps.error = None
        async with lamps.running():
            await lamps.until_tried(1)
            lamps.loop.wake()
            await lamps.until_tried(2)

    run(test)


def test_retries_of_a_key_have_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(systemd_loop, "_FIRST_PAUSE_S", 1000.0)
    monkeypatch.setattr(systemd_loop, "_LONGEST_PAUSE_S", 3000.0)

    async def test(_lamps: Lamps) -> None:
        retries = Retries()
        assert (retries.is_due("a"), retries.seconds, retries.due) == (True, None, [])
        pauses = []
        for _ in range(4):
            retries.add("a")
            pauses.append(retries.seconds or 0.0)
        assert [round(pause, -3) for pause in pauses] == [1000, 2000, 3000, 3000]
        assert (retries.is_due("a"), retries.is_due("b"), "a" in retries) == (False, True, True)
        retries.keep(lambda key: key != "a")
        assert (retries.seconds, "a" in retries) == (None, False)

    run(test)
