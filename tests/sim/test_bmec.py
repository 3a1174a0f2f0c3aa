# SPDX-License-Identifier: Apache-2.0
"""Bandwidth events that can be configured: the masks of each L3, and the effect of a change on the counters."""

from __future__ import annotations

import errno

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.sim.virtual import VirtualResctrl

GIB = 1 << 30
TOTAL = "info/L3_MON/mbm_total_bytes_config"
LOCAL = "info/L3_MON/mbm_local_bytes_config"


@pytest.fixture
def resctrl() -> VirtualResctrl:
    made = VirtualResctrl("amd-bmec")
    made.mkdir("mon_groups/a")
    return made


def counter(resctrl: VirtualResctrl, event: str = "mbm_total_bytes", domain: int = 0) -> str:
    return resctrl.read(f"mon_groups/a/mon_data/mon_L3_{domain:02d}/{event}").strip()


def refused(resctrl: VirtualResctrl, path: str, text: str) -> str:
    with pytest.raises(OSError) as caught:
        resctrl.write(path, text)
    return errno.errorcode[caught.value.errno or 0]


def test_files_of_event_configuration(resctrl: VirtualResctrl) -> None:
    assert resctrl.read("info/L3_MON/mon_features").split() == [
        "llc_occupancy",
        *("mbm_total_bytes", "mbm_total_bytes_config"),
        *("mbm_local_bytes", "mbm_local_bytes_config"),
    ]
    # Local reads and local writes, from memory near and slow (resctrl.rst: 0x7f and 0x15 by default).
    assert (resctrl.read(TOTAL), resctrl.read(LOCAL)) == ("0=0x7f;1=0x7f\n", "0=0x15;1=0x15\n")
    assert resctrl.read("info/L3_MON/mbm_assign_mode") == "[default]\n"


def test_other_machines_have_no_such_files() -> None:
    assert "mbm_total_bytes_config" not in VirtualResctrl("amd-abmc").directory("info/L3_MON").children


def test_a_mask_decides_what_is_counted(resctrl: VirtualResctrl) -> None:
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(tid))
    resctrl.write(TOTAL, "0=0x2\n")
    assert (resctrl.read(TOTAL), resctrl.status) == ("0=0x02;1=0x7f\n", "ok\n")
    resctrl.run(tid, 1.0)
    assert [counter(resctrl) for _ in range(2)] == ["Unavailable", str(GIB // 8)]  # remote reads: an eighth


def test_a_change_clears_both_events_of_all_groups_in_that_cache(resctrl: VirtualResctrl) -> None:
    tid = resctrl.tasks.fork()
    resctrl.write("mon_groups/a/tasks", str(tid))
    resctrl.run(tid, 1.0)
    resctrl.model.accounting.look()
    resctrl.run(tid, 2.0, cpu=1)
    assert (counter(resctrl), counter(resctrl, domain=1)) == (str(GIB), str(2 * GIB))
    resctrl.write(LOCAL, "0=1\n")
    resctrl.mkdir("mon_groups/b")
    assert [counter(resctrl) for _ in range(2)] == ["Unavailable", "0"]
    assert [counter(resctrl, "mbm_local_bytes") for _ in range(2)] == ["Unavailable", "0"]
    assert counter(resctrl, domain=1) == str(2 * GIB)
    assert resctrl.read("mon_groups/b/mon_data/mon_L3_00/mbm_total_bytes") == "Unavailable\n"


def test_unchanged_mask_restarts_no_counter(resctrl: VirtualResctrl) -> None:
    resctrl.write(TOTAL, "1=7f;0=0x7F;\n")
    assert counter(resctrl) == "0"


@pytest.mark.parametrize(
    ("written", "status"),
    [
        ("0=1", "mbm_total_bytes_config: Invalid input\n"),
        ("x=1\n", "Missing '=' or non-numeric domain id\n"),
        ("=1\n", "Missing '=' or non-numeric domain id\n"),
        ("0\n", "Non-numeric event configuration value\n"),
        ("0=zz\n", "Non-numeric event configuration value\n"),
        ("0=80\n", "Invalid event configuration: max valid mask is 0x7f\n"),
        ("9=1\n", "ok\n"),
    ],
)
def test_the_message_for_an_invalid_mask(resctrl: VirtualResctrl, written: str, status: str) -> None:
    assert refused(resctrl, TOTAL, written) == "EINVAL"
    assert (resctrl.status, resctrl.read(TOTAL)) == (status, "0=0x7f;1=0x7f\n")


def test_changes_before_an_error_are_applied(resctrl: VirtualResctrl) -> None:
    assert refused(resctrl, TOTAL, "1=1;0=80\n") == "EINVAL"
    assert resctrl.read(TOTAL) == "0=0x7f;1=0x01\n"


def test_linux_6_12_has_no_message_for_a_missing_newline() -> None:
    resctrl = VirtualResctrl("amd-bmec", kernel="6.12")
    assert refused(resctrl, "tasks", "x") == "EINVAL"
    status = resctrl.status
    assert (refused(resctrl, TOTAL, "0=1"), resctrl.status) == ("EINVAL", status)
    resctrl.write(TOTAL, "0=1\n")
    assert resctrl.read(TOTAL) == "0=0x01;1=0x7f\n"


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet=st.sampled_from("01=0x7f;\n z"), max_size=20) | st.text(max_size=20))
def test_any_text_is_a_mask_or_an_error(text: str) -> None:
    resctrl = VirtualResctrl("amd-bmec", rmids=4)
    try:
        resctrl.write(TOTAL, text)
    except OSError as failure:
        assert failure.errno == errno.EINVAL
    masks = [int(part.partition("=")[2], 16) for part in resctrl.read(TOTAL).split(";")]
    assert len(masks) == 2
    assert all(0 <= mask <= 0x7F for mask in masks)
