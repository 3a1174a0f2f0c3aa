# SPDX-License-Identifier: Apache-2.0
"""The daemon searches for writes of other programs as soon as inotify reports them, in one search at a time."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from resctrlmond.api.workers import Workers
from resctrlmond.daemon.reaction import Reaction
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.resctrl.inotify import IN_MODIFY, Inotify
from tests.daemon.conftest import Machine
from tests.sim.conftest import Puppet


@contextlib.asynccontextmanager
async def reacting(react: Callable[[], float], fd: int, rest_s: float = 0.0) -> AsyncIterator[Reaction]:
    """Yield a started reaction."""
    workers = Workers()
    reaction = Reaction(workers, react, lambda: rest_s, fd)
    try:
        yield reaction
    finally:
        reaction.close()
        workers.close()


def test_reaction_is_called_for_each_write_and_after_the_pause_that_it_returns(tmp_path: Path) -> None:
    file = tmp_path / "tasks"
    file.write_text("")
    with contextlib.closing(Inotify()) as inotify:
        inotify.add(str(tmp_path), IN_MODIFY)
        calls: list[int] = []
        pauses = [0.01, 0.0, 0.0]

        def react() -> float:
            calls.append(len(inotify.read()))
            if len(calls) == 3:
                raise ResctrlError("no resctrl")
            return pauses.pop(0)

        async def run() -> None:
            async with reacting(react, inotify.fd):
                file.write_text("1")
                while len(calls) < 2:
                    await asyncio.sleep(0.001)
                assert calls == [1, 0], "a call for the write, and a call after the returned pause"
                # Further writes cause calls also after an error.
                for number in (3, 4):
                    file.write_text("2")
                    while len(calls) < number:
                        await asyncio.sleep(0.001)

        pauses += [0.0] * 10
        asyncio.run(asyncio.wait_for(run(), 60))


def test_reaction_is_not_called_for_events_that_a_verb_has_read_meanwhile(tmp_path: Path) -> None:
    """Each Assign would start a second thread for its own writes, which competes with it for Python's lock."""

    async def run() -> None:
        calls: list[int] = []
        with contextlib.closing(Inotify()) as inotify:
            inotify.add(str(tmp_path), IN_MODIFY)

            def react() -> float:
                calls.append(len(inotify.read()))
                return 0

            async with reacting(react, inotify.fd):
                (tmp_path / "own").write_text("1")
                await asyncio.sleep(0)  # the reaction begins
                assert inotify.read()
                await asyncio.sleep(0.05)
                (tmp_path / "foreign").write_text("1")
                while not calls:
                    await asyncio.sleep(0.001)
                assert all(calls), calls

    asyncio.run(asyncio.wait_for(run(), 60))


def test_reaction_is_called_after_wake() -> None:
    async def run() -> None:
        called = asyncio.Event()
        loop = asyncio.get_running_loop()

        def react() -> float:
            loop.call_soon_threadsafe(called.set)
            return 0

        with contextlib.closing(Inotify()) as inotify:
            async with reacting(react, inotify.fd) as reaction:
                await asyncio.to_thread(reaction.wake)
                await called.wait()

    asyncio.run(asyncio.wait_for(run(), 60))


def test_reaction_is_not_called_for_writes_during_the_rest(tmp_path: Path) -> None:
    """A program that writes to schemata in a loop would keep a CPU of the daemon busy."""

    async def run() -> None:
        calls: list[int] = []
        with contextlib.closing(Inotify()) as inotify:
            inotify.add(str(tmp_path), IN_MODIFY)

            def react() -> float:
                calls.append(len(inotify.read()))
                return 0

            async with reacting(react, inotify.fd, rest_s=3600.0):
                for _ in range(20):
                    (tmp_path / "schemata").write_text("1")
                    while not calls:
                        await asyncio.sleep(0.001)
                    await asyncio.sleep(0.005)
                assert len(calls) == 1

    asyncio.run(asyncio.wait_for(run(), 60))


def test_descriptor_can_be_added_later(tmp_path: Path) -> None:
    """At the start of the daemon, the host may have no free inotify instance."""

    async def run() -> None:
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

    asyncio.run(asyncio.wait_for(run(), 60))


def test_reaction_is_called_for_later_writes_if_epoll_once_refuses_the_descriptor(tmp_path: Path) -> None:
    """epoll_ctl fails with ENOSPC at the limit of the user's watches (epoll(7), max_user_watches)."""

    async def run() -> None:
        loop = asyncio.get_running_loop()
        calls: list[int] = []
        with contextlib.closing(Inotify()) as inotify:
            inotify.add(str(tmp_path), IN_MODIFY)

            def react() -> float:
                calls.append(len(inotify.read()))
                return 0

            async with reacting(react, inotify.fd):
                (tmp_path / "tasks").write_text("1")
                with pytest.MonkeyPatch.context() as patch:
                    refused = asyncio.Event()

                    def refuse(*_: object) -> None:
                        refused.set()
                        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

                    patch.setattr(loop, "add_reader", refuse)
                    await refused.wait()
                (tmp_path / "tasks").write_text("2")
                while len(calls) < 2:
                    await asyncio.sleep(0.001)

    asyncio.run(asyncio.wait_for(run(), 60))


def test_command_is_late_if_another_program_moves_its_child_to_a_class(machine: Machine) -> None:
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
        assert all("tasks were moved out of the group" in total["reason"] for total in totals)
