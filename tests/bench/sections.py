# SPDX-License-Identifier: Apache-2.0
"""The parts of the benchmark, each on a host of its own, so that any of them can be measured alone."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from resctrlmond.client import Client
from tests.bench import busy, exporter, in_process, nri, rows, runtime
from tests.bench.host import Host, threaded
from tests.bench.measure import Row


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured: ``rounds`` of what takes a second, ``calls`` of what takes milliseconds, and sizes."""

    rounds: int
    calls: int
    groups: int
    burst: int
    cycles: int
    idle_s: float


WHOLE = Effort(rounds=5, calls=100, groups=500, burst=500, cycles=10_000, idle_s=60)
# Only shows that the rows end and have figures.
SAMPLE = Effort(rounds=1, calls=2, groups=3, burst=3, cycles=2, idle_s=0.1)


def _start(host: Host, effort: Effort) -> Iterator[Row]:
    yield from rows.starts(host, effort.rounds, 0, None, 28)


def _hook(host: Host, effort: Effort) -> Iterator[Row]:
    with host.daemon() as (daemon, _), Client(host.varlink) as client, threaded(1) as pid:
        yield from rows.hook(host, client, pid, effort.calls)
        yield from rows.costs(host, client, daemon, pid, effort.calls)


def _runtime(host: Host, effort: Effort) -> Iterator[Row]:
    with host.daemon(), Client(host.varlink) as client:
        yield from runtime.starts(host, client, effort.calls)


def _burst(host: Host, effort: Effort) -> Iterator[Row]:
    with host.daemon(), Client(host.varlink) as client:
        yield from rows.bursts(host, client, effort.rounds, effort.burst)


def _lives(host: Host, effort: Effort) -> Iterator[Row]:
    with host.daemon(), Client(host.varlink) as client, threaded(1) as pid:
        yield from rows.lives(host, client, pid, effort.calls)
        yield from rows.beside_goresctrl(host, client, pid, effort.calls)


def _verbs(host: Host, effort: Effort) -> Iterator[Row]:
    with threaded(1) as pid:
        yield from in_process.verbs(host, pid, effort.calls)


def _mounts(host: Host, effort: Effort) -> Iterator[Row]:
    with host.daemon() as (daemon, _), Client(host.varlink) as client, threaded(1) as pid:
        yield from rows.mounts(host, client, daemon, pid, effort.calls)


def _ctl(host: Host, effort: Effort) -> Iterator[Row]:
    with host.daemon():
        yield from rows.commands(host, effort.calls)


def _nri(host: Host, effort: Effort) -> Iterator[Row]:
    with host.daemon():
        yield from nri.starts(host, 2 * effort.calls)


def _groups(host: Host, effort: Effort) -> Iterator[Row]:
    with host.daemon() as (daemon, _), Client(host.varlink) as client, threaded(1) as pid:
        rows.fill(client, effort.groups)
        yield from rows.listing(host, client, effort.rounds)
        yield from rows.reading_all(host, client, daemon, pid, effort.rounds)
        yield from rows.idle(daemon, effort.groups, effort.idle_s)
    yield from rows.starts(host, effort.rounds, effort.groups, 0.4, 32)
    yield from rows.ground(host, effort.rounds)


def _busy(host: Host, effort: Effort) -> Iterator[Row]:
    with host.daemon() as (daemon, _), Client(host.varlink) as client:
        yield from busy.minutes(host, client, daemon, effort.groups, effort.idle_s)


def _exporter(host: Host, effort: Effort) -> Iterator[Row]:
    with host.daemon() as (daemon, _), Client(host.varlink) as client, threaded(1) as pid:
        rows.fill(client, effort.groups)
        yield from exporter.scrapes(host, client, daemon, pid, effort.rounds)


def _cycles(host: Host, effort: Effort) -> Iterator[Row]:
    with host.daemon() as (daemon, _), Client(host.varlink) as client, threaded(1) as pid:
        yield from rows.cycles(client, daemon, pid, effort.cycles)


SECTIONS: dict[str, Callable[[Host, Effort], Iterator[Row]]] = {
    "start": _start,
    "hook": _hook,
    "runtime": _runtime,
    "burst": _burst,
    "lives": _lives,
    "verbs": _verbs,
    "mounts": _mounts,
    "ctl": _ctl,
    "nri": _nri,
    "groups": _groups,
    "busy": _busy,
    "exporter": _exporter,
    "cycles": _cycles,
}


def measured(name: str, effort: Effort) -> Iterator[Row]:
    """Measure the rows of one section."""
    # Where records and snapshots are on a real host, in memory: /run is a tmpfs as well.
    with tempfile.TemporaryDirectory(prefix="resctrlmond-bench.", dir="/dev/shm") as folder:
        host = Host(Path(folder), is_constant=True)
        with host.running():
            yield from SECTIONS[name](host, effort)
