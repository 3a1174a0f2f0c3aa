# SPDX-License-Identifier: Apache-2.0
"""One entry in the journal for each ended workload, whatever fails, and a kill at any step of the end."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import pytest

from resctrlmond.daemon import ledger as ledger_module
from resctrlmond.daemon.ledger import Ledger, duration, entry_of, message, recorded_in_journal, run_of
from resctrlmond.resctrl.counters import event
from resctrlmond.resctrl.errors import NotRead
from resctrlmond.resctrl.witness import Watch
from resctrlmond.service.journal import JournalSocket
from resctrlmond.service.message_ids import MessageId
from resctrlmond.sim.fuse.mount import Simulation
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.model.errors import NotWritten
from resctrlmond.workloads.model.names import unit_of
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Member, Proof, State, Workload
from resctrlmond.workloads.records.atomic_files import write_file
from resctrlmond.workloads.verbs.create import create
from resctrlmond.workloads.verbs.release import release
from tests.daemon.ledger_host import FileJournal, LedgerHost
from tests.daemon.test_journal import Journal
from tests.wait import wait_until, wait_until_served
from tests.workloads.builders import workload
from tests.workloads.conftest import MARK
from tests.workloads.groups.test_cut import Fuse, cut

ROOT = Path(__file__).parents[2]
KEY = "web"
TOTALS = [
    Total(event("core_energy"), 12345, Quality.EXACT),
    Total(event("mbm_total_bytes"), 3 << 30, Quality.LATE, "a task joined late"),
    Total(event("llc_occupancy"), 5, Quality.EXACT),
]


def ended(key: str = KEY, **more: object) -> Workload:
    times = {"created_at": "2026-11-01T00:00:00.000000Z", "created_ns": 10**9, "completed_ns": 183 * 10**9}
    return workload(key, State.COMPLETED, completed_at="2026-11-01T00:03:02.000000Z", **(times | more))


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    made = Journal(tmp_path / "journal")
    yield made
    made.socket.close()


@pytest.fixture(autouse=True)
def closed_sockets(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Close the sockets of all ledgers after a test."""
    made: list[JournalSocket] = []
    create = JournalSocket.__init__

    def created(self: JournalSocket, path: str) -> None:
        made.append(self)
        create(self, path)

    with monkeypatch.context() as patched:
        patched.setattr(JournalSocket, "__init__", created)
        yield
    for socket in made:
        socket.close()


def a_ledger(
    tmp_path: Path, recorded: Callable[[Collection[str]], set[str] | None] = lambda _: set(), *, started: bool = True
) -> Ledger:
    socket = JournalSocket(str(tmp_path / "journal"))
    made = Ledger(str(tmp_path / "ledger"), "boot", socket, lambda _: TOTALS, recorded)
    if started:
        made.started()
        made.settle()
    return made


def files(tmp_path: Path) -> list[str]:
    folder = tmp_path / "ledger"
    return sorted(os.listdir(folder)) if folder.exists() else []


# -- the entry


def test_entry_states_what_the_workload_used(journal: Journal, tmp_path: Path) -> None:
    attributes = {"pod.namespace": "default", "pod.name": "web-1", "container.name": "nginx"}
    cgroup = "/sys/fs/cgroup/user.slice/user-1000.slice/user@1000.service/app.slice/web.service"
    member = Member(id="m", kind="service", owner="me", cgroup=cgroup)
    a_ledger(tmp_path).record(ended(attributes=attributes, members=(member,), generation=3, reason="released"))
    entry = {name: value.decode() for name, value in journal.entry().items()}
    assert len(entry.pop("RESCTRLMON_RUN")) == 32
    assert entry == {
        "MESSAGE": "default/web-1: Used 12.3 kJ core energy, 3.0 GiB memory traffic (late) in 3min 2s.",
        "MESSAGE_ID": MessageId.ENDED,
        "PRIORITY": "6",
        "SYSLOG_IDENTIFIER": "resctrlmond",
        "OBJECT_SYSTEMD_UNIT": "user@1000.service",
        "RESCTRLMON_KEY": "web",
        "RESCTRLMON_GENERATION": "3",
        "RESCTRLMON_CLASS": "/",
        "RESCTRLMON_NAMESPACE": "default",
        "RESCTRLMON_POD": "web-1",
        "RESCTRLMON_CONTAINER": "nginx",
        "RESCTRLMON_UNIT": "user@1000.service",
        "RESCTRLMON_USER": "1000",
        "RESCTRLMON_STATE": "completed",
        "RESCTRLMON_END_REASON": "released",
        "RESCTRLMON_CREATED": "2026-11-01T00:00:00.000000Z",
        "RESCTRLMON_ENDED": "2026-11-01T00:03:02.000000Z",
        "RESCTRLMON_DURATION_USEC": "182000000",
        "RESCTRLMON_QUALITY": "late",
        "RESCTRLMON_QUALITY_REASON": "a task joined late",
        "RESCTRLMON_TOTAL_CORE_ENERGY": "12345",
        "RESCTRLMON_QUALITY_CORE_ENERGY": "exact",
        "RESCTRLMON_TOTAL_MBM_TOTAL_BYTES": str(3 << 30),
        "RESCTRLMON_QUALITY_MBM_TOTAL_BYTES": "late",
    }


def test_entry_has_the_events_that_the_profile_selects(journal: Journal, tmp_path: Path) -> None:
    a_ledger(tmp_path).record(ended(events=("core_*",)))
    entry = journal.entry()
    assert entry["RESCTRLMON_TOTAL_CORE_ENERGY"] == b"12345"
    assert not [name for name in entry if "MBM" in name]
    assert entry["RESCTRLMON_QUALITY"] == b"exact"


def test_entry_has_the_cpu_time_that_the_witness_has_shown(journal: Journal, tmp_path: Path) -> None:
    proof = Proof(
        watch=Watch(0, 0), until_ns=1, cgroups=(11,), inside={11: 2_500_000_999}, outside={11: {11: 40_000_000}}
    )
    a_ledger(tmp_path).record(ended(proof=proof))
    entry = journal.entry()
    assert entry["RESCTRLMON_CPU_TIME_USEC"] == b"2500000"
    assert entry["RESCTRLMON_CPU_TIME_OUTSIDE_USEC"] == b"40000"


def test_attribute_cannot_attach_the_entry_to_a_unit_or_forge_lines(journal: Journal, tmp_path: Path) -> None:
    attributes = {"unit": "ssh.service", "pod.name": "a\nOBJECT_SYSTEMD_UNIT=ssh.service\x1b[2J"}
    a_ledger(tmp_path).record(ended(attributes=attributes))
    entry = journal.entry()
    assert "OBJECT_SYSTEMD_UNIT" not in entry
    assert entry["RESCTRLMON_UNIT"] == b"ssh.service"
    assert b"\x1b" not in b"".join(entry.values())


def test_members_of_several_units_attach_the_entry_to_none() -> None:
    members = tuple(
        Member(id=name, kind="container", owner="me", cgroup=f"/sys/fs/cgroup/k.slice/{name}.scope") for name in "ab"
    )
    entry = entry_of(ended(members=members), "0" * 32, TOTALS)
    assert "OBJECT_SYSTEMD_UNIT" not in entry


def test_unknown_use_is_unknown_with_its_reason() -> None:
    entry = entry_of(ended(reason="released; it never had an RMID"), "0" * 32, [])
    assert entry["RESCTRLMON_QUALITY"] == "unknown"
    assert entry["RESCTRLMON_QUALITY_REASON"] == "released; it never had an RMID"
    assert entry["MESSAGE"] == "web: Ended after 3min 2s, with unknown use: released; it never had an RMID."


def test_totals_that_cannot_be_read_are_unknown(journal: Journal, tmp_path: Path) -> None:
    def fails(_: Workload) -> list[Total]:
        raise NotRead("cannot read the end values", path="/run/x", errno=5)

    made = Ledger(str(tmp_path / "ledger"), "boot", JournalSocket(journal.path), fails, lambda _: set())
    made.started()
    made.record(ended())
    entry = journal.entry()
    assert entry["RESCTRLMON_QUALITY"] == b"unknown"
    assert b"cannot read the end values" in entry["RESCTRLMON_QUALITY_REASON"]


def test_message_without_energy_and_traffic_states_the_time() -> None:
    totals = [Total(event("c6_res"), 7, Quality.EXACT)]
    assert message(ended(), totals, 0.4) == "web: Ended after 400ms."


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.0, "0ms"), (0.412, "412ms"), (59.9, "59s"), (182, "3min 2s"), (3900, "1h 5min"), (183600, "2d 3h")],
)
def test_duration_is_written_as_systemd_does(seconds: float, text: str) -> None:
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("cgroup", "unit"),
    [
        ("/sys/fs/cgroup/system.slice/web@1.service", "web@1.service"),
        ("/sys/fs/cgroup/machine.slice/libpod-12.scope/container", "libpod-12.scope"),
        ("/sys/fs/cgroup/batch", ""),
        ("/sys/fs/cgroup/.service/a b.service", ""),
    ],
)
def test_unit_is_the_first_service_or_scope_of_the_path(cgroup: str, unit: str) -> None:
    assert unit_of(cgroup) == unit


def test_large_entry_is_sent_in_a_memory_file(journal: Journal, tmp_path: Path) -> None:
    a_ledger(tmp_path).record(ended(reason="x" * (1 << 20)))
    entry, _ = journal.entry_in_memory_file()
    assert entry["MESSAGE_ID"] == MessageId.ENDED.encode()
    assert files(tmp_path) == []


# -- a journal that does not accept entries


def test_entries_wait_in_files_while_the_journal_is_missing(tmp_path: Path) -> None:
    made = a_ledger(tmp_path)
    made.record(ended())
    made.record(ended())
    made.retry()
    assert len(files(tmp_path)) == 1
    assert "those of ended workloads (1) wait" in made.describe()
    journal = Journal(tmp_path / "journal")
    with contextlib.closing(journal.socket):
        made.retry()
        assert [entry["RESCTRLMON_KEY"] for entry in journal.entries()] == [b"web"]
    assert files(tmp_path) == []
    assert made.describe() == ""


def test_entry_that_cannot_be_read_for_lack_of_descriptors_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = a_ledger(tmp_path)
    made.record(ended())
    journal = Journal(tmp_path / "journal")
    with contextlib.closing(journal.socket):
        with monkeypatch.context() as patched:
            patched.setattr(os, "open", no_descriptor)
            made.retry()
        assert len(files(tmp_path)) == 1
        made.retry()
        assert [entry["RESCTRLMON_KEY"] for entry in journal.entries()] == [b"web"]
    assert files(tmp_path) == []


def no_descriptor(path: str, *_: object, **_more: object) -> int:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), path)


def test_hanging_journal_blocks_nothing_and_loses_nothing(journal: Journal, tmp_path: Path) -> None:
    made = a_ledger(tmp_path)
    keys = [f"web{number}" for number in range(700)]
    for key in keys:
        made.record(ended(key))
    assert files(tmp_path)
    found = []
    while entries := journal.entries():
        found += entries
        made.retry()
    assert sorted(entry["RESCTRLMON_KEY"].decode() for entry in found) == sorted(keys)
    assert files(tmp_path) == []


def test_entries_beyond_the_limit_are_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ledger_module, "MAX_WAITING", 2)
    made = a_ledger(tmp_path)
    for number in range(5):
        made.record(ended(f"web{number}"))
    assert len(files(tmp_path)) == 2
    assert "lacks entries of ended workloads (3)" in made.describe()


def test_entry_that_can_neither_be_sent_nor_kept_keeps_the_record_open(tmp_path: Path) -> None:
    made = a_ledger(tmp_path)
    (tmp_path / "ledger").write_text("in the way")
    for _ in range(2):
        with pytest.raises(NotWritten):
            made.record(ended())
    (tmp_path / "ledger").unlink()
    made.record(ended())
    assert len(files(tmp_path)) == 1


def test_start_survives_a_folder_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "ledger").write_text("in the way")
    a_ledger(tmp_path)


def test_defect_does_not_keep_a_workload_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> dict[str, str]:
        raise ZeroDivisionError

    monkeypatch.setattr(ledger_module, "entry_of", broken)
    made = a_ledger(tmp_path)
    with caplog.at_level(logging.ERROR):
        made.record(ended())
    assert "lacks entries of ended workloads (1)" in made.describe()


def test_damaged_file_is_counted_and_does_not_hold_up_the_others(journal: Journal, tmp_path: Path) -> None:
    (tmp_path / "ledger").mkdir()
    (tmp_path / "ledger" / ("0" * 32)).write_text("{")
    (tmp_path / "ledger" / "other").write_text("not ours")
    made = a_ledger(tmp_path)
    made.record(ended())
    assert len(journal.entries()) == 1
    assert "lacks entries of ended workloads (1)" in made.describe()
    assert files(tmp_path) == ["other"]


# -- the start


def test_start_asks_the_journal_before_it_sends(journal: Journal, tmp_path: Path) -> None:
    known, new = ended("known"), ended("new")
    asked: list[set[str]] = []

    def recorded(runs: Collection[str]) -> set[str]:
        asked.append(set(runs))
        return {run_of(known, "boot")}

    made = a_ledger(tmp_path, recorded, started=False)
    made.record(known)
    made.record(new)
    assert journal.entries() == []
    made.started()
    made.settle()
    assert [entry["RESCTRLMON_KEY"] for entry in journal.entries()] == [b"new"]
    assert asked == [{run_of(known, "boot"), run_of(new, "boot")}]
    assert files(tmp_path) == []
    made.settle()
    assert len(asked) == 1


def test_entry_may_be_a_second_one_if_the_journal_cannot_be_read(journal: Journal, tmp_path: Path) -> None:
    made = a_ledger(tmp_path, lambda _: None, started=False)
    made.record(ended())
    made.started()
    made.settle()
    (entry,) = journal.entries()
    assert entry["RESCTRLMON_POSSIBLE_SECOND"] == b"1"


def test_later_ends_wait_for_no_answer_of_the_journal(journal: Journal, tmp_path: Path) -> None:
    made = a_ledger(tmp_path, started=False)
    made.record(ended("early"))
    made.started()  # and settle() hangs in the journal
    made.record(ended("later"))
    made.retry()
    assert [entry["RESCTRLMON_KEY"] for entry in journal.entries()] == [b"later"]


@pytest.mark.parametrize("script", ["exit 1", "exec sleep 600", "echo '['", "echo 1"])
def test_journal_that_cannot_be_read_is_unknown(script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "journalctl"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(stat.S_IRWXU)
    monkeypatch.setattr(ledger_module, "_JOURNALCTL", str(program))
    monkeypatch.setattr(ledger_module, "_JOURNALCTL_S", 1)
    assert recorded_in_journal({"0" * 32}) is None


def test_journal_is_asked_for_these_runs_of_root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "journalctl"
    answer = json.dumps({"RESCTRLMON_RUN": "a" * 32})
    program.write_text(f"#!/bin/sh\necho \"$@\" >>{tmp_path}/asked\n[ $1 = --sync ] || echo '{answer}'\n")
    program.chmod(stat.S_IRWXU)
    monkeypatch.setattr(ledger_module, "_JOURNALCTL", str(program))
    assert recorded_in_journal({"a" * 32}) == {"a" * 32}
    sync, query = (tmp_path / "asked").read_text().splitlines()
    assert sync == "--sync"
    assert {"_UID=0", f"MESSAGE_ID={MessageId.ENDED}", f"RESCTRLMON_RUN={'a' * 32}"} <= set(query.split())


# -- ends of real workloads on a simulated machine


@pytest.fixture
def host(tmp_path: Path) -> Iterator[LedgerHost]:
    before = os.getegid()
    os.setegid(MARK)
    for name in ("resctrl", "run"):
        (tmp_path / name).mkdir()
    try:
        with Simulation(str(tmp_path / "resctrl"), "intel-aet", 16):
            made = LedgerHost(str(tmp_path / "resctrl"), str(tmp_path / "run"), FileJournal(tmp_path / "sent"))
            yield made
            made.ctx.interference.close()
            made.clean()
    finally:
        os.setegid(before)


def test_end_has_one_entry_with_the_totals_of_its_record(host: LedgerHost, tmp_path: Path) -> None:
    journal = host.journal
    create(host.ctx, KEY, owner="me")
    workload = release(host.ctx, KEY, owner="me").workload
    assert workload.state is State.COMPLETED
    (entry,) = journal.entries()
    totals = {total.event.name: total for total in host.ctx.quality.final_totals(workload)}
    assert entry["RESCTRLMON_TOTAL_MBM_TOTAL_BYTES"] == str(totals["mbm_total_bytes"].number)
    assert entry["RESCTRLMON_QUALITY_CORE_ENERGY"] == totals["core_energy"].quality
    host.manager.maintenance.tick()
    create(host.ctx, KEY, owner="me")
    release(host.ctx, KEY, owner="me")
    assert [entry["RESCTRLMON_GENERATION"] for entry in journal.entries()] == ["1", "2"]


def test_lost_run_that_continues_has_no_entry_of_its_own(host: LedgerHost, tmp_path: Path) -> None:
    """The totals of the next run include those of the lost one."""
    journal = host.journal
    manager = host.manager
    create(manager.context, KEY, owner="me")
    os.rmdir(manager.context.tree.full_path(manager.context.store.known(KEY).first.ref))
    manager.maintenance.tick()
    assert manager.context.store.known(KEY).state is State.LOST
    assert journal.entries() == []
    release(manager.context, KEY, owner="me")
    assert [entry["RESCTRLMON_STATE"] for entry in journal.entries()] == ["lost"]


def test_failed_write_of_the_end_repeats_no_entry(
    host: LedgerHost, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = host.journal
    create(host.ctx, KEY, owner="me")

    def full(path: str, data: bytes, mode: int = 0o644) -> None:
        if b'"completed"' in data:
            raise OSError(28, "No space left on device", path)
        write_file(path, data, mode)

    with monkeypatch.context() as patched:
        patched.setattr("resctrlmond.workloads.records.store.write_file", full)
        with pytest.raises(NotWritten):
            release(host.ctx, KEY, owner="me")
    assert len(journal.entries()) == 1
    host.manager.maintenance.tick()
    assert host.get(KEY).state is State.COMPLETED
    assert len(journal.entries()) == 1


@pytest.fixture(scope="module")
def fuse() -> Fuse:
    return Fuse()


@pytest.mark.parametrize("accepts", [True, False])
def test_kill_at_any_step_of_an_end_leaves_exactly_one_entry(accepts: bool, host: LedgerHost, fuse: Fuse) -> None:
    is_complete = False
    for step in range(200):
        key = f"{KEY}{step}"
        create(host.ctx, key, owner="me")

        def end(key: str = key) -> None:
            host.journal.accepts = accepts
            release(host.ctx, key, owner="me")
            host.journal.accepts = True
            host.ledger.retry()

        is_complete = not cut(fuse, step, end)
        host.restart()
        if host.get(key).state is not State.COMPLETED:
            release(host.ctx, key, owner="me")
        host.check_ledger()
        if is_complete:
            break
    assert is_complete


_DAEMON = """
import asyncio, sys
from resctrlmond.configuration.config import Config
from resctrlmond.daemon import ledger
from resctrlmond.daemon.daemon import Daemon
from resctrlmond.daemon.startup import prepare
from resctrlmond.service.journal import JournalSocket

top = sys.argv[1]
config = Config(resctrl=f"{top}/resctrl", runtime_dir=f"{top}/run", varlink_socket=f"{top}/varlink", dbus=False)
setup = prepare(config, int(sys.argv[2]), allow_simulation=True)
made = ledger.ledger_of(config, setup, JournalSocket(f"{top}/journal"))
asyncio.run(Daemon(config, setup, lambda: config, ledger=made).run())
"""


def test_daemon_sends_entries_and_reports_those_that_wait(host: LedgerHost, tmp_path: Path) -> None:
    host.ctx.interference.close()
    daemon = subprocess.Popen([sys.executable, "-c", _DAEMON, str(tmp_path), str(MARK)], cwd=ROOT)

    def resctrlctl(*words: str) -> str:
        command = [sys.executable, "-m", "resctrlctl", "--socket", str(tmp_path / "varlink"), *words]
        return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout

    try:
        wait_until_served(tmp_path / "varlink")
        resctrlctl("create", KEY)
        resctrlctl("release", KEY)
        wait_until(lambda: "the journal does not accept entries" in resctrlctl("status", "--full"))
        journal = Journal(tmp_path / "journal")
        with contextlib.closing(journal.socket):
            journal.socket.settimeout(60)
            assert journal.entry()["RESCTRLMON_KEY"] == KEY.encode()
            resctrlctl("create", "db")
            resctrlctl("release", "db")
            assert journal.entry()["RESCTRLMON_KEY"] == b"db"
        wait_until(lambda: "the journal does not accept entries" not in resctrlctl("status", "--full"))
    finally:
        daemon.kill()
        daemon.wait()
