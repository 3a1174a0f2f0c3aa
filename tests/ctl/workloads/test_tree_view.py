# SPDX-License-Identifier: Apache-2.0
"""Without the daemon, list and show read resctrl and the records, and change nothing.

The tree has plain files in the layout of resctrl, because these tests only read it.
"""

from __future__ import annotations

import dataclasses
import grp
import json
import os
import shutil
import time
from _collections_abc import dict_values
from pathlib import Path

import pytest

from resctrlctl.arguments.command_line import parse
from resctrlctl.base.errors import CommandError
from resctrlctl.screen.output import Json, Output
from resctrlctl.workloads import listing, source, tree_view
from resctrlctl.workloads.tree_view import TreeView, _records
from resctrlmond.resctrl.counters import Reading, parse_value
from resctrlmond.resctrl.tree import Tree
from resctrlmond.resctrl.witness import Watch
from resctrlmond.workloads.figures.reasons import Reason, doubt
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Claim, EndRule, Proof, State, Workload, replace
from resctrlmond.workloads.records.snapshot import Snapshots
from resctrlmond.workloads.records.store import Store
from tests.ctl.conftest import Ctl
from tests.workloads.builders import save, workload

NOW = "2026-11-21T11:13:22Z"
ENERGY = ("mon_PERF_PKG_00", "core_energy")
TRAFFIC = ("mon_L3_00", "mbm_total_bytes")
NOBODY = 65534


def make_group(root: Path, class_: str, name: str, tasks: str = "") -> Path:
    """Create the files of a monitoring group, with one counter that has a number and one that has none."""
    group = root / class_ / "mon_groups" / name
    for (domain, event), text in ((ENERGY, "21.500000\n"), (TRAFFIC, "Unavailable\n")):
        folder = group / "mon_data" / domain
        folder.mkdir(parents=True)
        (folder / event).write_text(text)
    (group / "tasks").write_text(tasks)
    return group


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A tree with the root and one more class, and a group in each."""
    root = tmp_path / "resctrl"
    make_group(root, "", "web")
    make_group(root, "gold", "stray", "17\n")
    (root / "info").mkdir()
    return root


@pytest.fixture
def run(tmp_path: Path, root: Path) -> Path:
    """The daemon's directory in /run, with the record and snapshot of ``web``, and of a run that is over."""
    run = tmp_path / "run"
    for name in ("records", "groups", "completed"):
        (run / name).mkdir(parents=True)
    nonce = os.stat(root / "mon_groups" / "web").st_mtime_ns
    records = Store(str(run / "records"))
    web = workload(
        "web",
        nonce=nonce,
        has_begin=True,
        claims=(Claim("oci", NOW, EndRule.CONTAINER),),
        attributes={"pod.name": "cart-0"},
        created_at=NOW,
        proof=Proof(watch=Watch(0, 0), until_ns=1),
    )
    save(records, web)
    save(
        records,
        workload(
            "gone",
            State.COMPLETED,
            has_begin=True,
            doubts=(doubt(Reason.NOT_INCLUDED, member="x", cause="why"),),
            completed_at=NOW,
            proof=Proof(watch=Watch(0, 0), until_ns=1),
        ),
    )
    snapshots = Snapshots(str(run / "groups"), str(run / "completed"))
    snapshots.begin("web", NOW, str(root / "mon_groups/web"), [Reading(*ENERGY, parse_value("20.000000"))])
    snapshots.begin("gone", NOW, "/none", [Reading(*TRAFFIC, parse_value("9007199254740993"))])
    snapshots.end("gone", NOW, [Reading(*TRAFFIC, parse_value("18014398509481987"))])
    return run


def view(root: Path, run: Path, gid: int | None = None) -> TreeView:
    """Return the view that ``TreeView.open`` returns if resctrl is mounted and ``gid`` is the mark."""
    records, _ = _records(str(run))
    return TreeView(Tree(str(root), None), os.getgid() if gid is None else gid, records, str(run))


def test_record_of_a_group_has_its_attributes_and_state(root: Path, run: Path) -> None:
    reply = view(root, run).workloads()
    by_key = {workload.key: workload for workload in reply.workloads}
    assert sorted(by_key) == ["gone", "stray", "web"]
    web = by_key["web"]
    assert (web.state, web.attributes, web.path) == (State.ACTIVE, {"pod.name": "cart-0"}, f"{root}/mon_groups/web")
    assert by_key["gone"].path is None
    assert reply.foreign == []


def test_marked_group_without_a_record_has_a_reason(root: Path, run: Path) -> None:
    stray = next(workload for workload in view(root, run).workloads().workloads if workload.key == "stray")
    assert (stray.class_, stray.state, stray.baseline) == ("gold", State.ACTIVE, Quality.UNKNOWN)
    assert stray.reason == "its record cannot be read"


def test_record_of_another_directory_is_ignored(root: Path, run: Path) -> None:
    os.utime(root / "mon_groups" / "web", ns=(1, 1))
    web = [
        workload for workload in view(root, run).workloads().workloads if workload.path == f"{root}/mon_groups/web"
    ]
    assert [workload.baseline for workload in web] == [Quality.UNKNOWN]


def test_group_without_the_mark_is_foreign_under_any_name(root: Path, run: Path) -> None:
    reply = view(root, run, gid=os.getgid() + 1).workloads()
    assert [other.path for other in reply.foreign] == [f"{root}/mon_groups/web", f"{root}/gold/mon_groups/stray"]
    assert not any(workload.path for workload in reply.workloads)
    with pytest.raises(CommandError) as failed:
        view(root, run, gid=os.getgid() + 1).read("stray")
    assert failed.value.status == 4


@pytest.mark.parametrize("is_there", [True, False], ids=["its group", "another group in its place"])
def test_observed_group_is_read_and_not_listed_as_foreign(root: Path, run: Path, is_there: bool) -> None:
    path = root / "mon_groups" / "web"
    inode = os.stat(path).st_ino + (not is_there)
    seen = workload(
        "web", nonce=inode, observed=True, has_begin=True, doubts=(doubt(Reason.OBSERVED),), created_at=NOW
    )
    save(Store(str(run / "records")), seen)
    (run / "records" / "gone.json").unlink()
    shutil.rmtree(root / "gold")
    here = view(root, run, gid=os.getgid() + 1)
    reply = here.workloads()
    assert [(one.key, one.observed, one.path) for one in reply.workloads] == [
        ("web", True, str(path) if is_there else None)
    ]
    assert [one.name for one in reply.foreign] == ([] if is_there else ["web"])
    energy = next(total for total in here.read("web").totals if total.event == "core_energy")
    assert (energy.value, energy.quality) == (
        ("1.500000", Quality.ESTIMATED) if is_there else (None, Quality.UNKNOWN)
    )


def test_records_are_not_searched_for_each_group(root: Path, run: Path) -> None:
    """A host may have hundreds of groups and thousands of records."""
    searches = 0

    class Records(dict[str, Workload]):
        def values(self) -> dict_values[str, Workload]:
            nonlocal searches
            searches += 1
            return super().values()

    for number in range(5):
        make_group(root, "", f"other-{number}")
    for gid in (os.getgid(), os.getgid() + 1):
        here = dataclasses.replace(view(root, run, gid=gid), records=Records(_records(str(run))[0]))
        here.workloads()
        here.read("web")
    assert searches == 2


def test_read_returns_counters_and_totals(root: Path, run: Path) -> None:
    reply = view(root, run).read("web")
    assert [(one.domain, one.event, one.value, one.text) for one in reply.readings] == [
        (*TRAFFIC, None, "Unavailable"),
        (*ENERGY, "21.500000", "21.500000"),
    ]
    energy = next(total for total in reply.totals if total.event == "core_energy")
    assert (energy.value, energy.unit) == ("1.500000", "joules")


def test_nothing_is_exact_that_only_the_daemon_can_know(root: Path, run: Path) -> None:
    """A group in which another program ran while no daemon looked was exact, and its CPU time that of long ago."""
    records = Store(str(run / "records"))
    web = next(one for one in records.read_all() if isinstance(one, Workload) and one.key == "web")
    proof = replace(web.proof, cgroups=(11,), entered={11: 0}, inside={11: 10**9})
    save(records, replace(web.with_group(replace(web.first, inodes={"mon_L3_00": 12})), proof=proof))
    save(records, workload("done", State.COMPLETED, has_begin=True, completed_at=NOW, proof=proof))
    here = view(root, run)
    reply = here.read("web")
    assert {total.quality for total in reply.totals} <= {Quality.ESTIMATED, Quality.UNKNOWN}
    energy = next(total for total in reply.totals if total.event == "core_energy")
    assert energy.reason is not None and energy.reason.endswith(": read without resctrlmond")
    assert (reply.workload.baseline, reply.workload.cpu_time_ns) == (Quality.ESTIMATED, None)
    # The record of an ended run has its end.
    done = here.read("done").workload
    assert (done.baseline, done.cpu_time_ns) == (Quality.EXACT, 10**9)


def test_read_shows_the_events_that_the_profile_selects(root: Path, run: Path) -> None:
    nonce = os.stat(root / "mon_groups" / "web").st_mtime_ns
    save(Store(str(run / "records")), workload("web", nonce=nonce, created_at=NOW, events=("mbm_*",)))
    reply = view(root, run).read("web")
    assert [one.event for one in reply.readings] == ["mbm_total_bytes"]
    assert [total.event for total in reply.totals] == ["mbm_total_bytes"]


def test_totals_of_an_ended_run_are_exact_integers(root: Path, run: Path) -> None:
    reply = view(root, run).read("gone")
    assert reply.readings == []
    assert [(total.value, total.quality) for total in reply.totals] == [("9007199254740994", Quality.LATE)]


def test_unknown_key_is_an_error(root: Path, run: Path) -> None:
    with pytest.raises(CommandError, match="cannot show 'missing': there is no such workload") as failed:
        view(root, run).read("missing")
    assert failed.value.status == 4


def test_reading_changes_nothing(root: Path, run: Path) -> None:
    def state() -> list[tuple[str, int, int]]:
        paths = sorted([*root.rglob("*"), *run.rglob("*")])
        return [(str(path), path.lstat().st_mtime_ns, path.lstat().st_size) for path in paths]

    before = state()
    view(root, run).workloads()
    view(root, run).read("web")
    assert state() == before


def test_records_that_are_missing_closed_or_not_a_directory(tmp_path: Path) -> None:
    assert _records(str(tmp_path / "never")) == ({}, [])
    records = tmp_path / "records"
    records.mkdir(0)
    as_root = os.geteuid() == 0
    if as_root:
        os.seteuid(NOBODY)
    try:
        known = _records(str(tmp_path))
    finally:
        if as_root:
            os.seteuid(0)
    note = f"only root and the group resctrlmon can read {records}: names, claims and members are not shown"
    assert known == ({}, [note])
    records.rmdir()
    records.write_text("not a directory")
    note = f"{records}: cannot list the records: Not a directory (ENOTDIR). Names, claims and members are not shown"
    assert _records(str(tmp_path)) == ({}, [note])


def test_root_that_is_not_resctrl_is_an_error(ctl: Ctl, tmp_path: Path) -> None:
    for arguments in (["list"], ["show", "web"]):
        done = ctl(*arguments, "--root", str(tmp_path))
        assert (done.returncode, done.stdout) == (3, "")
        assert done.stderr.startswith(f"resctrlctl: cannot read the groups: {tmp_path}: is not a resctrl filesystem")


@pytest.mark.parametrize("quiet", [False, True])
def test_list_falls_back_to_the_tree_with_a_note(
    root: Path, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, quiet: bool
) -> None:
    def open_view(path: str, *, simulation: bool, run: str) -> tuple[TreeView, list[str]]:
        assert (path, simulation, run) == ("/sys/fs/resctrl", False, "/run/resctrlmond")
        return here, ["a record is damaged"]

    here = view(root, run)
    monkeypatch.setattr(TreeView, "open", open_view)
    monkeypatch.setattr(source, "SOCKET", "/none/socket")
    args = parse(["list", "--socket", "/none/socket"])
    assert listing.list_workloads(args, Output(Json.SHORT, quiet=quiet)) == 0
    out, err = capsys.readouterr()
    assert [usage["workload"]["key"] for usage in json.loads(out)["usages"]] == ["stray", "web"]
    notes = [
        "resctrlctl: resctrlmond is not running: read from /sys/fs/resctrl",
        "resctrlctl: a record is damaged",
    ]
    assert err.splitlines() == ([] if quiet else notes)


def test_watch_lists_workloads_that_begin_and_omits_those_that_end(
    root: Path, run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also without any workload: it waits between two lists."""
    present = iter((["first"], [], ["second"]))

    def remove_records() -> None:
        for path in (run / "records").iterdir():
            path.unlink()

    def sleep(_seconds: float) -> None:
        remove_records()
        keys = next(present, None)
        if keys is None:
            raise KeyboardInterrupt
        for key in keys:
            save(Store(str(run / "records")), workload(key, State.PENDING))

    def open_view(*_: str, **_options: object) -> tuple[TreeView, list[str]]:
        return view(root, run), []

    remove_records()
    for name in ("mon_groups/web", "gold/mon_groups/stray"):
        shutil.rmtree(root / name)
    monkeypatch.setattr(TreeView, "open", open_view)
    monkeypatch.setattr(source, "SOCKET", "/none/socket")
    monkeypatch.setattr(time, "sleep", sleep)
    with pytest.raises(KeyboardInterrupt):
        listing.list_workloads(parse(["list", "--watch", "--socket", "/none/socket"]), Output(Json.SHORT, quiet=True))
    lists = [json.loads(line)["usages"] for line in capsys.readouterr().out.splitlines()]
    assert [[usage["workload"]["key"] for usage in usages] for usages in lists] == [["first"], [], ["second"]]


@pytest.mark.parametrize("words", [("list",), ("list", "--pods"), ("show", "web")])
def test_other_socket_does_not_fall_back_to_the_tree_of_the_machine(
    ctl: Ctl, tmp_path: Path, words: tuple[str, ...]
) -> None:
    done = ctl(*words, "--socket", str(tmp_path / "none"))
    assert (done.returncode, done.stdout) == (3, "")
    assert "omit --socket and RESCTRLMOND_SOCKET" in done.stderr
    assert "/sys/fs/resctrl" not in done.stderr


@pytest.mark.parametrize("name", ["", "none"])
def test_remedy_for_a_wrong_root_is_not_to_mount_there(ctl: Ctl, tmp_path: Path, name: str) -> None:
    """A mount would hide what is in the directory."""
    done = ctl("list", "--root", str(tmp_path / name))
    assert done.returncode == 3
    assert "mount -t" not in done.stderr
    assert "To list them: findmnt -t resctrl,fuse.resctrlmond-sim\n" in done.stderr


def test_mark_is_the_owning_group_of_the_records(root: Path, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration can name another group than resctrlmon."""
    monkeypatch.setattr(Tree, "open", lambda path, **_: Tree(path, None))
    monkeypatch.setattr(tree_view, "MARK", "nogroup")
    view, _ = TreeView.open(str(root), run=str(run))
    assert view.gid == (run / "records").stat().st_gid != grp.getgrnam("nogroup").gr_gid
