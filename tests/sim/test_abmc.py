# SPDX-License-Identifier: Apache-2.0
"""Assignable bandwidth counters: limited, handed out at mkdir or by order, and the words when there is none."""

from __future__ import annotations

import errno
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resctrlmond.sim.kernel.abmc import TRANSACTIONS, parse_bool
from tests.sim.virtual import Lab

GIB = 1 << 30
INFO = "info/L3_MON/"
OFF = "mbm_event counter assignment mode is not enabled\n"


@pytest.fixture
def lab() -> Lab:
    """Five counters in each of two L3 caches; root has two of them."""
    return Lab("amd-abmc", rmids=16, counters=5)


def refused(action: Callable[[], object]) -> str:
    with pytest.raises(OSError) as caught:
        action()
    return errno.errorcode[caught.value.errno or 0]


def counter(lab: Lab, group: str, event: str = "mbm_total_bytes", domain: int = 0) -> str:
    return lab.read(f"mon_groups/{group}/mon_data/mon_L3_{domain:02d}/{event}").strip()


def test_the_files_and_what_they_say(lab: Lab) -> None:
    assert lab.read(INFO + "mbm_assign_mode") == "[mbm_event]\ndefault\n"
    assert lab.read(INFO + "num_mbm_cntrs") == "0=5;1=5\n"
    assert lab.read(INFO + "available_mbm_cntrs") == "0=3;1=3\n"
    assert lab.read(INFO + "mbm_assign_on_mkdir") == "1\n"
    assert lab.read(INFO + "mon_features") == "llc_occupancy\nmbm_total_bytes\nmbm_local_bytes\n"
    assert lab.read(INFO + "event_configs/mbm_local_bytes/event_filter") == (
        "local_reads,local_non_temporal_writes,local_reads_slow_memory\n"
    )
    assert lab.read("mbm_L3_assignments") == "mbm_total_bytes:0=e;1=e\nmbm_local_bytes:0=e;1=e\n"


def test_mkdir_succeeds_without_counters_and_says_so(lab: Lab) -> None:
    lab.mkdir("mon_groups/a")
    assert lab.status == "ok\n"
    assert lab.read(INFO + "available_mbm_cntrs") == "0=1;1=1\n"
    lab.mkdir("mon_groups/b")
    failed = "Failed to allocate counter for mbm_local_bytes in domain"
    assert lab.status == f"{failed} 0\n{failed} 1\n"
    assert (counter(lab, "b"), counter(lab, "b", "mbm_local_bytes")) == ("0", "Unassigned")
    assert counter(lab, "b", "llc_occupancy") == "0"
    lab.rmdir("mon_groups/a")
    assert lab.read(INFO + "available_mbm_cntrs") == "0=2;1=2\n"


def test_a_counter_counts_from_when_it_was_assigned(lab: Lab) -> None:
    lab.mkdir("mon_groups/a")
    tid = lab.tasks.fork()
    lab.write("mon_groups/a/tasks", str(tid))
    lab.run(tid, 1.0)
    assert counter(lab, "a") == str(GIB)
    lab.write("mon_groups/a/mbm_L3_assignments", "mbm_total_bytes:0=_\n")
    assert lab.read("mon_groups/a/mbm_L3_assignments") == "mbm_total_bytes:0=_;1=e\nmbm_local_bytes:0=e;1=e\n"
    assert counter(lab, "a") == "Unassigned"
    lab.run(tid, 1.0)
    lab.write("mon_groups/a/mbm_L3_assignments", "mbm_total_bytes:*=e\n")
    assert counter(lab, "a") == "0"
    lab.run(tid, 1.0)
    assert counter(lab, "a") == str(GIB)
    assert int(counter(lab, "a", "mbm_local_bytes")) == 3 * (GIB * 3 // 4)


def test_a_control_group_counts_those_of_its_groups_that_have_a_counter(lab: Lab) -> None:
    lab.mkdir("c")
    lab.mkdir("c/mon_groups/k")
    tid = lab.tasks.fork()
    lab.write("c/tasks", str(tid))
    lab.run(tid, 1.0)
    path = "c/mon_data/mon_L3_00/mbm_local_bytes"
    assert lab.read(path) == f"{GIB * 3 // 4}\n"
    lab.write("c/mbm_L3_assignments", "mbm_local_bytes:*=_\n")
    assert lab.read("c/mon_groups/k/mon_data/mon_L3_00/mbm_local_bytes") == "Unassigned\n"
    assert lab.read(path) == "Unassigned\n"
    lab.write("c/mon_groups/k/mbm_L3_assignments", "mbm_local_bytes:0=e\n")
    assert lab.read(path) == "0\n"


@pytest.mark.parametrize(
    ("written", "expected", "status"),
    [
        ("mbm_total_bytes:0=e", "EINVAL", "mbm_L3_assignments: Invalid input\n"),  # no newline
        ("foo:0=e\n", "ENOENT", "Invalid event foo\n"),
        ("mbm_total_bytes:x=e\n", "EINVAL", "Missing domain id\n"),
        ("mbm_total_bytes:0\n", "EINVAL", "Missing domain id\n"),
        ("mbm_total_bytes:7=e\n", "EINVAL", "Invalid domain id 7\n"),
        ("mbm_total_bytes:0=y\n", "EINVAL", "Assign operation 'mbm_total_bytes:0=y' failed\n"),
        (
            "mbm_total_bytes:0=e;1=e\n",
            "ENOSPC",
            "Failed to allocate counter for mbm_total_bytes in domain 0\n"
            "Assign operation 'mbm_total_bytes:0=e' failed\n",
        ),
    ],
)
def test_the_kernels_words_for_a_bad_assignment(lab: Lab, written: str, expected: str, status: str) -> None:
    lab.mkdir("mon_groups/a")
    lab.mkdir("mon_groups/b")
    lab.write("mon_groups/b/mbm_L3_assignments", "mbm_total_bytes:*=_\n")
    lab.write("mbm_L3_assignments", "mbm_total_bytes:*=e\n")
    lab.write("mon_groups/b/mbm_L3_assignments", "mbm_local_bytes:*=e\n")
    refused(lambda: lab.write(INFO + "event_configs/mbm_total_bytes/event_filter", "x\n"))
    assert refused(lambda: lab.write("mon_groups/b/mbm_L3_assignments", written)) == expected
    assert lab.status == status


def test_the_default_mode_counts_everything_and_has_no_counters_to_show(lab: Lab) -> None:
    lab.mkdir("mon_groups/a")
    tid = lab.tasks.fork()
    lab.write("mon_groups/a/tasks", str(tid))
    lab.run(tid, 1.0)
    lab.model.accounting.look()
    lab.write(INFO + "mbm_assign_mode", "default\n")
    assert lab.read(INFO + "mbm_assign_mode") == "[default]\nmbm_event\n"
    assert counter(lab, "a") == "0"  # a change restarts all
    for path in ("available_mbm_cntrs", "mbm_assign_on_mkdir", "event_configs/mbm_total_bytes/event_filter"):
        assert refused(lambda path=path: lab.read(INFO + path)) == "EINVAL"  # type: ignore[misc]
        assert lab.status == OFF
    assert refused(lambda: lab.read("mbm_L3_assignments")) == "EINVAL"
    assert refused(lambda: lab.write("mbm_L3_assignments", "mbm_total_bytes:0=e\n")) == "EINVAL"
    assert lab.status == "mbm_event mode is not enabled\n"
    assert lab.read(INFO + "num_mbm_cntrs") == "0=5;1=5\n"
    lab.write(INFO + "mbm_assign_mode", "mbm_event\n")
    assert lab.read(INFO + "available_mbm_cntrs") == "0=5;1=5\n"
    assert counter(lab, "a") == "Unassigned"


def test_without_assignment_at_mkdir_new_groups_have_none(lab: Lab) -> None:
    assert refused(lambda: lab.write(INFO + "mbm_assign_on_mkdir", "2")) == "EINVAL"
    assert lab.status == "mbm_assign_on_mkdir: Invalid input\n"
    lab.write(INFO + "mbm_assign_on_mkdir", "0")
    lab.mkdir("mon_groups/a")
    assert counter(lab, "a") == "Unassigned"
    assert lab.read(INFO + "available_mbm_cntrs") == "0=3;1=3\n"


@pytest.mark.parametrize("path", ["available_mbm_cntrs", "mbm_assign_on_mkdir"])
def test_reading_clears_the_status(lab: Lab, path: str) -> None:
    refused(lambda: lab.write("tasks", "abc"))
    lab.read(INFO + path)
    assert lab.status == "ok\n"


def test_a_filter_lets_its_transactions_through_from_when_it_was_set(lab: Lab) -> None:
    lab.mkdir("mon_groups/a")
    tid = lab.tasks.fork()
    lab.write("mon_groups/a/tasks", str(tid))
    lab.run(tid, 1.0)
    path = INFO + "event_configs/mbm_total_bytes/event_filter"
    assert refused(lambda: lab.write(path, "local_reads,nonsense\n")) == "EINVAL"
    assert lab.status == "Invalid memory transaction type nonsense\n"
    assert refused(lambda: lab.write(path, "local_reads")) == "EINVAL"
    assert lab.status == "event_filter: Invalid input\n"
    assert counter(lab, "a") == str(GIB)
    lab.write(path, "remote_reads,local_reads\n")
    assert lab.read(path) == "local_reads,remote_reads\n"
    assert counter(lab, "a") == "0"
    lab.run(tid, 1.0)
    assert counter(lab, "a") == str(GIB * 5 // 8)
    assert int(counter(lab, "a", "mbm_local_bytes")) == 2 * (GIB * 3 // 4)


def test_all_transactions_together_are_the_whole_traffic() -> None:
    assert sum(TRANSACTIONS.values()) == 1
    assert sum(share for name, share in TRANSACTIONS.items() if name.startswith("local_")) * 4 == 3


def test_a_cache_that_goes_offline_has_no_counters(lab: Lab) -> None:
    lab.mkdir("mon_groups/a")
    lab.model.hotplug.set_domain("mon_L3_01", False)
    assert lab.read(INFO + "num_mbm_cntrs") == "0=5\n"
    assert lab.read("mbm_L3_assignments") == "mbm_total_bytes:0=e\nmbm_local_bytes:0=e\n"
    lab.model.hotplug.set_domain("mon_L3_01", True)
    assert lab.read(INFO + "available_mbm_cntrs") == "0=1;1=5\n"
    assert counter(lab, "a", domain=1) == "Unassigned"


@pytest.mark.parametrize(
    ("text", "value"), [("1", True), ("Yes", True), ("on\n", True), ("0\n", False), ("OFF", False), ("n", False)]
)
def test_truth_values(text: str, value: bool) -> None:
    assert parse_bool(text) is value


@pytest.mark.parametrize("text", ["", "2", "o", "\n", " 1"])
def test_no_truth_values(text: str) -> None:
    assert parse_bool(text) is None


@settings(deadline=None, max_examples=60)
@given(st.text(alphabet=st.sampled_from("mbm_total_bytes:01=e_*;\n "), max_size=30) | st.text(max_size=30))
def test_any_text_is_an_assignment_or_an_error(text: str) -> None:
    lab = Lab("amd-abmc", rmids=4, counters=3)
    for path in ("mbm_L3_assignments", INFO + "mbm_assign_mode", INFO + "event_configs/mbm_total_bytes/event_filter"):
        try:
            lab.write(path, text)
        except OSError as failure:
            assert failure.errno in (errno.EINVAL, errno.ENOENT, errno.ENOSPC)
    lab.write(INFO + "mbm_assign_mode", "mbm_event\n")
    free = lab.read(INFO + "available_mbm_cntrs")
    assert all(0 <= int(part.partition("=")[2]) <= 3 for part in free.split(";"))
