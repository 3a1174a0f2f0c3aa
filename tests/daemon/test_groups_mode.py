# SPDX-License-Identifier: Apache-2.0
"""``groups_mode`` and ``group``: mode and Unix group of begin and end values, also after a reload and a restart."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from pathlib import Path

import pytest

from resctrlmond.daemon.startup import give_to_group
from resctrlmond.resctrl.counters import Reading, parse_value
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.workloads.records.snapshot import Snapshots
from tests.daemon.conftest import Machine


def modes(machine: Machine) -> set[int]:
    """Return the modes of all folders with values of current and ended runs."""
    tops = [machine.run / "groups", machine.run / "completed"]
    folders = [*tops, *(path for top in tops for path in top.rglob("*") if path.is_dir() and not path.is_symlink())]
    return {stat.S_IMODE(folder.stat().st_mode) for folder in folders}


def configure(machine: Machine, mode: str) -> None:
    machine.config.write_text(f"group: 4242\nlog_level: debug\nsnapshot_ttl: 1h\ngroups_mode: {mode}\n")


def test_mode_applies_to_every_folder_after_start_reload_and_restart(machine: Machine) -> None:
    configure(machine, "0750")
    machine.start()
    for _ in range(2):
        machine.call("Create", key="again", claim="me")
        machine.call("Release", key="again", claim="me")
    machine.call("Create", key="current", claim="me")
    assert list((machine.run / "completed").iterdir()), "no run was moved to completed/"
    assert modes(machine) == {0o750}
    assert {path.stat().st_gid for path in (machine.run / "groups" / "current").iterdir()} == {4242}

    configure(machine, "0700")
    machine.reload()
    assert modes(machine) == {0o700}
    machine.call("Create", key="later", claim="me")
    machine.call("Release", key="later", claim="me")
    assert modes(machine) == {0o700}

    machine.stop()
    configure(machine, '"0755"')
    machine.start()
    assert modes(machine) == {0o755}


def test_mode_does_not_depend_on_the_umask(machine: Machine) -> None:
    configure(machine, "0750")
    machine.start("sh", "-c", 'umask 077 && exec "$@"', "sh")
    machine.call("Create", key="ended", claim="me")
    machine.call("Release", key="ended", claim="me")
    machine.call("Create", key="current", claim="me")
    assert modes(machine) == {0o750}


def test_containers_can_read_their_figures_although_other_users_cannot(machine: Machine) -> None:
    """The root of a container may be another user of the host: it has the last folder as a mount."""
    configure(machine, "0750")
    machine.start("sh", "-c", 'umask 077 && exec "$@"', "sh")
    folder = Path(machine.call("Expose", key="k", member="c1")["path"])
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755
    assert stat.S_IMODE((machine.run / "exposed").stat().st_mode) == 0o750
    configure(machine, "0700")
    machine.reload()
    assert stat.S_IMODE((machine.run / "exposed").stat().st_mode) == 0o700
    assert stat.S_IMODE(folder.stat().st_mode) == 0o755


def groups_of(machine: Machine) -> set[int]:
    """Return the Unix groups of the records and of all files with values, without links."""
    tops = [machine.run / name for name in ("records", "groups", "completed")]
    found = [*tops, *(path for top in tops for path in top.rglob("*") if not path.is_symlink())]
    return {path.stat().st_gid for path in found}


def test_records_and_values_of_earlier_starts_get_the_new_group(machine: Machine) -> None:
    machine.start()
    for _ in range(2):
        machine.call("Create", key="again", claim="me")
        machine.call("Release", key="again", claim="me")
    machine.call("Create", key="current", claim="me")
    machine.stop()
    assert groups_of(machine) == {4242}
    machine.config.write_text("group: 4343\nsnapshot_ttl: 1h\n")
    machine.start()
    assert groups_of(machine) == {4343}


def test_target_of_a_link_keeps_its_group(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "groups", tmp_path / "elsewhere"
    folder.mkdir()
    elsewhere.mkdir()
    (elsewhere / "file").write_text("")
    (folder / "link").symlink_to(elsewhere)
    (folder / "file").symlink_to(elsewhere / "file")
    before = elsewhere.stat().st_gid
    give_to_group(str(folder), 4242)
    assert folder.stat().st_gid == 4242
    assert {elsewhere.stat().st_gid, (elsewhere / "file").stat().st_gid} == {before}


@pytest.mark.parametrize("mode", [0o750, 0o700])
def test_target_of_a_link_keeps_its_mode(tmp_path: Path, mode: int) -> None:
    groups, completed, elsewhere = (tmp_path / name for name in ("groups", "completed", "elsewhere"))
    for folder in (groups, completed, elsewhere):
        folder.mkdir(mode=0o755)
    (groups / "link").symlink_to(elsewhere)
    snapshots = Snapshots(str(groups), str(completed))
    snapshots.set_mode(mode)
    snapshots.begin(
        "web", "2026-01-01T00:00:00Z", "/x", [Reading("mon_L3_00", "mbm_total_bytes", parse_value("1\n"))]
    )
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o755
    assert {stat.S_IMODE(path.stat().st_mode) for path in (groups / "web").rglob("*") if path.is_dir()} == {mode}


def test_folder_gets_its_group_and_mode_after_all_below_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups, completed = tmp_path / "groups", tmp_path / "completed"
    for folder in (groups, groups / "a", groups / "a" / "b", completed):
        folder.mkdir(mode=0o755)
    (groups / "a" / "b" / "file").write_text("")
    before = groups.stat().st_gid
    with monkeypatch.context() as patched:
        for name in ("chown", "chmod"):
            patched.setattr(os, name, refusing(getattr(os, name), groups / "a" / "b"))
        with pytest.raises(ResctrlError):
            give_to_group(str(groups), 4242)
        with pytest.raises(ResctrlError):
            Snapshots(str(groups), str(completed)).set_mode(0o775)
    assert (groups.stat().st_gid, stat.S_IMODE(groups.stat().st_mode)) == (before, 0o755)
    # The next start does it.
    give_to_group(str(groups), 4242)
    assert {path.stat().st_gid for path in (groups, *groups.rglob("*"))} == {4242}
    Snapshots(str(groups), str(completed)).set_mode(0o775)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (groups, groups / "a", groups / "a" / "b")} == {0o775}


def test_folder_that_has_its_group_is_not_walked(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    os.chown(tmp_path, -1, 4242)
    give_to_group(str(tmp_path), 4242)
    assert (tmp_path / "file").stat().st_gid != 4242


def refusing(call: Callable[..., None], path: Path) -> Callable[..., None]:
    """Return the system call, which fails for that path."""

    def failing(name: str | Path, *arguments: int, **options: bool) -> None:
        if str(name) == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(name))
        call(name, *arguments, **options)

    return failing
