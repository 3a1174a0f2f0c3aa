# SPDX-License-Identifier: Apache-2.0
"""``groups_mode``: who may read begin and end values, also after a reload and a restart."""

from __future__ import annotations

import signal
import stat
from pathlib import Path

import pytest

from resctrlmond.groups.snapshot import Snapshots
from resctrlmond.resctrl.counters import Reading, parse_value
from tests.daemon.conftest import Machine


def modes(machine: Machine) -> set[int]:
    """The modes of all folders with values, the current and the ended runs'."""
    tops = [machine.run / "groups", machine.run / "completed"]
    folders = [*tops, *(path for top in tops for path in top.rglob("*") if path.is_dir() and not path.is_symlink())]
    return {stat.S_IMODE(folder.stat().st_mode) for folder in folders}


def configure(machine: Machine, mode: str) -> None:
    machine.config.write_text(f"group: 4242\nlog_level: debug\nsnapshot_ttl: 1h\ngroups_mode: {mode}\n")


def reload(machine: Machine) -> None:
    assert machine.daemon is not None
    machine.daemon.send_signal(signal.SIGHUP)
    assert machine.told("RELOADING=1")
    assert machine.told("READY=1")


def test_the_mode_holds_for_every_folder_after_start_reload_and_restart(machine: Machine) -> None:
    configure(machine, "0750")
    machine.start()
    for _ in range(2):
        machine.call("Create", key="again", claim="me")
        machine.call("Release", key="again", claim="me")
    machine.call("Create", key="stands", claim="me")
    assert list((machine.run / "completed").iterdir()), "no run was set aside"
    assert modes(machine) == {0o750}
    assert {path.stat().st_gid for path in (machine.run / "groups" / "stands").iterdir()} == {4242}

    configure(machine, "0700")
    reload(machine)
    assert modes(machine) == {0o700}
    machine.call("Create", key="later", claim="me")
    machine.call("Release", key="later", claim="me")
    assert modes(machine) == {0o700}

    machine.stop()
    configure(machine, '"0755"')
    machine.start()
    assert modes(machine) == {0o755}


@pytest.mark.parametrize("mode", [0o750, 0o700])
def test_a_folder_that_a_link_leads_to_keeps_its_mode(tmp_path: Path, mode: int) -> None:
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
