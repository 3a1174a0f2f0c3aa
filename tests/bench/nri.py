# SPDX-License-Identifier: Apache-2.0
"""The delay of a container's start by the NRI adapter: a scripted runtime waits for it, and for a no-op plugin."""

from __future__ import annotations

import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass

from resctrlmond.nri import nri_pb2
from resctrlmond.nri.messages import Event
from tests.bench.host import Host
from tests.bench.measure import SECONDS, Row, interleaved
from tests.nri.runtime import Plugin, Runtime

_SERIAL = itertools.count(1)


@dataclass
class Started:
    """A pod with a process that is to be its container's."""

    pod: nri_pb2.PodSandbox
    container: nri_pb2.Container
    process: subprocess.Popen[bytes]


@contextlib.contextmanager
def plugin(host: Host, name: str, *command: str) -> Iterator[Plugin]:
    """A plugin that runs and has registered."""
    socket = str(host.folder / f"{name}.sock")
    runtime = Runtime(socket)
    with contextlib.closing(runtime):
        process = subprocess.Popen([sys.executable, "-m", *(word.format(socket=socket) for word in command)])
        try:
            with runtime.accept() as connected:
                connected.greet()
                yield connected
        finally:
            process.terminate()
            process.wait()


def begin() -> Started:
    """A process, and the names of a pod and a container for it."""
    number = next(_SERIAL)
    pod = nri_pb2.PodSandbox(
        id=f"{number:064x}", uid=f"{number:08x}-0000-4000-8000-000000000000", name="bench", namespace="bench"
    )
    process = subprocess.Popen(["sleep", "600"], start_new_session=True)
    container = nri_pb2.Container(id=f"c{number:063x}", pod_sandbox_id=pod.id, state=1, pid=process.pid)
    return Started(pod, container, process)


class Starts:
    """Report starts of containers to one plugin, each in a separate pod, which is removed before the next start."""

    def __init__(self, to: Plugin) -> None:
        self._to = to
        self._started: Started | None = None

    def renew(self) -> None:
        """End what was started, and run the next pod."""
        self.end()
        self._started = begin()
        self._to.send_event(Event.RUN_POD_SANDBOX, self._started.pod)

    def start(self) -> None:
        """Measure one start: the runtime sends the event and waits for the response."""
        assert self._started is not None
        self._to.send_event(Event.START_CONTAINER, self._started.pod, self._started.container)

    def end(self) -> None:
        """End what was started."""
        if self._started is not None:
            self._started.process.kill()
            self._started.process.wait()
            self._to.send_event(Event.REMOVE_POD_SANDBOX, self._started.pod)
            self._started = None


def starts(host: Host, count: int) -> Iterator[Row]:
    """StartContainer with the adapter and with a no-op plugin, in turns."""
    ours = ("resctrlmond.nri", "--socket", "{socket}", "--manager-socket", host.varlink, "--log-level", "warning")
    with plugin(host, "ours", *ours) as adapter, plugin(host, "noop", "tests.bench.noop", "{socket}") as noop:
        both = [Starts(adapter), Starts(noop)]
        turn = itertools.cycle(both)
        taken, bare = interleaved(count, both[0].start, both[1].start, before=lambda: next(turn).renew())
        for one in both:
            one.end()
    yield Row("NRI StartContainer", taken, "a no-op plugin in Python", bare, SECONDS, fuse=True)
