# SPDX-License-Identifier: Apache-2.0
"""Offer what workloads use as io.systemd.Metrics, the interface that systemd-report(1) reads (systemd 260).

It has a family for each event of the kernel, and in it a metric for each workload that has a number: the sum over all
domains, because systemd-report reads 1024 metrics of all its sources together.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from decimal import Decimal
from functools import partial
from typing import Any, NoReturn

import msgspec

from resctrlmond.api import types
from resctrlmond.api.access import Access, Caller
from resctrlmond.api.monotone import Monotone
from resctrlmond.api.service import Service
from resctrlmond.api.varlink.frames import VarlinkError
from resctrlmond.api.varlink.messages import EXPECTED_MORE
from resctrlmond.api.varlink.methods import Interface, Method
from resctrlmond.api.verbs import VERBS
from resctrlmond.resctrl.counters import EVENTS, Event
from resctrlmond.resctrl.kinds import Kind
from resctrlmond.workloads.model.states import Quality

NAME = "io.systemd.Metrics"
# systemd-report ignores metrics whose names do not begin with the name of the socket.
SOURCE = "org.resctrlmon.Workload"

_NO_SUCH_METRIC = f"{NAME}.NoSuchMetric"
_READ_ALL = VERBS["ReadAll"]
_TYPES = {Kind.GAUGE: "gauge", Kind.CUMULATIVE: "counter"}
# The workloads of a page after which other work of the event loop runs: each of their metrics is a message.
_TURN = 8

# The comments are our own; the names and types are those of systemd.
_DESCRIPTION = f"""\
# Metrics of one service, in the form that systemd-report reads.
interface {NAME}

# The type of a metric family: a value that only rises, a value that also falls, or a text.
type MetricFamilyType (counter, gauge, string)

# List the metrics, one in each reply. Requires "more". Here, the object is the key of a workload, and the field
# "quality" of a counter is how far its value can be trusted: exact, late or estimated. A metric without a number is
# left out.
method List() -> (name: string, value: object, object: ?string, fields: ?[string]object)

# List the metric families, one in each reply. Requires "more".
method Describe() -> (name: string, description: string, type: MetricFamilyType)

# There is no metric.
error NoSuchMetric ()
"""


class Family(msgspec.Struct, frozen=True):
    """A metric family, as a reply of Describe."""

    name: str
    description: str
    type: str


class Metric(msgspec.Struct, frozen=True, omit_defaults=True):
    """A metric, as a reply of List. ``value`` is a number with all its digits; ``object`` the key of the workload."""

    name: str
    value: msgspec.Raw
    object: str
    fields: dict[str, str] = {}


def _family(event: Event) -> Family:
    words = "".join(map(str.capitalize, event.name.split("_")))
    unit = event.unit.capitalize()
    name = words if words.endswith(unit) else words + unit
    since = "" if event.kind is Kind.GAUGE else " since its baseline,"
    in_unit = f", in {event.unit}" if event.unit else ""
    return Family(
        f"{SOURCE}.{name}", f"Of a workload{since} over all domains: {event.meaning}{in_unit}.", _TYPES[event.kind]
    )


FAMILIES = {name: _family(event) for name, event in EVENTS.items() if event.kind in _TYPES}


def interface(service: Service) -> Interface:
    """Return the interface, which only readers may call."""
    metrics = _Metrics(service)

    def method(name: str, stream: Any, reply_bytes: int) -> Method[Any]:
        check = partial(service.policy.check, access=Access.READ, verb=f"{NAME}.{name}")
        return Method(types.NoParameters, _expect_more, stream, check=check, reply_bytes=reply_bytes)

    methods = {
        "List": method("List", metrics.list, _READ_ALL.reply_bytes),
        "Describe": method("Describe", _describe, 0),
    }
    return Interface(NAME, _DESCRIPTION, methods)


async def _expect_more(_parameters: types.NoParameters, _caller: Caller) -> NoReturn:
    raise VarlinkError(EXPECTED_MORE)


async def _describe(_parameters: types.NoParameters, _caller: Caller) -> AsyncGenerator[Family, None]:
    # Other connections have their turn between the calls of this one, which may have sent many.
    await asyncio.sleep(0)
    for family in FAMILIES.values():
        yield family


class _Metrics:
    """The metrics of the workloads that are not over. Belongs to the event loop."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._last = Monotone[Decimal]()

    async def list(self, _parameters: types.NoParameters, caller: Caller) -> AsyncGenerator[Metric, None]:
        """Yield the metrics, from a reading of the counters that all callers share, as ReadAll does."""
        is_empty = True
        # At the start: a client that never reads to the end must not let the daemon grow.
        find = self._service.manager.context.store.get
        self._last.forget_unless(lambda series: find(series[1][0]) is not None)
        async with contextlib.aclosing(self._service.stream(_READ_ALL, types.ReadAllRequest(), caller)) as pages:
            async for page in pages:
                assert isinstance(page, types.ReadAllReply)
                for number, usage in enumerate(page.usages):
                    for metric in self._of(usage):
                        is_empty = False
                        yield metric
                    if number % _TURN == _TURN - 1:
                        await asyncio.sleep(0)
        if is_empty:
            raise VarlinkError(_NO_SUCH_METRIC)

    def _of(self, usage: types.Usage) -> Iterator[Metric]:
        key, started = usage.workload.key, usage.workload.created_at or ""
        for level in usage.levels:
            family = FAMILIES.get(level.event)
            if family is not None and level.value is not None:
                yield Metric(family.name, _number(Decimal(level.value)), key)
        for total in usage.totals:
            family = FAMILIES.get(total.event)
            if family is None or total.value is None or total.quality is Quality.UNKNOWN:
                continue
            value, is_held = self._last.next((family.name, (key,)), started, Decimal(total.value))
            quality = Quality.ESTIMATED if is_held and total.quality is Quality.EXACT else total.quality
            yield Metric(family.name, _number(value), key, {"quality": quality})


def _number(value: Decimal) -> msgspec.Raw:
    """Return the number as JSON, which has no exponent then."""
    return msgspec.Raw(f"{value:f}".encode())
