# SPDX-License-Identifier: Apache-2.0
"""A scrape of the exporter with many workloads, beside one call of ReadAll by the daemon's own client."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from resctrlmond.client import Client
from tests.bench.host import Host, resident
from tests.bench.measure import BYTES, MEBIBYTES, SECONDS, Row, interleaved
from tests.bench.rows import CLAIM, MANAGER, PAUSE_S, cpu_s
from tests.exporter.conftest import OPENMETRICS, Exporter, Reply
from tests.exporter.otlp_receiver import over_http
from tests.exporter.pushing import PushProcess
from tests.wait import wait_until


def scrapes(host: Host, client: Client, daemon: int, pid: int, rounds: int) -> Iterator[Row]:
    """Measure scrapes in OpenMetrics of all groups: time, CPU and bytes, and the delay of an Assign beside them."""
    with contextlib.closing(Exporter(host.folder, host.varlink)) as exporter:
        exporter.start()
        replies: list[Reply] = []
        of_exporter: list[float] = []
        of_daemon: list[float] = []

        def scrape() -> None:
            before = cpu_s(exporter.pid), cpu_s(daemon)
            replies.append(exporter.get(accept=OPENMETRICS))
            of_exporter.append(cpu_s(exporter.pid) - before[0])
            of_daemon.append(cpu_s(daemon) - before[1])
            assert b"resctrlmond_up 1.0" in replies[-1].body

        def read_all() -> None:
            parameters = {"withEnded": True, "domains": True}
            assert sum(len(page["usages"]) for page in client.stream(f"{MANAGER}ReadAll", parameters))

        # A pause, so that each call reads the counters again.
        ours, bare = interleaved(rounds, scrape, read_all, before=lambda: time.sleep(PAUSE_S))
        groups = replies[-1].body.count(b"resctrlmond_workload_info{")
        what = f"scrape of {groups} groups"
        yield Row(what, ours, "ReadAll", bare, SECONDS, fuse=True)
        yield Row(f"exporter's CPU time for a {what}", of_exporter[1:], "ReadAll", bare, SECONDS)
        yield Row(f"daemon's CPU time for a {what}", of_daemon[1:], "ReadAll", bare, SECONDS, fuse=True)
        packed = exporter.get(accept=OPENMETRICS, accept_encoding="gzip")
        sizes = [float(len(replies[-1].body))]
        yield Row(f"bytes of a {what}", sizes, "compressed", [float(len(packed.body))], BYTES)
        yield Row(
            "memory of the exporter",
            [float(resident(exporter.pid))],
            "the daemon",
            [float(resident(daemon))],
            MEBIBYTES,
        )

        def life() -> None:
            for verb, more in (("Create", {}), ("Assign", {"pid": pid}), ("Release", {})):
                client.call(MANAGER + verb, {"key": "beside", **CLAIM, **more})

        (alone,) = interleaved(rounds, life, times=5)
        is_over = threading.Event()

        def keep_scraping() -> None:
            while not is_over.is_set():
                exporter.get()

        with ThreadPoolExecutor(1) as thread:
            scraping = thread.submit(keep_scraping)
            (beside,) = interleaved(rounds, life, times=5)
            is_over.set()
            scraping.result()
        yield Row("Create, Assign, Release beside scrapes", beside, "alone", alone, SECONDS, fuse=True)
        yield from _pushes(host, rounds, groups, exporter, (bare, sizes))


def _pushes(
    host: Host, rounds: int, groups: int, exporter: Exporter, bare: tuple[list[float], list[float]]
) -> Iterator[Row]:
    """Measure pushes over HTTP: CPU time, beside ReadAll, bytes, beside a scrape, and memory, also while all fail."""
    of_reads, sizes = bare
    with (
        over_http() as (url, received),
        contextlib.closing(PushProcess(host.folder, host.varlink, url, "--interval", "2")) as pushing,
    ):
        pushing.start()
        pid = pushing.process.pid

        def has_pushed(number: int) -> bool:
            return len(received.all("resctrl.workload.llc_occupancy")) >= number * groups

        # The first push loads libraries.
        wait_until(lambda: has_pushed(1))
        used, first = [cpu_s(pid)], received.requests
        for number in range(2, rounds + 2):
            # Until the next one has been received, not for a time in which more than one can be.
            wait_until(lambda number=number: has_pushed(number))  # type: ignore[misc]
            used.append(cpu_s(pid))
        what = f"push of {groups} groups"
        spent = [after - before for before, after in itertools.pairwise(used)]
        yield Row(f"exporter's CPU time for a {what}", spent, "ReadAll", of_reads[:rounds], SECONDS)
        last = received.requests
        with received.guard:
            lengths = [int(headers["content-length"]) for headers in received.headers[first:last]]
        yield Row(f"bytes of a {what}", [sum(lengths) / rounds], "a scrape", sizes, BYTES)
        serves = [float(resident(exporter.pid))]
        yield Row("memory of the exporter that pushes", [float(resident(pid))], "that serves", serves, MEBIBYTES)
        received.accepts = lambda: False
        refused = received.requests
        wait_until(lambda: received.requests > refused + 1)
        yield Row("the same, refused", [float(resident(pid))], "that serves", serves, MEBIBYTES)
