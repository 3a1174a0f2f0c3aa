# SPDX-License-Identifier: Apache-2.0
"""``sums``: a row for each name, with the part of each figure that is not exact."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from resctrlctl.arguments.verbs import _SUM_GROUPINGS
from resctrlctl.host.sums import blocks
from resctrlctl.screen.layout import to_text
from resctrlmond.api.types import NameSums, RunCount, Sum, SumsReply
from resctrlmond.workloads.model.states import NameKind, Quality
from tests.ctl.conftest import Ctl
from tests.ctl.fake_manager import FakeManager

SHOP = NameSums(
    by=NameKind.NAMESPACE,
    name="shop",
    ends=[RunCount(quality=Quality.EXACT, runs=411), RunCount(quality=Quality.LATE, runs=1)],
    running=12,
    sums=[
        Sum(event="core_energy", unit="joules", value="41200.5"),
        Sum(event="mbm_total_bytes", unit="bytes", value="1000", late="10", estimated="15"),
    ],
)
NAMELESS = NameSums(
    by=NameKind.NAMESPACE,
    name="",
    ends=[RunCount(quality=Quality.UNKNOWN, runs=2)],
    running=0,
    sums=[Sum(event="core_energy", unit="joules", value=None, unknown_runs=2)],
)
REPLY = SumsReply(
    since="2026-11-21T08:00:00.000000Z", read_at="2026-11-21T12:00:00.000000Z", lost=3, names=[NAMELESS, SHOP]
)
TEXT = """\
Use of all workloads from 2026-11-21 08:00:00 to 2026-11-21 12:00:00

NAMESPACE  ENDED  RUNNING  ENERGY  INEXACT  TRAFFIC  INEXACT  UNKNOWN
shop         412       12  41.2kJ        -  0.98KiB      2 %        -
-              2        0       -        -        -        -        2

414 runs ended (411 exact, 1 late, 2 unknown). 12 workloads are running. 3 runs lost a group.
"""


def test_verb_prints_the_reply(manager: FakeManager, ctl: Ctl) -> None:
    manager.replies = {"Sums": REPLY}
    assert ctl("sums").stdout == TEXT
    assert ctl("sums", "-q").stdout == "shop\n\n"
    assert msgspec.json.decode(ctl("sums", "--json").stdout, type=SumsReply) == REPLY
    assert [request.by for request in manager.called("Sums")] == [NameKind.NAMESPACE] * 3
    ctl("sums", "--by", "user")
    assert manager.called("Sums")[-1].by is NameKind.USER


@pytest.mark.parametrize(
    ("running", "text"),
    [(0, "No workload is running."), (1, "1 workload is running."), (2, "2 workloads are running.")],
)
def test_number_of_running_workloads_is_stated(running: int, text: str, manager: FakeManager, ctl: Ctl) -> None:
    shop = replace(NAMELESS, running=running)
    manager.replies = {"Sums": replace(REPLY, names=[shop], lost=0)}
    assert ctl("sums").stdout.endswith(f"2 runs ended (2 unknown). {text}\n")


def test_names_are_whole_on_a_narrow_terminal() -> None:
    long = "a-namespace-with-a-long-name"
    lines = to_text(blocks(replace(REPLY, names=[NAMELESS, replace(SHOP, name=long)]), "namespace"), 60, True).split(
        "\n"
    )
    assert lines[3:5] == [long, "             412       12  41.2kJ        -  0.98KiB      2 %        -"]
    assert lines[2].startswith("NAMESPACE  ENDED ")


def test_sums_that_begin_again_have_the_reason() -> None:
    text = to_text(blocks(replace(REPLY, reset="the file cannot be read"), "namespace"), None, True)
    assert "Begun again: the file cannot be read\n" in text


def test_groupings_are_those_of_the_daemon() -> None:
    assert tuple(NameKind) == _SUM_GROUPINGS


def test_wrong_grouping_is_refused(ctl: Ctl) -> None:
    done = ctl("sums", "--by", "pod")
    assert done.returncode == 2
    assert "--by" in done.stderr


@pytest.mark.parametrize(("value", "share"), [("5", "0 %"), ("0", "100 %")])
def test_share_of_runs_that_are_not_exact_and_counted_nothing_is_shown(value: str, share: str) -> None:
    of = replace(SHOP, sums=[Sum(event="core_energy", unit="joules", value=value, estimated="0")])
    assert share in to_text(blocks(replace(REPLY, names=[of]), "namespace"), None, True)


@pytest.mark.parametrize("digits", [60])
def test_large_sums_are_not_rounded_to_a_share_of_zero(digits: int) -> None:
    value = "1" * digits
    of = replace(SHOP, sums=[Sum(event="core_energy", unit="joules", value=value, late=value)])
    assert "100 %" in to_text(blocks(replace(REPLY, names=[of]), "namespace"), None, True)
