# SPDX-License-Identifier: Apache-2.0
"""Work of the loop that a call in a thread asks for does not delay the result of that call."""

from __future__ import annotations

import asyncio
import contextlib
import threading

from resctrlmond.api.workers import Lane, Workers


def test_loop_is_called_later_than_the_caller_has_the_result() -> None:
    """The reply to a container runtime waited until its container was watched."""
    order: list[str] = []

    async def run() -> None:
        with contextlib.closing(Workers()) as workers:
            loop = asyncio.get_running_loop()

            def work() -> str:
                workers.call_later(loop, order.append, "key")
                return "result"

            order.append(await workers.run(Lane.HOOKS, work))
            while len(order) < 2:
                await asyncio.sleep(0)

    asyncio.run(run())
    assert order == ["result", "key"]


def test_call_that_changes_many_workloads_or_hangs_after_its_caller_has_left_does_not_keep_the_others() -> None:
    seen: list[str] = []

    async def run() -> None:
        with contextlib.closing(Workers()) as workers:
            loop = asyncio.get_running_loop()
            go_on, has_begun = threading.Event(), threading.Event()

            def work(key: str) -> None:
                has_begun.set()
                if key == "left":
                    go_on.wait(60)
                workers.call_later(loop, seen.append, key)
                go_on.wait(60)

            tick = asyncio.ensure_future(workers.run(Lane.UPKEEP, work, "ticked"))
            while seen != ["ticked"]:
                await asyncio.sleep(0.001)
            has_begun.clear()
            verb = asyncio.ensure_future(workers.run(Lane.CHANGE, work, "left"))
            while not has_begun.is_set():
                await asyncio.sleep(0.001)
            verb.cancel()
            await asyncio.wait([verb])
            go_on.set()
            await tick
            while seen != ["ticked", "left"]:
                await asyncio.sleep(0.001)

    asyncio.run(run())


def test_calls_that_come_at_once_wait_for_a_free_thread() -> None:
    """They must not keep the loop: of 300 services that end at once, for longer than the watchdog waits."""
    done: list[int] = []

    async def run() -> None:
        with contextlib.closing(Workers()) as workers:
            go_on = threading.Event()

            def work(number: int) -> None:
                go_on.wait(60)
                done.append(number)

            calls = [asyncio.ensure_future(workers.run_in_turn(Lane.ENDS, work, number)) for number in range(50)]
            try:
                for _ in range(10):
                    await asyncio.sleep(0)
                assert len(workers._running) == Lane.ENDS.value[1]
                calls[-1].cancel()
            finally:
                go_on.set()
            await asyncio.gather(*calls, return_exceptions=True)

    asyncio.run(run())
    assert sorted(done) == list(range(49))
