# SPDX-License-Identifier: Apache-2.0
"""``resctrlctl watch``: the lines of changes, and the choice of workloads and kinds."""

from __future__ import annotations

from typing import Any

import pytest
from msgspec.structs import replace

from resctrlctl.arguments import verbs
from resctrlctl.arguments.command_line import parse
from resctrlctl.live import watch
from resctrlmond.api.types import Change, Total, Workload
from resctrlmond.workloads.model.changes import ChangeKind
from resctrlmond.workloads.model.states import Quality, State

AT = "2026-03-04T05:06:07.123456Z"


@pytest.fixture(autouse=True)
def _utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "UTC")


def workload(key: str, state: State = State.ACTIVE, **fields: Any) -> Workload:
    plain = Workload(
        key=key,
        class_="",
        state=state,
        generation=1,
        baseline=Quality.EXACT,
        claims=(),
        members=(),
        attributes={},
    )
    return replace(plain, **fields)


def change(kind: ChangeKind, key: str, of: Workload | None = None, **fields: Any) -> Change:
    return Change(change=kind, at=AT, key=key, workload=of, **fields)


POD = {"pod.name": "web-1", "pod.namespace": "shop"}
ADDED = change(ChangeKind.ADDED, "uid-1", workload("uid-1", attributes=POD, class_="gold"))
PENDING = change(ChangeKind.PENDING, "b", workload("b", State.PENDING, reason="no RMID is free"))
TOTALS = [
    Total(event="core_energy", unit="joules", value="12.345", quality=Quality.EXACT),
    Total(event="mbm_total_bytes", unit="bytes", value="4831838208", quality=Quality.LATE, reason="old"),
]
# The system clock was set between the two.
TIMES = {
    "created_at": "2026-03-04T05:00:00Z",
    "completed_at": "2027-03-04T05:03:02Z",
    "created_ns": 5 * 10**9,
    "completed_ns": 187 * 10**9,
}
ENDED = change(ChangeKind.ENDED, "uid-1", workload("uid-1", State.COMPLETED, attributes=POD, **TIMES), totals=TOTALS)
REMOVED = change(ChangeKind.REMOVED, "uid-1")


def lines(changes: list[Change], *words: str) -> list[str]:
    selection = watch._Selection(parse(["watch", *words]))
    found = [(one, selection.line(one)) for one in changes]
    return [watch.text(one, line) for one, line in found if line is not None]


def test_line_of_each_kind_of_change() -> None:
    unread = change(ChangeKind.ENDED, "b", workload("b", State.COMPLETED, **TIMES), error="the totals are gone")
    assert lines([ADDED, PENDING, ENDED, REMOVED, unread]) == [
        "2026-03-04 05:06:07  added    shop/web-1: active; class gold",
        "2026-03-04 05:06:07  pending  b: pending; no RMID is free",
        "2026-03-04 05:06:07  ended    shop/web-1: 12.3J core energy, 4.50GiB memory traffic (late) in 3m2s; old",
        "2026-03-04 05:06:07  removed  shop/web-1",
        "2026-03-04 05:06:07  ended    b: no known use in 3m2s; the totals are gone",
    ]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("shop/*",), [ADDED, ENDED, REMOVED]),
        (("b",), [PENDING]),
        (("uid-*", "b"), [ADDED, PENDING, ENDED, REMOVED]),
        (("--change", "ended"), [ENDED]),
        (("--change", "pending", "--change", "removed"), [PENDING, REMOVED]),
        (("--filter", "state=active"), [ADDED, ENDED, REMOVED]),
        (("--filter", "namespace=other"), []),
    ],
)
def test_choice_of_changes(words: tuple[str, ...], expected: list[Change]) -> None:
    every = [ADDED, PENDING, ENDED, REMOVED]
    texts = dict(zip(map(id, every), lines(every), strict=True))
    assert lines(every, *words) == [texts[id(one)] for one in expected]


def test_text_of_other_programs_cannot_control_the_terminal() -> None:
    hostile = workload("k", attributes={"pod.name": "\x1b[2J"}, reason="\x1b]0;x\x07")
    [line] = lines([change(ChangeKind.CHANGED, "k", hostile)])
    assert line.isprintable()


def test_kinds_of_the_command_line_are_those_of_the_interface() -> None:
    assert tuple(ChangeKind) == verbs._CHANGES


def test_wrong_kind_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(["watch", "--change", "gone"])
    assert "gone" in capsys.readouterr().err
