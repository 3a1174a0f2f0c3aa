# SPDX-License-Identifier: Apache-2.0
"""A scrape of the exporter with many workloads, beside one call of ReadAll by the daemon's own client."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from resctrlmond.api.varlink.client import Client
from tests.bench.host import Host, resident
from tests.bench.measure import BYTES, MEBIBYTES, SECONDS, Row, interleaved
from tests.bench.rows import CLAIM, MANAGER, PAUSE_S, cpu_s
from tests.exporter.conftest import OPENMETRICS, Exporter, Reply


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
