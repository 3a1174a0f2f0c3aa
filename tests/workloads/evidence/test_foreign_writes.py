# SPDX-License-Identifier: Apache-2.0
"""Doubts that writes of other programs raise, and the group and the events that each is about."""

from __future__ import annotations

import pytest

from resctrlmond.resctrl.witness import Write
from resctrlmond.workloads.evidence.foreign_writes import doubt_by, is_about_group
from resctrlmond.workloads.figures.reasons import text_of

TRAFFIC, LOCAL = "mbm_total_bytes", "mbm_local_bytes"
BOTH = {TRAFFIC, LOCAL}
CPUS = "another program gave the group CPUs"
RESET = "which may have reset the counter"


def written(file: str, parent: str, *, is_refused: bool = False) -> Write:
    return Write(1, 2, 3, 4, is_refused, file, parent, "sh")


@pytest.mark.parametrize(
    ("file", "parent", "of_group", "events", "text"),
    [
        ("cpus", "k", True, set(), CPUS),
        ("cpus_list", "k", True, set(), CPUS),
        ("mbm_L3_assignments", "k", True, BOTH, f"wrote to k/mbm_L3_assignments, {RESET}"),
        ("mbm_MB_assignments", "/", True, BOTH, RESET),
        ("mbm_assign_mode", "L3_MON", False, BOTH, f"wrote to L3_MON/mbm_assign_mode, {RESET}"),
        ("mbm_assign_mode", "MB_MON", False, BOTH, RESET),
        ("mbm_total_bytes_config", "L3_MON", False, {TRAFFIC}, RESET),
        ("event_filter", LOCAL, False, {LOCAL}, f"wrote to {LOCAL}/event_filter, {RESET}"),
        ("event_filter", "mbm_new_bytes", False, BOTH, RESET),
        ("kernel_mode", "info", False, set(), "the kernel may have counted its work"),
        ("kernel_mode_assignment", "info", False, set(), "another program wrote to info/kernel_mode_assignment"),
    ],
)
def test_doubt_by_a_write(file: str, parent: str, of_group: bool, events: set[str], text: str) -> None:
    found = doubt_by(written(file, parent))
    assert found is not None
    assert (is_about_group(written(file, parent)), events <= set(found.events), not found.events or bool(events)) == (
        of_group,
        True,
        True,
    )
    assert text in text_of(found)


@pytest.mark.parametrize("file", ["tasks", "mode", "size", "max_threshold_occupancy", "snc_nodes_per_l3_cache"])
def test_other_files_change_nothing_that_counts(file: str) -> None:
    assert doubt_by(written(file, "k")) is None


def test_refused_write_may_have_reset_counters_but_has_given_no_cpus() -> None:
    """The kernel changes what the text of one write names first, before it refuses what follows."""
    assert doubt_by(written("cpus", "k", is_refused=True)) is None
    assert doubt_by(written("mbm_L3_assignments", "k", is_refused=True)) is not None
