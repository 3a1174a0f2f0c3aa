# SPDX-License-Identifier: Apache-2.0
"""The points of a counter over refused pushes and restarts, and runs that wait for a receiver that refuses."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from collections.abc import Iterable, Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.api.types import Change, Claim, Member, Total, Usage
from resctrlmond.exporter.metrics import selected
from resctrlmond.exporter.otlp import ledger
from resctrlmond.exporter.otlp.ends import Ends
from resctrlmond.exporter.otlp.figures import Figures, Run, Use, nanoseconds, of_end, of_usage
from resctrlmond.exporter.otlp.ledger import Counted, Step, Temporality, step
from resctrlmond.exporter.otlp.pusher import Pusher
from resctrlmond.exporter.otlp.sender import Protocol, Sender, with_path, without_user
from resctrlmond.exporter.source import Observation
from resctrlmond.workloads.model.states import Quality, State
from tests.exporter.otlp_receiver import over_http
from tests.exporter.test_collector import Told, machine, sums, usage

START, LATER = "2026-11-24T08:00:00Z", "2026-11-24T09:00:00Z"
# A start, a value, and whether the push succeeds.
READINGS = st.lists(st.tuples(st.sampled_from([START, LATER]), st.integers(0, 9), st.booleans()), max_size=20)


def steps(readings: Iterable[tuple[str, int, bool]], temporality: Temporality) -> Iterable[tuple[Step, str, bool]]:
    """Yield the points of a counter: one reading a second, whose start is never an earlier one again."""
    before: Counted | None = None
    begun = START
    for second, (start, value, is_accepted) in enumerate(readings, 1):
        begun = max(begun, start)
        now = Counted(begun, Decimal(value), nanoseconds(begun) + second * 10**9)
        found = step(before, now, nanoseconds(begun), temporality)
        if is_accepted or temporality is Temporality.CUMULATIVE:
            before = found.kept
        yield found, begun, is_accepted


@given(READINGS)
def test_deltas_of_one_start_add_up_to_the_highest_value(readings: list[tuple[str, int, bool]]) -> None:
    pushed, highest, ends = dict.fromkeys((START, LATER), Decimal(0)), dict[str, Decimal](), dict[str, int]()
    for (found, start, is_accepted), (_, value, _) in zip(steps(readings, Temporality.DELTA), readings, strict=True):
        assert found.value >= 0
        # No time is counted twice, and none is left out.
        assert found.start_ns == ends.get(start, nanoseconds(start))
        if is_accepted:
            pushed[start] += found.value
            highest[start] = max(highest.get(start, Decimal(0)), Decimal(value))
            ends[start] = found.time_ns
            assert pushed[start] == highest[start]


@given(READINGS)
def test_values_of_one_start_never_fall(readings: list[tuple[str, int, bool]]) -> None:
    last: dict[str, tuple[Decimal, int]] = {}
    for (found, start, _), (_, value, _) in zip(steps(readings, Temporality.CUMULATIVE), readings, strict=True):
        assert found.start_ns == nanoseconds(start)
        assert found.excess == found.value - value
        assert (found.value, found.time_ns) >= last.get(start, (Decimal(0), 0))
        last[start] = found.value, found.time_ns


def test_value_that_changes_at_the_same_time_gets_a_later_one() -> None:
    """All readings within half a second are the same, and an end may be older than the reading before."""
    before = Counted(START, Decimal(5), nanoseconds(LATER))
    same = step(before, Counted(START, Decimal(5), nanoseconds(LATER)), nanoseconds(START), Temporality.CUMULATIVE)
    end = step(before, Counted(START, Decimal(6), nanoseconds(LATER) - 9), nanoseconds(START), Temporality.CUMULATIVE)
    assert same.time_ns == nanoseconds(LATER)
    assert end.time_ns == nanoseconds(LATER) + 1_000_000


def changed(of: Usage, **fields: Any) -> Usage:
    return msgspec.structs.replace(of, workload=msgspec.structs.replace(of.workload, **fields))


def attributes(of: Usage) -> dict[str, str | int]:
    figures = of_usage(msgspec.structs.replace(of, read_at=LATER))
    assert figures is not None
    return dict(figures.attributes)


CONTAINER = "4f" * 32
POD = "5f1d6a52-43a5-4b53-9b2e-2f0e8b7f2c11"


def test_attributes_are_those_of_the_semantic_conventions() -> None:
    of_container = {"id": CONTAINER, "kind": "container", "owner": "oci"}
    member = msgspec.convert(of_container, Member)
    known = {"container.name": "db", "pod.name": "db-0", "pod.namespace": "shop"}
    own = {"resctrl.workload.generation": 1}
    pod = changed(usage("1", key=POD), members=(member,), attributes=known)
    names = {"k8s.pod.uid": POD, "k8s.pod.name": "db-0", "k8s.namespace.name": "shop", "k8s.container.name": "db"}
    # The figures are those of the pod, not of one of its containers.
    assert attributes(pod) == {"resctrl.workload.key": POD, **own, **names}
    apart = changed(usage("1", key=CONTAINER), members=(member,), attributes=known | {"pod.uid": POD})
    assert attributes(apart) == {"resctrl.workload.key": CONTAINER, **own, **names, "container.id": CONTAINER}
    alone = changed(usage("1", key=CONTAINER), members=(member,), attributes={"container.name": "db"})
    names = {"container.id": CONTAINER, "container.name": "db"}
    assert attributes(alone) == {"resctrl.workload.key": CONTAINER, **own, **names}
    session = "/sys/fs/cgroup/user.slice/user-1000.slice/session-2.scope"
    member = msgspec.convert({"id": "m", "kind": "cgroup", "owner": "cli", "cgroup": session}, Member)
    unit = changed(usage("1"), members=(member,))
    names = {"systemd.unit.name": "session-2.scope", "user.id": "1000"}
    assert attributes(unit) == {"resctrl.workload.key": "k", **own, **names}


def ending(number: int) -> Figures:
    workload = msgspec.structs.replace(usage("1", key=f"k{number}").workload, completed_at=LATER)
    change = {"change": "ended", "at": LATER, "key": workload.key}
    of = msgspec.structs.replace(msgspec.convert(change, Change), workload=workload, totals=[])
    figures = of_end(of)
    assert figures is not None
    return figures


def test_run_that_cannot_be_read_for_long_is_not_counted_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interval can be longer than the time after which runs that are not listed are forgotten."""
    monkeypatch.setattr(ledger, "_FORGET_S", 0.0)
    readings = [msgspec.structs.replace(usage(value), read_at=LATER) for value in ("5", "6", "7")]
    readings[1] = msgspec.structs.replace(readings[1], error="another call changes it now")
    source = Told(*(Observation(usages=[one]) for one in readings), Observation(usages=[]))
    known = ledger.Ledger(Temporality.DELTA, str(tmp_path / "state"))
    with over_http() as (url, received):
        sender = Sender(url, Protocol.HTTP, Temporality.DELTA)
        pusher = Pusher(source, Ends("/nowhere"), sender, known, selected(["core_energy"]), timeout_s=1)
        assert [pusher.push() for _ in range(3)] == [True] * 3
        assert [one.value for one in received.all("resctrl.workload.core_energy")] == [5.0, 2.0]
        assert pusher.push()
    assert known.runs == {}


def test_state_is_written_safely_beside_the_files_of_others(tmp_path: Path) -> None:
    """The directory may be one to which other users can write."""
    state, temporary, victim = tmp_path / "state", tmp_path / "state.new", tmp_path / "victim"
    victim.write_text("precious")
    temporary.symlink_to(victim)
    ledger.Ledger(Temporality.DELTA, str(state))
    assert victim.read_text() == "precious"
    os.mkfifo(temporary)
    ledger.Ledger(Temporality.DELTA, str(state))
    assert not temporary.exists()
    assert state.is_file()


def of_host(value: str = "5", time_ns: int = 1) -> dict[str, Any]:
    return {"host": {"a": {"start": START, "value": value, "time_ns": time_ns}}}


def of_run(start: str) -> dict[str, Any]:
    return {"runs": [{"key": "k", "created_at": START, "known": {"start": start, "attributes": {}}}]}


def of_ending(value: str = "5", start: str = START) -> dict[str, Any]:
    total = {"event": "core_energy", "value": value, "quality": "exact"}
    run = {"key": "k", "created_at": START}
    end = {"run": run, "start": start, "read_at": LATER, "continues": False}
    return {"ends": [{**end, "attributes": {}, "totals": [total]}]}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (of_ending("NaN"), "not the value of a counter"),
        (of_ending("five"), "'five' is not the value of a counter"),
        (of_ending(start="2026-11-24T08:00:00"), "no time zone"),
        (of_ending(start="0001-01-01T00:00:00+00:00"), "not a time of a run"),
        (of_host("NaN"), "not the value of a counter"),
        (of_host("-5"), "not the value of a counter"),
        (of_host("1e999999999"), "not the value of a counter"),
        (of_host(time_ns=2**63), "not a time"),
        (of_run("yesterday"), "yesterday"),
        (of_run("2026-11-24T08:00:00"), "no time zone"),
    ],
)
def test_state_with_a_value_that_cannot_be_pushed_is_refused(
    tmp_path: Path, fields: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "state"
    right = {"version": 1, "temporality": "delta"} | of_host() | of_run(START) | of_ending()
    path.write_bytes(msgspec.json.encode(right))
    for _ in range(2):
        found = ledger.Ledger(Temporality.DELTA, str(path))
        assert (len(found.host), len(found.runs), len(found.ends)) == (1, 1, 1)
    wrong = msgspec.json.encode(right | fields)
    path.write_bytes(wrong)
    with pytest.raises(ValueError, match=f"cannot use the state {path}: .*{reason}"):
        ledger.Ledger(Temporality.DELTA, str(path))
    assert path.read_bytes() == wrong


@pytest.mark.parametrize("value", ["five", "NaN", "-5", "1e99"])
def test_state_has_only_what_was_converted(tmp_path: Path, value: str, caplog: pytest.LogCaptureFixture) -> None:
    """The next start would not be able to use a state with other figures."""
    path = tmp_path / "state"
    bad = msgspec.structs.replace(usage(value, key="bad"), read_at=LATER)
    late = msgspec.structs.replace(usage("5", key="late", created_at="2026-11-24T08:00:00"), read_at=LATER)
    observation = sums(value, 1)
    observation.usages = [bad, late, msgspec.structs.replace(usage("5"), read_at=LATER)]
    observation.machine = machine(value).machine
    known = ledger.Ledger(Temporality.DELTA, str(path))
    ends = Ends("/nowhere")
    for figures in (ending(1), dataclasses.replace(ending(2), read_at="later")):
        ends.add(figures)
    with over_http() as (url, received):
        sender = Sender(url, Protocol.HTTP, Temporality.DELTA)
        pusher = Pusher(Told(observation), ends, sender, known, selected(["core_energy"]), timeout_s=1)
        assert pusher.push()
        assert [of.value for of in received.all("resctrl.workload.core_energy")] == [5.0]
        missing = received.all("resctrl.exporter_ends_missing", resctrl_reason="invalid")
        assert [of.value for of in missing] == [1]
    assert {run.key for run in known.runs} == {"k", "k1"}
    assert "the final figures of k2 cannot be pushed: " in caplog.text
    caplog.clear()
    found = ledger.Ledger(Temporality.DELTA, str(path))
    assert {run.key for run in found.runs} == {"k", "k1"}
    assert "cannot be pushed" not in caplog.text


def test_value_of_an_unknown_event_keeps_no_figures_of_its_run_back(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A later daemon may have an event whose values this exporter cannot convert; it does not push them."""
    path = tmp_path / "state"
    unknown = Total(event="of_a_later_version", unit="", quality=Quality.EXACT, value="-5 °C")
    of = msgspec.structs.replace(usage("5"), read_at=LATER)
    of = msgspec.structs.replace(of, totals=[*of.totals, unknown])
    figures = of_usage(msgspec.structs.replace(of, workload=usage("5", key="ended").workload))
    assert figures is not None
    ends = Ends("/nowhere")
    ends.add(dataclasses.replace(figures, is_final=True))
    known = ledger.Ledger(Temporality.CUMULATIVE, str(path))
    known.save(ends.waiting())
    with over_http() as (url, received):
        sender = Sender(url, Protocol.HTTP, Temporality.CUMULATIVE)
        source = Told(Observation(usages=[of]))
        assert Pusher(source, ends, sender, known, selected(["core_energy"]), timeout_s=1).push()
        found = {dict(one.resource)["resctrl.workload.key"] for one in received.all("resctrl.workload.core_energy")}
    assert found == {"k", "ended"}
    known.save([dataclasses.replace(figures, is_final=True)])
    assert [end.run.key for end in ledger.Ledger(Temporality.CUMULATIVE, str(path)).ends] == ["ended"]
    assert caplog.text == ""


STORED = rb"""{"version":1,"temporality":"delta","runs":[{"key":"shop.service","created_at":"2026-11-24T08:00:00Z",
"known":{"start":"2026-11-24T08:00:00Z","attributes":{"resctrl.workload.key":"shop.service",
"resctrl.workload.generation":2},"counters":{"resctrl.workload.core_energy":{"start":"2026-11-24T08:00:00Z",
"value":"2.5","time_ns":1795766400000000000}},"is_final":false,"is_given_up":false,"seen_s":7.5}}],
"host":{"resctrl.ends\u0000exact":{"start":"2026-11-24T08:00:00Z","value":"3","time_ns":1}},
"ends":[{"run":{"key":"shop.service","created_at":"2026-11-24T08:00:00Z"},"start":"2026-11-24T08:00:00Z",
"read_at":"2026-11-24T09:00:00Z","continues":false,
"attributes":{"resctrl.workload.key":"shop.service","resctrl.workload.generation":2},
"totals":[{"event":"core_energy","value":"12.5","quality":"late"},
{"event":"activity","quality":"unknown"}]}]}"""


def test_stored_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "state"
    path.write_bytes(STORED)
    run = Run("shop.service", START)
    names: dict[str, str | int] = {"resctrl.workload.key": run.key, "resctrl.workload.generation": 2}
    uses = [Use("core_energy", "12.5", Quality.LATE), Use("activity", None, Quality.UNKNOWN)]
    # The first of them reads it, and writes it again; the second one reads that.
    for found in (ledger.Ledger(Temporality.DELTA, str(path)) for _ in range(2)):
        assert found.ends == [Figures(run, START, LATER, True, False, names, uses, ())]
        assert found.host == {"resctrl.ends\0exact": Counted(START, Decimal(3), 1)}
        (known,) = found.runs.values()
        assert [*found.runs] == [run]
        counted = Counted(START, Decimal("2.5"), 1795766400000000000)
        assert (known.start, known.attributes) == (START, names)
        assert known.counters == {"resctrl.workload.core_energy": counted}
        assert (known.is_final, known.is_given_up) == (False, False)


def test_types_of_the_file_belong_to_it() -> None:
    """A field that another type gets would make files unreadable after an update, and their ends would be lost."""
    found = structs(msgspec.inspect.type_info(ledger._File))
    assert {of.__module__ for of in found} == {ledger.__name__}
    assert len(found) > 5


def structs(of: object) -> set[type]:
    """Return the classes with fields in the description of a type."""
    found = {of.cls} if isinstance(of, msgspec.inspect.StructType | msgspec.inspect.DataclassType) else set()
    if isinstance(of, tuple):
        return found.union(*map(structs, of))
    parts = of.__struct_fields__ if isinstance(of, msgspec.Struct) else ()
    return found.union(*(structs(getattr(of, name)) for name in parts))


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        # A later version may have any other fields.
        (
            {"version": 2, "series": 1, "ends": [{}, {}]},
            "its format is 2, and this version of the exporter reads the",
        ),
        ({"version": 1, "temporality": "delta", "ends": [1, 2]}, "Expected `object`, got `int`"),
        ({"version": 1, "temporality": "cumulative", "runs": [], "host": {}, "ends": []}, "temporality cumulative"),
    ],
)
def test_state_that_cannot_be_used_is_named_with_the_ends_in_it(
    tmp_path: Path, content: dict[str, Any], reason: str
) -> None:
    path = tmp_path / "state"
    path.write_bytes(msgspec.json.encode(content))
    with pytest.raises(ValueError, match=reason) as caught:
        ledger.Ledger(Temporality.DELTA, str(path))
    assert ("without the final figures of the 2 runs" in str(caught.value)) == bool(content["ends"])


def test_state_that_is_not_a_regular_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fifo, large = tmp_path / "fifo", tmp_path / "large"
    os.mkfifo(fifo)
    with pytest.raises(ValueError, match=r"not a regular file"):
        ledger.Ledger(Temporality.DELTA, str(fifo))
    monkeypatch.setattr(ledger, "_MAX_BYTES", 1 << 20)
    with large.open("wb") as file:
        file.truncate((1 << 20) + 1)
    with pytest.raises(ValueError, match=r"larger than 1 MiB"):
        ledger.Ledger(Temporality.DELTA, str(large))


def test_ends_that_no_receiver_accepts_are_limited(caplog: pytest.LogCaptureFixture) -> None:
    ends = Ends("/nowhere", most=3)
    for number in range(5):
        ends.add(ending(number))
    assert [of.run.key for of in ends.waiting()] == ["k2", "k3", "k4"]
    full = ledger.Omission.FULL
    assert {run.key: omission for run, omission in ends.given_up().items()} == {"k0": full, "k1": full}
    assert ends.given_up() == {}
    assert caplog.text.count("final figures of 2 runs") == 1
    ends.remove(Run("k3", START))
    assert [of.run.key for of in ends.waiting()] == ["k2", "k4"]


def test_missing_final_figures_are_counted_by_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each run once, also if it was seen before its end was given up."""
    listed = [msgspec.structs.replace(usage("1", key=key), read_at=LATER) for key in ("k0", "gone")]
    source = Told(Observation(usages=listed), *[Observation(usages=[])] * 4)
    ends, known = Ends("/nowhere", most=3), ledger.Ledger(Temporality.CUMULATIVE)
    with over_http() as (url, received):
        sender = Sender(url, Protocol.HTTP, Temporality.CUMULATIVE)
        pusher = Pusher(source, ends, sender, known, selected(["core_energy"]), timeout_s=1)
        assert pusher.push()
        for number in range(5):
            ends.add(ending(number))
        assert pusher.push()
        monkeypatch.setattr(ledger, "_FORGET_S", 1e-9)
        # The push that forgets a run has not its number yet.
        assert [pusher.push() for _ in range(2)] == [True] * 2
        found = received.all("resctrl.exporter_ends_missing")
    values = {reason: [of.value for of in found if of.of("resctrl.reason") == reason] for reason in ledger.Omission}
    assert values == {"full": [0, 2, 2, 2], "invalid": [0] * 4, "unseen": [0, 0, 0, 1]}
    assert {of.temporality for of in found} == {"cumulative"}
    assert len({of.start_ns for of in found}) == 1


def test_run_after_a_loss_does_not_continue_an_earlier_run_that_has_ended() -> None:
    """The lost run was never seen: in one interval, a run ended, and the next one lost its group."""
    ended = changed(usage("100"), state=State.COMPLETED, completed_at="2026-11-24T08:10:00Z")
    claim = msgspec.convert({"owner": "me", "since": "2026-11-24T08:20:00Z", "endRule": "release"}, Claim)
    again = [changed(usage(value, created_at=LATER), loss="gone", claims=(claim,)) for value in ("7", "9")]
    source = Told(*(Observation(usages=[msgspec.structs.replace(of, read_at=LATER)]) for of in again))
    ends = Ends("/nowhere")
    end = of_usage(ended)
    assert end is not None
    ends.add(end)
    with over_http() as (url, received):
        sender = Sender(url, Protocol.HTTP, Temporality.CUMULATIVE)
        known = ledger.Ledger(Temporality.CUMULATIVE)
        pusher = Pusher(source, ends, sender, known, selected(["core_energy"]), timeout_s=1)
        assert [pusher.push() for _ in again] == [True] * 2
        found = received.all("resctrl.workload.core_energy")
    starts = [nanoseconds(START), *[nanoseconds(claim.since)] * 2]
    assert [(of.value, of.start_ns) for of in found] == [(100.0, starts[0]), (7.0, starts[1]), (9.0, starts[2])]


def test_runs_of_a_listed_key_are_forgotten_if_nothing_continues_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """A service can be started again and again while the receiver is away for days."""
    monkeypatch.setattr(ledger, "_FORGET_S", 0.0)
    known = ledger.Ledger(Temporality.CUMULATIVE)
    for second in range(10, 60):
        created_at = f"2026-11-24T08:00:{second}Z"
        run = Run("k", created_at)
        known.enter(Figures(run, created_at, LATER, False, False, {}, [], []))
        known.forget({"k": created_at})
        if second % 2:
            known.give_up({run: ledger.Omission.FULL})
    assert len(known.runs) == 1
    # The last run is listed.
    assert known.missing == {ledger.Omission.FULL: 25, ledger.Omission.INVALID: 0, ledger.Omission.UNSEEN: 25}


def test_run_whose_next_one_is_not_known_yet_can_be_continued(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger, "_FORGET_S", 0.0)
    known = ledger.Ledger(Temporality.DELTA)
    before = known.enter(run_of("k"))
    # It waits for an RMID, and then cannot be read.
    for created_at in (None, LATER):
        known.forget({"k": created_at})
    again = Figures(Run("k", LATER), START, LATER, False, True, {}, [], [])
    assert known.enter(again) is before


def test_end_that_watch_reports_after_a_long_interval_is_not_counted_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interval can be longer than the time after which runs that are not listed are forgotten."""
    monkeypatch.setattr(ledger, "_FORGET_S", 1e-9)
    listed = msgspec.structs.replace(usage("5"), read_at=LATER)
    end = of_usage(changed(usage("6"), state=State.COMPLETED, completed_at=LATER))
    assert end is not None
    ends, known = Ends("/nowhere"), ledger.Ledger(Temporality.DELTA)
    with over_http() as (url, received):
        sender = Sender(url, Protocol.HTTP, Temporality.DELTA)
        source = Told(Observation(usages=[listed]), *[Observation(usages=[])] * 2)
        pusher = Pusher(source, ends, sender, known, selected(["core_energy"]), timeout_s=1)
        assert pusher.push()
        # The thread that follows Watch has not got the end yet.
        assert pusher.push()
        ends.add(end)
        assert pusher.push()
        assert [one.value for one in received.all("resctrl.workload.core_energy")] == [5.0, 1.0]


def test_figures_that_cannot_be_converted_keep_no_others_back(caplog: pytest.LogCaptureFixture) -> None:
    """As those of a daemon of another version."""
    good, bad = usage("5"), usage("five", key="bad")
    usages = [msgspec.structs.replace(of, read_at=LATER) for of in (bad, good)]
    observation = sums("five", 1)
    observation.usages, observation.machine = usages, machine("five").machine
    source = Told(observation, observation)
    with over_http() as (url, received):
        sender = Sender(url, Protocol.HTTP, Temporality.CUMULATIVE)
        known = ledger.Ledger(Temporality.CUMULATIVE)
        pusher = Pusher(source, Ends("/nowhere"), sender, known, selected(["core_energy"]), timeout_s=1)
        assert [pusher.push() for _ in range(2)] == [True] * 2
        assert [of.value for of in received.all("resctrl.workload.core_energy")] == [5.0] * 2
        assert received.all("resctrl.up")
    for which in ("of bad", "of the machine", "of the sums"):
        assert caplog.text.count(f"the figures {which} cannot be converted") == 1


def test_sum_that_falls_is_held_and_marked() -> None:
    observations = [sums("8", 1), sums("6", 1)]
    with over_http() as (url, received):
        sender = Sender(url, Protocol.HTTP, Temporality.CUMULATIVE)
        known = ledger.Ledger(Temporality.CUMULATIVE)
        source = Told(*observations)
        pusher = Pusher(source, Ends("/nowhere"), sender, known, selected(["core_energy"]), timeout_s=1)
        for _ in observations:
            assert pusher.push()
        by = {"resctrl_by": "namespace"}
        assert [of.value for of in received.all("resctrl.accounted.core_energy", **by)] == [8.0, 8.0]
        assert [of.value for of in received.all("resctrl.accounted.inexact_ratio", **by)] == [0.25]


@pytest.mark.parametrize(
    ("url", "whole"),
    [
        ("http://h:4318", "http://h:4318/v1/metrics"),
        ("http://h:4318/", "http://h:4318/v1/metrics"),
        ("https://h/otlp/v1/metrics", "https://h/otlp/v1/metrics"),
    ],
)
def test_address_without_a_path_gets_that_of_metrics(url: str, whole: str) -> None:
    assert with_path(url) == whole


def test_password_in_the_address_is_not_logged() -> None:
    assert without_user("http://user:secret@h:4318/v1/metrics") == "http://h:4318/v1/metrics"
    assert without_user("http://h:4318/a@b") == "http://h:4318/a@b"


def run_of(key: str) -> Figures:
    return Figures(Run(key, START), START, LATER, False, False, {}, [], [])


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 64 KiB."""
    path = tmp_path / "small"
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", str(path)], check=True)
    yield path
    subprocess.run(["umount", str(path)], check=True)


def test_full_disk_leaves_the_last_state_and_no_part_of_another(small_disk: Path) -> None:
    """The part of the new file kept the disk full."""
    file = small_disk / "state"
    of = ledger.Ledger(Temporality.DELTA, str(file))
    of.enter(run_of("first"))
    of.save()
    before = file.read_bytes()
    with pytest.raises(OSError, match=r"No space left on device\. Free some space there"):
        of.save([ending(number) for number in range(2000)])
    assert file.read_bytes() == before
    for number in range(2000):
        of.enter(run_of(f"workload-{number}"))
    with pytest.raises(OSError, match=r"No space left on device\. Free some space there"):
        of.save()
    assert file.read_bytes() == before
    assert os.listdir(small_disk) == ["state"]
