# SPDX-License-Identifier: Apache-2.0
"""io.systemd.Metrics: the numbers of ReadAll by workload, as systemd-report reads them."""

from __future__ import annotations

import asyncio
import json
import os
import re
import subprocess
from collections.abc import AsyncGenerator, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from resctrlmond.api import types
from resctrlmond.api.access import Caller, Policy
from resctrlmond.api.service import Service
from resctrlmond.api.varlink import metrics
from resctrlmond.client import Client, VarlinkError
from resctrlmond.resctrl.counters import EVENTS
from resctrlmond.resctrl.errors import PermissionDenied
from resctrlmond.resctrl.kinds import Kind
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.states import Quality, State
from tests.api.test_long_replies import _ServerThread
from tests.wait import wait_until

LIST, DESCRIBE = "io.systemd.Metrics.List", "io.systemd.Metrics.Describe"
ROOT = Caller(0, frozenset({0}), 1)


@pytest.fixture
def client(manager: Manager, tmp_path: Path) -> Iterator[Client]:
    server = _ServerThread(manager, str(tmp_path / "varlink"))
    with Client(server.path) as client:
        yield client
    server.close()


def test_list_has_the_numbers_of_read_all(client: Client, manager: Manager, process: subprocess.Popen[bytes]) -> None:
    client.call("org.resctrlmon.Manager.Assign", {"key": "web", "pid": process.pid})
    listed = list(client.stream(LIST))
    (page,) = client.stream("org.resctrlmon.Manager.ReadAll", reply=types.ReadAllReply)
    (usage,) = page.usages
    families = {event: family.name for event, family in metrics.FAMILIES.items()}
    expected: list[dict[str, Any]] = [
        {"name": families[level.event], "value": json.loads(level.value or ""), "object": "web"}
        for level in usage.levels
    ]
    expected += [
        {
            "name": families[total.event],
            "value": json.loads(total.value),
            "object": "web",
            "fields": {"quality": total.quality},
        }
        for total in usage.totals
        if total.value is not None
    ]
    names = [metric["name"] for metric in listed]
    assert names == [metric["name"] for metric in expected]
    assert {"org.resctrlmon.Workload.LlcOccupancyBytes", "org.resctrlmon.Workload.CoreEnergyJoules"} <= set(names)
    # A sleeping process uses nothing, and its data in the cache may be displaced.
    assert [one | {"value": 0} for one in listed] == [one | {"value": 0} for one in expected]
    assert [one["value"] for one in listed[1:]] == [one["value"] for one in expected[1:]]
    client.call("org.resctrlmon.Manager.Release", {"key": "web"})


def test_describe_has_a_family_for_each_event(client: Client) -> None:
    families = list(client.stream(DESCRIBE))
    assert len(families) == len(EVENTS)
    for family, event in zip(families, EVENTS.values(), strict=True):
        assert family["type"] == ("gauge" if event.kind is Kind.GAUGE else "counter")
        assert event.meaning in family["description"]
    names = [family["name"] for family in families]
    assert len(set(names)) == len(names)
    # systemd-report checks both: varlink_idl_field_name_is_valid(), and the name of the socket before it.
    assert all(re.fullmatch(r"org\.resctrlmon\.Workload\.[A-Za-z](_?[A-Za-z0-9])*", name) for name in names)
    assert "org.resctrlmon.Workload.UnhaltedCoreCycles" in names


def test_machine_without_workloads_has_no_such_metric(client: Client) -> None:
    errors: list[str] = []

    def has_failed() -> bool:
        try:
            list(client.stream(LIST))
        except VarlinkError as error:
            errors.append(error.name)
        return bool(errors)

    wait_until(has_failed)  # a reading of the counters is shared for half a second
    assert errors == ["io.systemd.Metrics.NoSuchMetric"]


@pytest.mark.parametrize("method", [LIST, DESCRIBE])
def test_call_without_more_is_refused(client: Client, method: str) -> None:
    with pytest.raises(VarlinkError) as caught:
        client.call(method)
    assert caught.value.name == "org.varlink.service.ExpectedMore"


class _Reported:
    """The part of a Service that the methods use: pages of usages."""

    def __init__(self, *usages: types.Usage) -> None:
        self.usages = list(usages)
        self.policy = Policy(4242)
        self.manager = self.context = self.store = self

    def get(self, key: str) -> types.Workload | None:
        return next((usage.workload for usage in self.usages if usage.workload.key == key), None)

    async def stream(self, *_arguments: object) -> AsyncGenerator[types.ReadAllReply, None]:
        yield types.ReadAllReply(usages=self.usages)


def usage(value: str | None, quality: Quality, created_at: str = "2026-11-25T19:00:00Z") -> types.Usage:
    workload = types.Workload(
        key="web",
        class_="",
        state=State.ACTIVE,
        generation=1,
        created_at=created_at,
        baseline=Quality.EXACT,
        attributes={},
        claims=(),
        members=(),
    )
    total = types.Total(event="core_energy", unit="joules", value=value, quality=quality)
    level = types.Level(event="llc_occupancy", unit="bytes", value=None)
    return types.Usage(workload=workload, totals=[total], levels=[level])


def listed(reported: _Reported, interface: Any) -> list[tuple[str, str]]:
    async def collect() -> list[tuple[str, str]]:
        stream = interface.methods["List"].stream
        found = stream(types.NoParameters(), ROOT)
        return [(bytes(metric.value).decode(), metric.fields.get("quality", "")) async for metric in found]

    return asyncio.run(collect())


def test_counter_never_falls_within_a_run() -> None:
    reported = _Reported(usage("7.000000001", Quality.EXACT))
    interface = metrics.interface(cast(Service, reported))
    assert listed(reported, interface) == [("7.000000001", "exact")]
    reported.usages = [usage("6.5", Quality.EXACT)]
    assert listed(reported, interface) == [("7.000000001", "estimated")]
    reported.usages = [usage("1", Quality.LATE, "2026-11-25T20:00:00Z")]
    assert listed(reported, interface) == [("1", "late")]


def test_ended_workloads_are_forgotten_although_no_list_is_read_to_the_end() -> None:
    """A client that closes its connection early, again and again, must not let the daemon grow."""
    reported = _Reported()
    stream: Any = metrics.interface(cast(Service, reported)).methods["List"].stream

    async def interrupt() -> None:
        for number in range(9):
            of = usage("1", Quality.EXACT)
            reported.usages = [
                msgspec.structs.replace(of, workload=msgspec.structs.replace(of.workload, key=f"k{number}"))
            ]
            pages = stream(types.NoParameters(), ROOT)
            await anext(pages)
            await pages.aclose()

    asyncio.run(interrupt())
    assert len(stream.__self__._last._last) == 1


@pytest.mark.parametrize(("value", "quality"), [(None, Quality.UNKNOWN), (None, Quality.LATE)])
def test_figure_without_a_number_is_left_out_and_not_0(value: str | None, quality: Quality) -> None:
    reported = _Reported(usage(value, quality))
    with pytest.raises(VarlinkError, match=r"NoSuchMetric"):
        listed(reported, metrics.interface(cast(Service, reported)))


def test_number_has_all_its_digits_and_no_exponent() -> None:
    text = "18446744073709551615.123456789"
    reported = _Reported(usage(text, Quality.EXACT), usage("0.0000001", Quality.EXACT, "2026-11-25T20:00:00Z"))
    found = [value for value, _ in listed(reported, metrics.interface(cast(Service, reported)))]
    assert found == [text, "0.0000001"]
    assert json.loads(found[1], parse_float=Decimal) == Decimal("1e-7")


@pytest.mark.parametrize("method", ["List", "Describe"])
def test_only_readers_may_call(method: str) -> None:
    interface = metrics.interface(cast(Service, _Reported()))
    check = interface.methods[method].check
    assert check is not None
    check(ROOT)
    check(Caller(1000, frozenset({4242}), 1))
    if os.geteuid() != 1000:
        with pytest.raises(PermissionDenied):
            check(Caller(1000, frozenset({1000}), 1))
