# SPDX-License-Identifier: Apache-2.0
"""The churn keeps the last values that were pushed, and reports a counter that falls."""

from __future__ import annotations

import time
from collections.abc import Mapping

from resctrlmond.exporter.metrics import EVENT_METRICS
from resctrlmond.exporter.otlp.ledger import Temporality
from resctrlmond.exporter.otlp.points import Part, Point, name_of, of_workload
from resctrlmond.exporter.otlp.sender import Protocol, Sender
from tests.exporter.otlp_receiver import over_http
from tests.exporter.pushed import Pushed

_ENERGY, _TRAFFIC = EVENT_METRICS["core_energy"], EVENT_METRICS["mbm_total_bytes"]
_START_NS = 5


def host(value: float, **labels: str) -> Part:
    """Return a sum of names, and the number of ends."""
    assert _TRAFFIC.accounted
    attributes = {f"resctrl.{of}": text for of, text in labels.items()}
    point = Point(name_of(_TRAFFIC.accounted), attributes, _START_NS, time.time_ns(), value)
    return Part({}, [point])


def workload(energy: float, traffic: int) -> Part:
    resource: Mapping[str, str | int] = {"resctrl.workload.key": "k", "resctrl.workload.generation": 1}
    now_ns = time.time_ns()
    return Part(
        resource,
        [
            Point(of_workload(_ENERGY), {}, _START_NS, now_ns, energy),
            Point(of_workload(_TRAFFIC), {"resctrl.scope": "total"}, _START_NS, now_ns, traffic),
        ],
    )


def test_last_values_are_kept_and_a_fall_is_reported() -> None:
    of_shop = {"by": "namespace", "name": "shop", "scope": "total"}
    with over_http() as (url, received):
        pushed, sender = Pushed(received), Sender(url, Protocol.HTTP, Temporality.CUMULATIVE)
        for energy, traffic in ((0.5, 64), (1.5, 128)):
            parts = [host(traffic, **of_shop), host(9, by="user", name="0", scope="total"), workload(energy, traffic)]
            assert sender.send(parts) is None
        assert pushed.sums() == {
            ("resctrlmond_accounted_memory_bandwidth_bytes_total", frozenset(of_shop.items())): 128.0
        }
        assert pushed.used("k") == {"core_energy": 1.5, "mbm_total_bytes": 128}
        assert pushed.used("other") == {}
        assert (pushed.number, pushed.faults) == (8, [])
        assert sender.send([workload(1.25, 128)]) is None
        (fault,) = pushed.faults
        assert "resctrl.workload.core_energy of 'k'" in fault
        assert "fell from 1.5 to 1.25" in fault
