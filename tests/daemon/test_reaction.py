# SPDX-License-Identifier: Apache-2.0
"""Writes of other programs to resctrl are looked for as soon as inotify reports them, and never twice at once."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

from resctrlmond.api.workers import Workers
from resctrlmond.daemon.reaction import Reaction
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.inotify import IN_MODIFY, Inotify
from tests.daemon.conftest import Machine
from tests.sim.conftest import Puppet


@contextlib.asynccontextmanager
async def reacting(react: Callable[[], float], fd: int, rest_s: float = 0.0) -> AsyncIterator[Reaction]:
    workers = Workers()
    reaction = Reaction(workers, react, lambda: rest_s, fd)
    try:
        yield reaction
    finally:
        reaction.close()
        workers.close()


def test_each_write_is_reacted_to_and_a_pause_is_kept(tmp_path: Path) -> None:
    file = tmp_path / "tasks"
    file.write_text("")
    with contextlib.closing(Inotify()) as inotify:
        inotify.add(str(tmp_path), IN_MODIFY)
        seen: list[int] = []
        answers = [0.01, 0.0, 0.0]

        def react() -> float:
            seen.append(len(inotify.read()))
            if len(seen) == 3:
                raise ResctrlError("no resctrl")
            return answers.pop(0)

        async def scene() -> None:
            async with reacting(react, inotify.fd):
                file.write_text("1")
                while len(seen) < 2:
                    await asyncio.sleep(0.001)
                assert seen == [1, 0], "once for the write, and once more because it was asked for"
                # After a failure it goes on.
                for number in (3, 4):
                    file.write_text("2")
                    while len(seen) < number:
                        await asyncio.sleep(0.001)

        answers += [0.0] * 10
        asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_workload_is_reacted_for_when_it_asks() -> None:
    async def scene() -> None:
        called = asyncio.Event()
        loop = asyncio.get_running_loop()

        def react() -> float:
            loop.call_soon_threadsafe(called.set)
            return 0

        with contextlib.closing(Inotify()) as inotify:
            async with reacting(react, inotify.fd) as reaction:
                await asyncio.to_thread(reaction.wake)
                await called.wait()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_writes_during_the_rest_are_not_reacted_to(tmp_path: Path) -> None:
    """A program that writes to schemata all the time would cost a processor."""

    async def scene() -> None:
        seen: list[int] = []
        with contextlib.closing(Inotify()) as inotify:
            inotify.add(str(tmp_path), IN_MODIFY)

            def react() -> float:
                seen.append(len(inotify.read()))
                return 0

            async with reacting(react, inotify.fd, rest_s=3600.0):
                for _ in range(20):
                    (tmp_path / "schemata").write_text("1")
                    while not seen:
                        await asyncio.sleep(0.001)
                    await asyncio.sleep(0.005)
                assert len(seen) == 1

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_a_descriptor_that_comes_later_is_waited_for(tmp_path: Path) -> None:
    """The host had no inotify instance left at the start."""

    async def scene() -> None:
        called = asyncio.Event()
        loop = asyncio.get_running_loop()
        with contextlib.closing(Inotify()) as inotify:
            inotify.add(str(tmp_path), IN_MODIFY)

            def react() -> float:
                if inotify.read():
                    loop.call_soon_threadsafe(called.set)
                return 0

            async with reacting(react, -1) as reaction:
                reaction.wait_for(inotify.fd)
                (tmp_path / "tasks").write_text("1")
                await called.wait()

    asyncio.run(asyncio.wait_for(scene(), 60))


def test_the_daemon_marks_a_command_whose_child_is_moved_to_a_class(machine: Machine) -> None:
    with contextlib.closing(Puppet()) as puppet:
        machine.start()
        machine.call("Assign", key="k", pid=puppet.pid, claim="me", late=False)
        assert machine.group("k")["baseline"] == "exact"
        class_ = machine.top / "resctrl" / "gold"
        os.mkdir(class_)
        (class_ / "tasks").write_text(puppet.do("fork"))
        while machine.group("k")["baseline"] == "exact":
            pass
        totals = machine.call("Release", key="k", claim="me")["totals"]
        assert {total["quality"] for total in totals} == {"late"}
        assert all("another program moved tasks out of the group" in total["reason"] for total in totals)
