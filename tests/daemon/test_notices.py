# SPDX-License-Identifier: Apache-2.0
"""Messages for an operator: each is logged once, with an id that the catalogue and the manual page explain."""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from resctrlmond.daemon import notices as daemon_notices
from resctrlmond.daemon.group_losses import GroupLosses
from resctrlmond.daemon.notices import Notices
from resctrlmond.host import unit_globs
from resctrlmond.resctrl.errors import KernelRefused
from resctrlmond.resctrl.tree import Tree
from resctrlmond.service.message_ids import MessageId
from resctrlmond.sim.fuse.mount import Simulation, unmount
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.workload import Claim, EndRule, Group, GroupState, State, replace
from resctrlmond.workloads.records.record_format import UnreadableRecord
from tests.workloads.builders import workload
from tests.workloads.test_no_descriptors import left

ROOT = Path(__file__).parents[2]
CATALOG = (ROOT / "systemd" / "resctrlmond.catalog").read_text(encoding="utf-8")
CLAIM = Claim(SYSTEMD, "2026-11-24T08:00:00Z", EndRule.RELEASE)
RECORD = workload("web", class_="gold")


class Log:
    """The log of the daemon."""

    def __init__(self, caplog: pytest.LogCaptureFixture) -> None:
        self._caplog = caplog
        caplog.set_level(logging.DEBUG, "resctrlmond")

    def take(self) -> list[tuple[int, str, dict[str, Any]]]:
        """Return level, id and fields of each entry since the last call."""
        entries = [(entry.levelno, getattr(entry, "fields", {})) for entry in self._caplog.records]
        self._caplog.clear()
        return [(level, fields.get("MESSAGE_ID", ""), fields) for level, fields in entries]


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Log:
    return Log(caplog)


@pytest.fixture
def tree(tmp_path: Path) -> Iterator[Tree]:
    (tmp_path / "resctrl").mkdir()
    with Simulation(str(tmp_path / "resctrl"), "intel-rdt"):
        yield Tree.open(str(tmp_path / "resctrl"), allow_simulation=True)


def test_waiting_for_an_rmid_is_logged_once_for_each_run(tree: Tree, log: Log) -> None:
    notices = Notices(tree)
    pending = workload("web", State.PENDING, class_="gold")
    notices.changed("web", pending)
    notices.changed("web", pending.with_group(replace(pending.first, reason="in limbo", in_limbo=True)))
    assert log.take() == []
    waiting = pending.with_group(replace(pending.first, reason="Out of RMIDs"))
    for _ in range(3):
        notices.changed("web", waiting)
    ((level, kind, fields),) = log.take()
    assert (level, kind) == (logging.WARNING, MessageId.RMIDS_EXHAUSTED)
    assert (fields["RESCTRLMON_KEY"], fields["RESCTRLMON_CLASS"]) == ("web", "gold")
    notices.changed("web", replace(waiting, generation=2))
    assert [kind for _, kind, _ in log.take()] == [MessageId.RMIDS_EXHAUSTED]
    notices.changed("web", None)
    notices.changed("web", waiting)
    assert [kind for _, kind, _ in log.take()] == [MessageId.RMIDS_EXHAUSTED], "a dropped record was remembered"


def test_units_that_wait_are_logged_once_for_each_unit_and_user(
    tree: Tree, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user could fill the journal, and a unit of a low priority was logged each time that it gave up its RMID."""
    notices = Notices(tree)

    def levels(key: str, generation: int = 1) -> list[int]:
        pending = workload(key, State.PENDING, claims=(CLAIM,), generation=generation)
        notices.changed(key, pending.with_group(replace(pending.first, reason="Out of RMIDs")))
        return [level for level, _, _ in log.take()]

    assert [levels(key) for key in ("a.service", "b.service")] == [[logging.WARNING]] * 2
    assert [levels("a.service", generation) for generation in (2, 3)] == [[logging.DEBUG]] * 2
    notices.changed("b.service", None)
    assert levels("b.service") == [logging.DEBUG]
    assert levels("user-1000:a.service") == [logging.WARNING]
    assert [levels(f"user-1000:{number}.service") for number in range(3)] == [[logging.DEBUG]] * 3
    assert levels("user-1001:a.service") == [logging.WARNING]
    monkeypatch.setattr(daemon_notices, "_UNIT_S", 0.0)
    assert levels("user-1000:b.service") == [logging.WARNING]


def test_units_that_begin_to_wait_at_the_same_time_are_logged_and_no_verb_fails(
    tree: Tree, log: Log, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Assign failed with "dictionary changed size during iteration", although the record of the unit was written."""
    notices = Notices(tree)

    class Time(float):
        """Lets other threads run at each comparison."""

        def __gt__(self, other: float) -> bool:
            time.sleep(0.0001)
            return super().__gt__(other)

    def is_of_user(key: str) -> bool:
        time.sleep(0.0001)
        return unit_globs.is_of_user(key)

    monkeypatch.setattr(daemon_notices, "_UNIT_S", Time(600))
    monkeypatch.setattr(daemon_notices, "is_of_user", is_of_user)

    def wait(thread: int) -> None:
        for number in range(10):
            key = f"a-{thread}-{number}.service"
            pending = workload(key, State.PENDING, claims=(CLAIM,))
            notices.changed(key, pending.with_group(replace(pending.first, reason="Out of RMIDs")))

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(wait, range(4))) == [None] * 4
    assert [(level, kind) for level, kind, _ in log.take()] == [(logging.WARNING, MessageId.RMIDS_EXHAUSTED)] * 40


def test_verb_does_not_fail_with_a_notice(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    """The record is written then, and the watch must get the change."""

    def fail(_key: str, _group: Group) -> bool:
        raise RuntimeError("dictionary changed size during iteration")

    Notices(tree, fail).changed("web", workload("web", State.LOST, reason="gone"))
    assert "web: a change could not be logged" in caplog.text


def test_further_group_that_fails_is_logged_and_its_loss_only_with_the_workload(tree: Tree, log: Log) -> None:
    notices = Notices(tree)
    second = Group(folder="silver", class_="silver", name="web", state=GroupState.FAILED, reason="no such class")
    notices.changed("web", RECORD.with_group(second))
    assert [(level, kind) for level, kind, _ in log.take()] == [(logging.ERROR, MessageId.GROUP_FAILED)]
    lost = replace(second, state=GroupState.LOST)
    notices.changed("web", workload("web", State.LOST, class_="gold", reason="gone").with_group(lost))
    assert [(level, kind) for level, kind, _ in log.take()] == [(logging.WARNING, MessageId.GROUP_LOST)]


def test_unmount_is_logged_once_and_not_for_each_workload(tree: Tree, log: Log) -> None:
    notices = Notices(tree)
    notices.tick()
    assert log.take() == []
    assert unmount(tree.path)
    for key in ("one", "two"):
        notices.changed(key, workload(key, State.LOST, reason="unmounted"))
    notices.tick()
    assert [(level, kind) for level, kind, _ in log.take()] == [
        (logging.ERROR, MessageId.UNMOUNTED),
        (logging.INFO, ""),
        (logging.INFO, ""),
    ]
    with Simulation(tree.path, "intel-rdt"):
        notices.tick()
        notices.tick()
        assert len(log.take()) == 1, "the new mount is logged once"


def test_losses_by_a_new_mount_are_not_attributed_to_another_program(tree: Tree, log: Log) -> None:
    """Groups that were lost with an unmount were reported as removed by another program."""
    before = tree.mounting()
    seen_on = dict.fromkeys(("one", "two", "three"), before)
    notices = Notices(tree, lambda _key, group: seen_on[group.name] != tree.mounting())
    notices.losses = GroupLosses(lambda _: False)
    assert unmount(tree.path)
    with Simulation(tree.path, "intel-rdt"):
        for key in ("one", "two", "three"):
            notices.changed(key, workload(key, State.LOST, reason="mounted again"))
        assert [(level, kind) for level, kind, _ in log.take()] == [
            (logging.ERROR, MessageId.UNMOUNTED),
            (logging.INFO, ""),
            (logging.INFO, ""),
            (logging.INFO, ""),
        ]
        assert notices.losses.describe() == ""
        seen_on = dict.fromkeys(seen_on, tree.mounting())
        for key in ("one", "two", "three"):
            notices.changed(key, workload(key, State.LOST, reason="removed", generation=2))
        assert {kind for _, kind, _ in log.take()} == {MessageId.GROUP_LOST}
        assert "another program removes" in notices.losses.describe()


def test_unmount_without_lost_groups_is_logged(tree: Tree, log: Log) -> None:
    notices = Notices(tree)
    assert unmount(tree.path)
    notices.tick()
    assert [kind for _, kind, _ in log.take()] == [MessageId.UNMOUNTED]


def test_loss_is_logged_without_free_descriptors_and_no_verb_fails(tree: Tree, log: Log) -> None:
    """The check for the mount failed with EMFILE: the verb that had found the loss failed, and the loss was not
    logged."""
    notices = Notices(tree)
    with left(0):
        notices.changed("web", workload("web", State.LOST, class_="gold", reason="gone"))
    assert [(level, kind) for level, kind, _ in log.take()] == [(logging.WARNING, MessageId.GROUP_LOST)]
    assert unmount(tree.path)
    with left(0):
        notices.tick()
    notices.tick()
    assert [kind for _, kind, _ in log.take()] == [MessageId.UNMOUNTED]


def test_unreadable_records_and_failed_work_are_logged_with_their_ids(tree: Tree, log: Log) -> None:
    Notices.unreadable(UnreadableRecord("/run/r/k.json", "not a valid record"))
    Notices.unreadable(UnreadableRecord("/run/r/k.json", "version 2", is_of_other_version=True))
    Notices.unfinished("web", KernelRefused("cannot", path="/sys/x", errno=5))
    damaged, other, failed = log.take()
    assert damaged[1:2] + other[1:2] + failed[1:2] == (
        MessageId.RECORD_DAMAGED,
        MessageId.RECORD_OF_OTHER_VERSION,
        MessageId.UNFINISHED,
    )
    assert other[2]["RESCTRLMON_PATH"] == "/run/r/k.json"
    assert (failed[2]["RESCTRLMON_KEY"], failed[2]["RESCTRLMON_PATH"], failed[2]["ERRNO"]) == ("web", "/sys/x", "5")


# -- the catalogue and the manual page


def entries() -> dict[str, str]:
    """Return the catalogue's entries, by id."""
    parts = re.split(r"^-- ([0-9a-f]{32})\n", CATALOG, flags=re.MULTILINE)
    assert len(set(parts[1::2])) == len(parts[1::2])
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_every_id_is_in_catalogue_and_manual_page_and_is_used() -> None:
    assert entries().keys() == {kind.value for kind in MessageId}
    page = (ROOT / "man" / "resctrlmond.8.scd").read_text(encoding="utf-8")
    assert set(re.findall(r"^_([0-9a-f]{32})_$", page, re.MULTILINE)) == {kind.value for kind in MessageId}
    code = "".join(path.read_text(encoding="utf-8") for path in (ROOT / "resctrlmond").rglob("*.py"))
    for kind in MessageId:
        assert f"MessageId.{kind.name}" in code, kind
    assert f'"{MessageId.UNMONITORED}"' in (ROOT / "hook" / "oci_hook.c").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", MessageId)
def test_entry_has_subject_documentation_and_explanation(kind: MessageId) -> None:
    head, _, text = entries()[kind].partition("\n\n")
    fields = dict(line.split(": ", 1) for line in head.splitlines())
    assert fields.keys() == {"Subject", "Defined-By", "Documentation"}
    pages = re.findall(r"man:(\S+)\(([0-9])\)", fields["Documentation"])
    assert pages
    assert all((ROOT / "man" / f"{name}.{number}.scd").exists() for name, number in pages)
    assert len(text.split()) > 20
    assert max(map(len, text.splitlines())) <= 76
    assert set(re.findall(r"@(\w+)@", head + text)) <= {"RESCTRLMON_KEY", "RESCTRLMON_PATH"}


def test_commands_of_the_catalogue_exist() -> None:
    verbs = set(re.findall(r"^  resctrlctl (\S+)", CATALOG, re.MULTILINE))
    assert "status" in verbs, "the catalogue has no command, or not in the form that this test finds"
    for verb in verbs:
        done = subprocess.run(
            [sys.executable, "-m", "resctrlctl", verb, "--help"],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 0, verb
