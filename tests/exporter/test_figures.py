# SPDX-License-Identifier: Apache-2.0
"""The exported figures are those of the daemon: zero-based, with their starts and ends, and marked if not exact."""

from __future__ import annotations

import contextlib
import datetime
import signal
import subprocess
from collections.abc import Callable, Iterable
from decimal import Decimal
from pathlib import Path
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client import Metric as Family
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from resctrlmond.client import VarlinkError
from resctrlmond.exporter.families import MAX_LABEL, Families
from resctrlmond.exporter.metrics import EVENT_METRICS
from resctrlmond.exporter.source import VERBS
from resctrlmond.resctrl.counters import EVENTS
from resctrlmond.resctrl.kinds import Kind
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.workloads.model.states import Quality, worst
from tests.exporter.conftest import Exporter, Exposition, Machine, StartProcess, machine_of
from tests.wait import wait_until

NAMES = {
    "llc_occupancy": ("llc_occupancy_bytes", {}),
    "mbm_total_bytes": ("memory_bandwidth_bytes_total", {"scope": "total"}),
    "mbm_local_bytes": ("memory_bandwidth_bytes_total", {"scope": "local"}),
    "core_energy": ("core_energy_joules_total", {}),
    "activity": ("core_activity_farads_total", {}),
    "unhalted_core_cycles": ("core_cycles_total", {"clock": "core"}),
    "unhalted_ref_cycles": ("core_cycles_total", {"clock": "reference"}),
    "uops_retired": ("uops_retired_total", {}),
    "stalls_llc_hit": ("llc_stall_cycles_total", {"served": "hit"}),
    "stalls_llc_miss": ("llc_stall_cycles_total", {"served": "miss"}),
    "c1_res": ("core_idle_cycles_total", {"state": "c1"}),
    "c6_res": ("core_idle_cycles_total", {"state": "c6"}),
}
DOMAINS = {"mon_L3_00": "0", "mon_L3_01": "1", "mon_PERF_PKG_00": "0", "mon_PERF_PKG_01": "1"}
DEFAULT = {"llc_occupancy", "mbm_total_bytes", "mbm_local_bytes", "core_energy", "activity"}


def run_for(machine: Machine, key: str, loops: int = 100_000, namespace: str = "") -> dict[str, Any]:
    """Run a process in a workload, and return the reply of Release. Its totals are exact."""
    attributes = {"pod.namespace": namespace} if namespace else {}
    machine.call("Create", key=key, claim="me", attributes=attributes)
    script = f"read go; i=0; while [ $i -lt {loops} ]; do i=$((i+1)); done"
    with subprocess.Popen(["sh", "-c", script], stdin=subprocess.PIPE) as child:
        machine.call("Assign", key=key, pid=child.pid, late=False, claim="me")
        child.communicate(b"\n")
    return machine.call("Release", key=key, claim="me")


def marks(scraped: Exposition, key: str) -> set[tuple[str, str]]:
    return {(of["event"], of["quality"]) for of in scraped.having("workload_inexact", key=key)}


def not_exact(found: dict[str, Any]) -> set[tuple[str, str]]:
    return {
        (total["event"], total["quality"])
        for total in found["totals"]
        if total["quality"] != "exact" and total["event"] in DEFAULT
    }


def scrape_until(exporter: Exporter, condition: Callable[[Exposition], bool]) -> Exposition:
    """Scrape until the condition holds: all scrapes within half a second get the same readings of the daemon."""
    scraped = exporter.scrape()

    def holds() -> bool:
        nonlocal scraped
        scraped = exporter.scrape()
        return condition(scraped)

    wait_until(holds)
    return scraped


def epoch(time: str) -> float:
    return datetime.datetime.fromisoformat(time).timestamp()


def test_each_event_has_a_metric() -> None:
    assert EVENT_METRICS.keys() == EVENTS.keys() == NAMES.keys()
    for event, row in EVENT_METRICS.items():
        name, labels = NAMES[event]
        assert row.workload.sample == f"resctrlmond_{name}"
        assert row.machine.sample == f"resctrlmond_machine_{name}"
        assert row.workload.labels == ("key", "domain", *labels)
        assert row.machine.labels == ("domain", "pool", *labels)
        assert (row.accounted is None) == (EVENTS[event].kind is Kind.GAUGE)
        if row.accounted is not None:
            assert row.accounted.sample == f"resctrlmond_accounted_{name}"
            assert row.accounted.labels == ("by", "name", *labels)


def test_ended_workload_keeps_its_final_values(machine: Machine, exporter: Exporter) -> None:
    machine.start()
    workload = run_for(machine, "short")["workload"]
    found = machine.call("Read", key="short")
    used = {(use["domain"], use["event"]): use["value"] for use in found["domains"]}
    assert any(Decimal(value) for value in used.values())
    for scraped in (exporter.scrape(), exporter.scrape()):
        exported = {
            (domain, event): scraped.value(NAMES[event][0], key="short", domain=DOMAINS[domain], **NAMES[event][1])
            for domain, event in used
        }
        assert {of: value for of, value in exported.items() if value is not None} == {
            (domain, event): float(value) for (domain, event), value in used.items() if event in DEFAULT
        }
        assert scraped.value("workload_start_time_seconds", key="short") == epoch(workload["createdAt"])
        assert scraped.value("workload_end_time_seconds", key="short") == epoch(workload["completedAt"])
        assert marks(scraped, "short") == not_exact(found)
        starts = scraped.having("core_energy_joules_created", key="short")
        assert [scraped.value("core_energy_joules_created", **of) for of in starts] == [
            epoch(workload["createdAt"])
        ] * 2


def test_all_events_can_be_chosen(machine: Machine) -> None:
    machine.start()
    run_for(machine, "short")
    exporter = Exporter(machine.top, machine.socket, "--event", "uops*", "--event", "c?_res")
    try:
        exporter.start()
        families = exporter.scrape().families
    finally:
        exporter.close()
    of_workloads = {name for name in families if not name.startswith("resctrlmond_machine_")}
    assert {"resctrlmond_uops_retired", "resctrlmond_core_idle_cycles"} <= of_workloads
    assert "resctrlmond_core_energy_joules" not in families
    assert "resctrlmond_machine_uops_retired" in families


def test_workload_that_is_late_is_marked(machine: Machine, exporter: Exporter, process: StartProcess) -> None:
    machine.start()
    machine.call("Assign", key="late", pid=process().pid, late=True, claim="me")
    assert marks(exporter.scrape(), "late") == {(event, "late") for event in DEFAULT - {"llc_occupancy"}}


def test_next_run_of_a_key_starts_anew(machine: Machine, exporter: Exporter) -> None:
    machine.start()
    run_for(machine, "again", loops=400_000)
    first = exporter.scrape()
    machine.call("Create", key="again", claim="me")
    second = scrape_until(exporter, lambda scraped: scraped.having("workload_info", generation="2") != [])
    for scraped, generation in ((first, "1"), (second, "2")):
        assert [of["generation"] for of in scraped.having("workload_info")] == [generation]
    of = {"key": "again", "domain": "0"}
    starts = [scraped.value("core_energy_joules_created", **of) for scraped in (first, second)]
    assert starts[1] is not None
    assert starts[0] is not None
    assert starts[0] < starts[1]
    assert second.value("core_energy_joules_total", **of) == 0


def test_event_without_a_number_is_absent(machine: Machine, exporter: Exporter, process: StartProcess) -> None:
    machine.start()
    machine.call("Assign", key="k", pid=process().pid, late=True, claim="me")
    Control(str(machine.top / "resctrl")).set_faults(
        Fault(event="llc_occupancy", answer="Unavailable", group="mon_groups/k"),
        Fault(event="mbm_total_bytes", domain="mon_L3_00", answer="Error", group="mon_groups/k"),
    )
    scraped = exporter.scrape()
    assert scraped.having("llc_occupancy_bytes", key="k") == []
    assert scraped.having("memory_bandwidth_bytes_total", key="k", scope="total", domain="0") == []
    assert scraped.value("memory_bandwidth_bytes_total", key="k", scope="local", domain="0") is not None


def test_sums_have_workloads_that_no_scrape_has_seen(
    machine: Machine, exporter: Exporter, process: StartProcess
) -> None:
    """The files of the ended workloads are gone before the first scrape, and the daemon is killed between them."""
    machine.config.write_text(machine.config.read_text().replace("snapshot_ttl: 1h", "snapshot_ttl: 0"))
    machine.start()
    truth: dict[str, Decimal] = {}
    ends = dict.fromkeys(map(str, Quality), 0)
    for number in range(4):
        totals = run_for(machine, f"short-{number}", namespace="shop")["totals"]
        ends[worst(*(Quality(total["quality"]) for total in totals))] += 1
        for total in totals:
            truth[total["event"]] = truth.get(total["event"], Decimal(0)) + Decimal(total["value"])
        if number == 1:
            machine.kill()
            machine.start()
    machine.call("Assign", key="late", pid=process().pid, late=True, claim="me")
    wait_until(lambda: [one["key"] for one in machine.call("List")["workloads"]] == ["late"])
    scraped = exporter.scrape()
    since = epoch(machine.call("Sums")["since"])
    of = {"by": "namespace", "name": "shop"}
    for event in DEFAULT - {"llc_occupancy"}:
        name, labels = NAMES[event]
        assert scraped.value(f"accounted_{name}", **of, **labels) == float(truth[event])
        created = name.removesuffix("_total") + "_created"
        assert scraped.value(f"accounted_{created}", **of, **labels) == since
    assert truth["core_energy"]
    qualities = {of["quality"]: scraped.value("ends_total", **of) for of in scraped.having("ends_total")}
    assert qualities == ends
    assert scraped.value("ends_lost_total") == 0
    assert scraped.value("accounted_start_time_seconds") == since
    machine.call("Release", key="late", claim="me")

    def has_late_end(scraped: Exposition) -> bool:
        return sum(scraped.value("ends_total", quality=quality) or 0 for quality in ends) == 5

    scraped = scrape_until(exporter, has_late_end)
    assert scraped.value("accounted_core_energy_joules_total", **of) == float(truth["core_energy"])


def test_parts_of_sums_that_are_not_exact_are_marked(
    machine: Machine, exporter: Exporter, process: StartProcess
) -> None:
    machine.start()
    run_for(machine, "exact", namespace="shop")
    child = process()
    machine.call("Assign", key="late", pid=child.pid, late=True, claim="me", attributes={"pod.namespace": "shop"})
    Control(str(machine.top / "resctrl")).set_faults(
        Fault(event="core_energy", answer="Error", group="mon_groups/late")
    )
    machine.call("Release", key="late", claim="me")
    of = {"by": "namespace", "name": "shop", "event": "core_energy"}
    scraped = exporter.scrape()
    assert scraped.value("accounted_unknown_runs", **of) == 1
    assert scraped.value("ends_total", quality="unknown") == 1
    run = {use["event"]: use for one in machine.call("Sums")["names"] if one["name"] == "shop" for use in one["sums"]}
    for event, use in run.items():
        ratio = scraped.value("accounted_inexact_ratio", **{**of, "event": event}, quality="late")
        late, value = use.get("late"), float(use["value"])
        if event in DEFAULT:
            # Also of an event of which the late run has counted nothing.
            assert ratio == (None if late is None else float(late) / value if value else 1.0)


def test_excluded_containers_are_counted_by_profile(
    machine: Machine, exporter: Exporter, process: StartProcess
) -> None:
    folder = machine.top / "profiles.d"
    folder.mkdir()
    (folder / "none.yaml").write_text("profiles:\n  ignored:\n    watch: none\ndefault_profile: ignored\n")
    machine.options = ("--profiles-dir", str(folder))
    machine.start()
    facts = {"annotations": {}, "labels": {}, "namespace": "ns", "image": "i", "container": "c"}
    key = "4d" * 32
    with contextlib.suppress(VarlinkError):  # NotWatched
        machine.call("Assign", key=key, pid=process().pid, member=key, kind="container", claim="nri", facts=facts)
    assert exporter.scrape().value("unwatched_containers", profile="ignored") == 1


def test_oldest_pending_workload_has_its_age(tmp_path: Path) -> None:
    with machine_of(tmp_path, "intel-rdt", 4) as machine, contextlib.ExitStack() as stack:
        machine.start()
        for number in range(4):
            machine.call("Create", key=f"k{number}", claim="me")
        exporter = stack.enter_context(contextlib.closing(Exporter(machine.top, machine.socket)))
        exporter.start()

        def is_waiting(scraped: Exposition) -> bool:
            return (scraped.value("pending_oldest_seconds") or 0) > 0

        scraped = scrape_until(exporter, is_waiting)
        assert scraped.value("workloads", state="pending") == 1


def test_pools_of_the_machine(machine: Machine, exporter: Exporter) -> None:
    machine.start()
    machine.call("Machine")  # the pools begin now at the latest
    run_for(machine, "short")
    of = {"pool": "tracked", "scope": "total"}

    def has_traffic(scraped: Exposition) -> bool:
        return any(scraped.value("machine_memory_bandwidth_bytes_total", domain=domain, **of) for domain in "01")

    scraped = scrape_until(exporter, has_traffic)
    found = machine.call("Machine")
    pools = [use for use in found["pools"] if use["event"] in DEFAULT]
    numbers = 0
    for use in pools:
        name, labels = NAMES[use["event"]]
        value = scraped.value(f"machine_{name}", domain=DOMAINS[use["domain"]], pool=use["pool"], **labels)
        assert (value is None) == ("value" not in use)
        if use["pool"] == "tracked" and use["kind"] == "cumulative" and value:
            assert value == float(use["value"])
            numbers += 1
    assert numbers
    assert pool_marks(scraped) == {
        (use["pool"], use["event"], DOMAINS[use["domain"]], use["quality"])
        for use in pools
        if use["quality"] != "exact"
    }
    assert scraped.value("machine_start_time_seconds") == epoch(found["since"])
    Control(str(machine.top / "resctrl")).make_group("mon_groups/theirs")
    mark = ("foreign", "core_energy", "0", "estimated")
    assert mark in pool_marks(scrape_until(exporter, lambda scraped: mark in pool_marks(scraped)))


def pool_marks(scraped: Exposition) -> set[tuple[str, str, str, str]]:
    return {(of["pool"], of["event"], of["domain"], of["quality"]) for of in scraped.having("machine_inexact")}


def test_health(machine: Machine, exporter: Exporter, process: StartProcess) -> None:
    machine.start()
    control = Control(str(machine.top / "resctrl"))
    control.make_group("mon_groups/theirs")
    machine.call("Create", key="empty", claim="me")
    machine.call("Assign", key="busy", pid=process().pid, claim="me")
    run_for(machine, "ended")
    machine.call("Status")
    scraped = exporter.scrape()
    states = {of["state"]: scraped.value("workloads", **of) for of in scraped.having("workloads")}
    assert {state: count for state, count in states.items() if count} == {"idle": 1, "active": 1, "completed": 1}
    assert scraped.value("rmids_used", owner="workload") == 2
    assert scraped.value("rmids_used", owner="foreign") == 1
    assert scraped.value("rmids_used", owner="class") == 1
    assert scraped.value("rmids", resource="L3_MON") == 576
    assert scraped.value("rmids_free") == 572
    for name in ("up", "mounted", "simulation"):
        assert scraped.value(name) == 1
    assert scraped.value("problems") == len(machine.call("Status")["problems"])
    assert scraped.value("bandwidth_mode", mode="dedicated") == 1
    assert scraped.value("foreign_groups") == 1
    for kind, least in (("change", 5), ("read", 1), ("hook", 0)):
        assert (scraped.value("call_duration_seconds_count", calls=kind) or 0) >= least, kind
        buckets = [of["le"] for of in scraped.having("call_duration_seconds_bucket", calls=kind)]
        assert sorted(buckets, key=float) == buckets
        assert scraped.value("call_duration_seconds_bucket", calls=kind, le="+Inf") == scraped.value(
            "call_duration_seconds_count", calls=kind
        )
        assert scraped.value("call_duration_seconds_created", calls=kind)
    assert (scraped.value("call_duration_seconds_sum", calls="change") or 0) > 0
    assert scraped.value("pending_oldest_seconds") == 0
    assert [scraped.value("exporter_read_success", verb=verb) for verb in VERBS] == [1] * len(VERBS)


def test_daemon_that_was_killed_continues_its_counters(machine: Machine, exporter: Exporter) -> None:
    machine.start()
    machine.call("Create", key="k", claim="me")
    with subprocess.Popen(["sh", "-c", "while :; do :; done"]) as child:
        machine.call("Assign", key="k", pid=child.pid, claim="me")
        first = exporter.scrape()
        machine.kill()
        down = exporter.scrape()
        machine.start()
        second = exporter.scrape()
        child.send_signal(signal.SIGKILL)
    assert down.value("up") == 0
    assert [name for name in down.families if "workload" in name or "machine" in name or "rmid" in name] == []
    assert [down.value("exporter_read_success", verb=verb) for verb in VERBS] == [0] * len(VERBS)
    for of in first.having("core_energy_joules_total", key="k"):
        before, after = (scraped.value("core_energy_joules_total", **of) for scraped in (first, second))
        assert before is not None
        assert after is not None
        assert before <= after
        starts = {scraped.value("core_energy_joules_created", **of) for scraped in (first, second)}
        assert len(starts) == 1


HOSTILE = 'a"b\\c{x="y"} 1\\n' + "é" * 300


def test_hostile_names_are_escaped_and_cut(machine: Machine, exporter: Exporter) -> None:
    machine.start()
    attributes = {"pod.name": HOSTILE, "pod.namespace": "ns", "container.name": '"', "unit": "\\"}
    machine.call("Create", key="x\\x2dy@1.service", claim="me", attributes=attributes)
    (info,) = exporter.scrape().having("workload_info")
    assert info == {
        "key": "x\\x2dy@1.service",
        "generation": "1",
        "namespace": "ns",
        "pod": HOSTILE[: MAX_LABEL - 1] + "…",
        "container": '"',
        "unit": "\\",
    }
    text = exporter.get().text
    assert 'key="x\\\\x2dy@1.service"' in text
    assert len([line for line in text.splitlines() if line.startswith("resctrlmond_workload_info")]) == 1


class One(Collector):
    def __init__(self, families: Families) -> None:
        self._families = families

    def collect(self) -> Iterable[Family]:
        return self._families


# As the kernel and the daemon write them: up to 20 digits, and up to 9 decimals.
DECIMALS = st.decimals(0, 10**20 - 1, places=9).map(lambda number: f"{number:f}") | st.integers(0, 10**20).map(str)


@given(DECIMALS, st.booleans())
def test_exported_value_is_the_float_of_the_kernels_decimal(text: str, is_openmetrics: bool) -> None:
    families = Families(with_start_times=is_openmetrics)
    families.counter(EVENT_METRICS["core_energy"].workload, ("k", "0"), float(text), 1.5)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(One(families))
    lines = (generate_openmetrics if is_openmetrics else generate_latest)(registry).decode().splitlines()
    (line,) = (line for line in lines if line.startswith("resctrlmond_core_energy_joules_total{"))
    assert float(line.rpartition(" ")[2]) == float(Decimal(text))
    assert any("_created" in line for line in lines) == is_openmetrics


def test_domains_add_up_to_the_total_with_sub_numa_clustering(tmp_path: Path) -> None:
    with machine_of(tmp_path, "intel-snc2") as machine:
        machine.start()
        totals = {total["event"]: total["value"] for total in run_for(machine, "short")["totals"]}
        with contextlib.closing(Exporter(machine.top, machine.socket)) as exporter:
            exporter.start()
            scraped = exporter.scrape()
    of = {"key": "short", "scope": "total"}
    values = {
        one["domain"]: scraped.value("memory_bandwidth_bytes_total", **one)
        for one in scraped.having("memory_bandwidth_bytes_total", **of)
    }
    assert values.keys() == {"0", "1"}
    assert sum(value or 0 for value in values.values()) == float(totals["mbm_total_bytes"]) > 0


def test_machine_without_energy_has_no_joules(tmp_path: Path) -> None:
    with machine_of(tmp_path, "intel-rdt") as machine:
        machine.start()
        machine.call("Create", key="k", claim="me")
        exporter = Exporter(machine.top, machine.socket)
        try:
            exporter.start()
            names = exporter.scrape().families
        finally:
            exporter.close()
    assert "resctrlmond_llc_occupancy_bytes" in names
    assert [name for name in names if "joules" in name or "farads" in name] == []
