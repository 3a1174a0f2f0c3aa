# SPDX-License-Identifier: Apache-2.0
"""The keys ``events`` and ``snapshot`` of profiles: which events are shown, and whether files are kept."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.workloads.model.errors import NoSuchWorkload
from resctrlmond.workloads.model.event_globs import problem_of, selects, unmatched
from resctrlmond.workloads.model.reports import Facts
from resctrlmond.workloads.model.states import NameKind, Quality
from resctrlmond.workloads.profiles.profile import Profile, Profiles
from resctrlmond.workloads.profiles.requests import Assigned
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.move import move
from resctrlmond.workloads.verbs.read import nested_totals, read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.builders import total_of
from tests.workloads.conftest import Host, assignment, machine

FACTS = Facts(annotations={}, namespace="", image="", container="")
ENERGY = ("core_energy",)


@pytest.fixture
def host(tmp_path: Path) -> Iterator[Host]:
    with machine(tmp_path, "intel-aet", 8, residue=3) as (made, _):
        yield made


@pytest.fixture
def spawn(host: Host, process: Callable[[], subprocess.Popen[bytes]]) -> Callable[[], int]:
    """Start a process that has a virtual task; returns its id."""

    def start() -> int:
        return Control(host.mountpoint).spawn(tid=process().pid)

    return start


def use(host: Host, **keys: object) -> None:
    """Give every container a profile with these keys."""
    profile = Profile("p", **keys)  # type: ignore[arg-type]
    host.ctx.config.profiles = Profiles({"p": profile}, default="p", default_origin="F:1")


def begin(host: Host, pid: int, key: str = "k", *, nested: bool = False) -> Assigned:
    return assign(host.ctx, assignment(key, pid, member=key, kind="container", facts=FACTS, nested=nested))


def shown_events(host: Host, key: str = "k") -> set[str]:
    """Return the events in the totals and readings of Read."""
    _, readings, totals = read(host.ctx, key)
    return {total.event.name for total in totals} | {reading.event for reading in readings}


@pytest.mark.parametrize(
    ("globs", "selected"),
    [
        ((), {"core_energy", "mbm_local_bytes", "mbm_total_bytes", "llc_occupancy"}),
        (("mbm_*",), {"mbm_local_bytes", "mbm_total_bytes"}),
        (("core_energy", "mbm_*", "!mbm_local*"), {"core_energy", "mbm_total_bytes"}),
        (("!llc_occupancy", "*"), {"core_energy", "mbm_local_bytes", "mbm_total_bytes"}),
        (("!*", "*"), set()),
        (("core_energ",), set()),
    ],
)
def test_globs_select_events(globs: tuple[str, ...], selected: set[str]) -> None:
    names = ("core_energy", "mbm_local_bytes", "mbm_total_bytes", "llc_occupancy")
    assert {name for name in names if selects(globs, name)} == selected


def test_globs_that_match_no_event_are_found() -> None:
    assert unmatched(["mbm_*", "!llc*", "core_energy"], ["mbm_total_bytes"]) == ["!llc*", "core_energy"]


@pytest.mark.parametrize("glob", ["", "!", "a b", "mbm/total", "x" * 65, "mbm_\n"])
def test_globs_that_no_event_can_match_are_refused(glob: str) -> None:
    assert problem_of(glob)


def test_files_and_figures_have_only_the_selected_events(host: Host, spawn: Callable[[], int]) -> None:
    use(host, events=("core_energy", "mbm_*", "!mbm_local_bytes"))
    wanted = {"core_energy", "mbm_total_bytes"}
    pid = spawn()
    begin(host, pid)
    Control(host.mountpoint).run(pid, 1_000_000_000)

    def file_events() -> set[str]:
        names = {Path(name).name for name in host.files("k") if name.startswith("mon_data/")}
        return {name.removesuffix(".begin").removesuffix(".end") for name in names}

    assert file_events() == shown_events(host) == wanted
    host.manager.maintenance.tick()
    assert {line.split()[0] for line in host.files("k")["quality"].splitlines()} == wanted
    (usage,) = host.manager.usages.read_all()
    assert {total.event.name for total in usage.totals} == wanted
    assert {reading.event for reading in usage.readings} == wanted
    assert total_of(usage.totals).number
    released = release(host.ctx, "k", owner="test")
    assert {total.event.name for total in released.totals} == file_events() == wanted
    assert {line.split()[0] for line in host.files("k")["quality"].splitlines()} == wanted
    host.check()


def test_events_stay_selected_over_a_restart_a_move_and_a_loss(host: Host, spawn: Callable[[], int]) -> None:
    use(host, events=ENERGY)
    pid = spawn()
    begin(host, pid)
    host.restart()
    assert shown_events(host) == {"core_energy"}
    host.make_class("other")
    move(host.ctx, "k", "other")
    host.check()
    links = [name for name, text in host.files("k").items() if text.startswith("-> ")]
    assert {Path(name).name for name in links} == {"core_energy"}
    Path(host.tree.full_path(host.get("k").first.ref)).rmdir()
    host.manager.maintenance.tick()
    for run in host.ctx.runs.all():
        run.resume_try = None
    assign(host.ctx, assignment("k", pid, member="again"))
    assert host.get("k").generation == 2
    assert shown_events(host) == {"core_energy"}
    release(host.ctx, "k", owner="test")
    host.check()


def test_reload_changes_new_runs_only(host: Host, spawn: Callable[[], int]) -> None:
    use(host, events=ENERGY)
    begin(host, spawn())
    use(host, events=("mbm_total_bytes",), keeps_files=False)
    assign(host.ctx, assignment("k", spawn(), member="second", kind="container", facts=FACTS))
    begin(host, spawn(), key="later")
    assert shown_events(host) == {"core_energy"}
    assert shown_events(host, "later") == {"mbm_total_bytes"}
    release(host.ctx, "k", owner="test")
    host.manager.tick()
    assert host.get("k").state.is_over  # its files are kept, as when it began
    release(host.ctx, "later", owner="test")
    host.manager.tick()
    assert host.ctx.store.get("later") is None


def test_a_hidden_event_still_decides_what_unavailable_means(host: Host, spawn: Callable[[], int]) -> None:
    """The registers of a package become valid together: with a number of ``activity``, this is not 0 exact."""
    use(host, events=ENERGY)
    control = Control(host.mountpoint)
    control.set_faults(Fault(group="mon_groups/k", event="core_energy", answer="Unavailable"))
    pid = spawn()
    begin(host, pid)
    control.set_faults()
    control.run(pid, 1_000_000_000)
    host.restart()
    for totals in (read(host.ctx, "k")[2], release(host.ctx, "k", owner="test").totals):
        (energy,) = totals
        assert (energy.number, energy.quality) == (None, Quality.UNKNOWN)
    assert host.files("k")["quality"].startswith("core_energy unknown ")


def test_hidden_events_are_in_the_figures_of_the_workload_around(host: Host, spawn: Callable[[], int]) -> None:
    pid = spawn()
    assign(host.ctx, assignment("outer", pid, member="outer"))
    use(host, events=ENERGY)
    begin(host, pid, nested=True)
    Control(host.mountpoint).run(pid, 1_000_000_000)
    inner = host.ctx.quality.final_totals
    assert shown_events(host) == {"core_energy"}
    release(host.ctx, "k", owner="test")
    outer, _, own = read(host.ctx, "outer")
    nested = {total.event.name: total for total in nested_totals(host.ctx, outer, own)}
    assert nested["mbm_total_bytes"].number == total_of(inner(host.get("k"))).number
    assert nested["mbm_total_bytes"].number


def test_all_events_stay_in_the_view_of_the_machine(host: Host, spawn: Callable[[], int]) -> None:
    use(host, events=ENERGY)
    host.ctx.machine.read()
    pid = spawn()
    begin(host, pid)
    Control(host.mountpoint).run(pid, 1_000_000_000)
    release(host.ctx, "k", owner="test")
    pools = host.ctx.machine.read().pools
    tracked = [use.number for use in pools if use.event.name == "mbm_total_bytes" and use.pool == "tracked"]
    assert sum(number or 0 for number in tracked) > 0


def test_hidden_events_and_runs_without_files_are_in_the_sums(host: Host, spawn: Callable[[], int]) -> None:
    use(host, events=ENERGY, keeps_files=False)
    pid = spawn()
    begin(host, pid)
    Control(host.mountpoint).run(pid, 1_000_000_000)
    (running,) = [one for one in host.manager.usages.read_sums().names[NameKind.PROFILE] if one.name == "p"]
    hidden = running.amounts["mbm_total_bytes"]
    assert sum(hidden.values()) > 0
    assert {total.event.name for usage in host.manager.usages.read_all() for total in usage.totals} == set(ENERGY)
    release(host.ctx, "k", owner="test")
    host.manager.tick()
    host.restart()
    (ended,) = [one for one in host.manager.usages.read_sums().names[NameKind.PROFILE] if one.name == "p"]
    assert ended.amounts["mbm_total_bytes"] == hidden
    assert sum(ended.ends.values()) == 1


def test_files_that_are_not_kept_are_removed_at_the_end(host: Host, spawn: Callable[[], int]) -> None:
    use(host, keeps_files=False)
    pid = spawn()
    begin(host, pid)
    Control(host.mountpoint).run(pid, 1_000_000_000)
    host.manager.tick()
    assert any(name.endswith(".begin") for name in host.files("k"))
    # A daemon that is killed needs the begin values.
    host.restart()
    released = release(host.ctx, "k", owner="test")
    assert total_of(released.totals).number
    host.ctx.config.profiles = Profiles()
    host.restart()
    host.manager.tick()
    assert host.folder("groups") == host.folder("completed") == []
    with pytest.raises(NoSuchWorkload):
        read(host.ctx, "k")


def test_files_of_an_earlier_run_are_removed_too(host: Host, spawn: Callable[[], int]) -> None:
    use(host, keeps_files=False)
    begin(host, spawn())
    release(host.ctx, "k", owner="test")
    use(host)
    begin(host, spawn())
    assert host.folder("completed") == []
    assert host.get("k").generation == 2


def test_damaged_file_of_the_hidden_events_is_not_exact(host: Host, spawn: Callable[[], int]) -> None:
    """Without them, it is not known whether the package counted before."""
    use(host, events=ENERGY)
    control = Control(host.mountpoint)
    control.set_faults(Fault(group="mon_groups/k", event="core_energy", answer="Unavailable"))
    begin(host, spawn())
    control.set_faults()
    Path(host.run, "groups", "k", "unlisted.begin").write_text("damaged")
    try:
        (energy,) = release(host.ctx, "k", owner="test").totals
    except ResctrlError:
        return
    assert energy.quality is not Quality.EXACT
