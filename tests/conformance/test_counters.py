# SPDX-License-Identifier: Apache-2.0
"""Counter files: their text, and when a group begins to count."""

from __future__ import annotations

import os

from .actors import Actor
from .target import Resctrl


def counters(fs: Resctrl, group: str) -> dict[str, str]:
    return {
        f"{domain}/{event}": fs.read(group, "mon_data", domain, event) for domain in fs.domains for event in fs.events
    }


def test_files_of_one_number_have_the_number_and_a_newline(fs: Resctrl) -> None:
    """A counter is a decimal number and a newline."""
    fs.create("mon_groups/a")
    for group in ("", "mon_groups/a"):
        for name, text in counters(fs, group).items():
            assert text == f"{int(text)}\n", name


def test_a_new_group_begins_at_0(fs: Resctrl) -> None:
    """The traffic of a group without tasks is 0."""
    fs.create("mon_groups/a")
    assert {text for name, text in counters(fs, "mon_groups/a").items() if "mbm" in name} == {"0\n"}


def test_counters_of_a_group_created_again_begin_at_0(fs: Resctrl, actor: Actor) -> None:
    """A group does not have the traffic of a removed group of the same name."""
    fs.create("mon_groups/a")
    fs.write("mon_groups/a/tasks", actor.pid)
    fs.rmdir("mon_groups/a")
    fs.create("mon_groups/a")
    assert {text for name, text in counters(fs, "mon_groups/a").items() if "mbm" in name} == {"0\n"}


def test_traffic_never_decreases(fs: Resctrl, actor: Actor) -> None:
    """The traffic of a monitoring group never decreases."""
    fs.create("mon_groups/a")
    fs.write("mon_groups/a/tasks", actor.pid)
    actor.fork()
    values = [int(counters(fs, "mon_groups/a")["mon_L3_00/mbm_total_bytes"]) for _ in range(5)]
    assert values == sorted(values)


def test_a_control_group_counts_its_monitoring_groups(fs: Resctrl) -> None:
    """Root counts no less than a monitoring group in it."""
    fs.create("mon_groups/a")
    fs.write("mon_groups/a/tasks", "0")
    child = int(counters(fs, "mon_groups/a")["mon_L3_00/mbm_total_bytes"])
    assert int(counters(fs, "")["mon_L3_00/mbm_total_bytes"]) >= child
    fs.write("tasks", "0")


def test_one_descriptor_reads_again(fs: Resctrl) -> None:
    """An open counter can be read any number of times with pread."""
    fs.create("mon_groups/a")
    fd = os.open(fs.path("mon_groups/a/mon_data/mon_L3_00/mbm_total_bytes"), os.O_RDONLY)
    try:
        assert all(os.pread(fd, 64, 0).strip().isdigit() for _ in range(10))
    finally:
        os.close(fd)
