# SPDX-License-Identifier: Apache-2.0
"""The verb report, with a script in the place of journalctl, and with a real journald."""

from __future__ import annotations

import csv
import io
import json
import os
import shlex
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlctl.command import main
from resctrlctl.workloads import report
from resctrlctl.workloads.report import entry_of, grouped, is_of_service
from resctrlmond.resctrl.mounts import mounts
from resctrlmond.service.message_ids import MessageId
from tests.wait import wait_until

ROOT = Path(__file__).resolve().parents[3]
TRUSTED = {"_SYSTEMD_UNIT": "resctrlmond.service", "_UID": "0", "MESSAGE_ID": MessageId.ENDED.value}


def an_entry(number: int = 1, **fields: Any) -> dict[str, Any]:
    own = {
        "RUN": f"{number:032x}",
        "KEY": f"web{number}",
        "CLASS": "/",
        "DURATION_USEC": "1500000",
        "QUALITY": "exact",
        "TOTAL_CORE_ENERGY": "12.5",
        "QUALITY_CORE_ENERGY": "exact",
        "TOTAL_MBM_TOTAL_BYTES": "1048576",
        "QUALITY_MBM_TOTAL_BYTES": "exact",
    } | {name.upper(): value for name, value in fields.items()}
    return TRUSTED | {f"RESCTRLMON_{name}": value for name, value in own.items() if value is not None}


Journalctl = Callable[..., Path]


@pytest.fixture
def journalctl(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str]) -> Journalctl:
    """Put a script in the place of journalctl, which prints these lines. Returns the file of its arguments."""
    assert environment["TZ"] == "UTC"

    def put(*lines: object, error: str = "", status: int = 0) -> Path:
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        (tmp_path / "lines").write_text("".join(f"{line}\n" for line in texts))
        first = json.dumps({"__REALTIME_TIMESTAMP": "1793491200000000"})
        program = tmp_path / "journalctl"
        program.write_text(
            f"""#!/bin/sh
echo "$@" >>{tmp_path}/asked
case "$*" in *MESSAGE_ID={MessageId.ENDED}*) ;; *) echo {shlex.quote(first)}; exit ;; esac
cat {tmp_path}/lines
printf %s {shlex.quote(error)} >&2
exit {status}
"""
        )
        program.chmod(stat.S_IRWXU)
        monkeypatch.setattr(report, "JOURNALCTL", str(program))
        monkeypatch.setattr(report, "_PERSISTENT", str(program))
        return tmp_path / "asked"

    return put


def test_table_has_sums_and_the_worst_quality(journalctl: Journalctl, capsys: pytest.CaptureFixture[str]) -> None:
    entries = [
        an_entry(1, namespace="shop", pod="web-1"),
        an_entry(2, namespace="shop", quality="late", quality_core_energy="late"),
        an_entry(3, namespace="日本"),
        an_entry(4, total_core_energy=None, quality_core_energy="unknown", quality="unknown"),
    ]
    asked = journalctl(*entries, "-- No entries --")
    assert main(["report", "--since", "yesterday", "--until=-1h", "--by", "namespace"]) == 0
    assert capsys.readouterr().out == (
        "NAMESPACE  RUNS  TIME  TRAFFIC  ENERGY  QUALITY\n"
        "shop          2    3s  2.00MiB     25J  late\n"
        "日本          1    1s  1.00MiB   12.5J  exact\n"
        "-             1    1s  1.00MiB       -  unknown\n"
        "\n"
        "4 runs ended. The journal begins at 2026-11-01 00:00:00.\n"
    )
    words = asked.read_text().splitlines()[0].split()
    assert {"_SYSTEMD_UNIT=resctrlmond.service", "_UID=0", "--since=yesterday", "--until=-1h"} <= set(words)


def test_legend_can_be_left_out(journalctl: Journalctl, capsys: pytest.CaptureFixture[str]) -> None:
    journalctl(an_entry())
    assert main(["report", "--no-legend"]) == 0
    assert capsys.readouterr().out == "web1  1  1s  1.00MiB  12.5J  exact\n"


def test_forged_entries_do_not_count(journalctl: Journalctl, capsys: pytest.CaptureFixture[str]) -> None:
    forged = [
        an_entry(2) | {"_UID": "1000"},
        an_entry(3) | {"_SYSTEMD_UNIT": "user@1000.service"},
        an_entry(4) | {"_UID": ["0", "1000"]},
        {name: value for name, value in an_entry(5).items() if name != "_SYSTEMD_UNIT"},
    ]
    journalctl(an_entry(), *forged)
    assert main(["report", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [group["name"] for group in found["groups"]] == ["web1"]
    assert found["invalidEntries"] == 0


def test_second_entry_of_a_run_counts_once(journalctl: Journalctl, capsys: pytest.CaptureFixture[str]) -> None:
    journalctl(an_entry(), an_entry(possible_second="1"), an_entry(2, key="web1"))
    assert main(["report", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["duplicateEntries"] == 1
    assert found["groups"][0]["runs"] == 2
    assert found["journalSince"] == "2026-11-01T00:00:00Z"
    energy = next(total for total in found["groups"][0]["totals"] if total["event"] == "core_energy")
    assert energy == {
        "event": "core_energy",
        "unit": "joules",
        "value": "25.0",
        "quality": "exact",
        "runs": 2,
        "unknownRuns": 0,
    }


def test_invalid_entries_are_counted_and_named(journalctl: Journalctl, capsys: pytest.CaptureFixture[str]) -> None:
    broken = [
        an_entry(2, run="x"),
        an_entry(3, key=None),
        an_entry(4, duration_usec="-1"),
        an_entry(5, quality="perfect"),
        an_entry(6, total_core_energy="NaN"),
        an_entry(7, total_core_energy="1e9999999"),
        an_entry(8, quality_core_energy=None),
        an_entry(9, key=[119, 255]),
        an_entry(10, namespace=None) | {"RESCTRLMON_POD": None},
    ]
    journalctl(an_entry(), *broken, "{not json", "[1]", "{" * 100000)
    assert main(["report"]) == 0
    out, err = capsys.readouterr()
    assert "1 run ended." in out
    assert err == "resctrlctl: not counted: 11 entries of the journal with invalid fields\n"


def test_run_without_any_total_makes_the_sum_unknown() -> None:
    never = {name: value for name, value in an_entry(2, key="web1", quality="unknown").items() if "_CORE" not in name}
    never = {name: value for name, value in never.items() if "_MBM" not in name}
    entries = [entry for entry in map(entry_of, [an_entry(), never]) if entry]
    (group,) = grouped(entries, "key")
    energy = group.total("core_energy")
    assert energy is not None
    assert (energy.value, energy.quality, energy.runs, energy.unknown_runs) == ("12.5", "unknown", 1, 1)
    assert group.quality == "unknown"


def test_sums_lose_no_digit() -> None:
    big = "99999999999999999999.999999999"
    entries = [entry for n in range(9) if (entry := entry_of(an_entry(n, key="k", total_core_energy=big)))]
    energy = grouped(entries, "key")[0].total("core_energy")
    assert energy is not None
    assert energy.value == "899999999999999999999.999999991"


@given(st.dictionaries(st.sampled_from(report.FIELDS), st.none() | st.text() | st.lists(st.integers() | st.text())))
def test_no_field_crashes_the_report(fields: dict[str, Any]) -> None:
    is_of_service(fields)
    entry = entry_of(an_entry() | fields)
    if entry is not None:
        grouped([entry], "user")


def test_csv_has_every_digit_and_event(journalctl: Journalctl, capsys: pytest.CaptureFixture[str]) -> None:
    journalctl(an_entry(key='a,"b'), an_entry(2, total_c6_res="7", quality_c6_res="estimated"))
    assert main(["report", "--csv"]) == 0
    rows = list(csv.reader(io.StringIO(capsys.readouterr().out)))
    assert rows[0][:4] == ["key", "runs", "duration_sec", "quality"]
    assert rows[0][4:] == [
        *("mbm_total_bytes", "mbm_total_bytes_quality", "core_energy", "core_energy_quality"),
        *("c6_res", "c6_res_quality"),
    ]
    assert rows[1:] == [
        ['a,"b', "1", "1.500000", "exact", "1048576", "exact", "12.5", "exact", "", ""],
        ["web2", "1", "1.500000", "exact", "1048576", "exact", "12.5", "exact", "7", "estimated"],
    ]


def test_control_characters_of_names_are_escaped(journalctl: Journalctl, capsys: pytest.CaptureFixture[str]) -> None:
    journalctl(an_entry(key="a\x1b[2J"))
    assert main(["report"]) == 0
    assert main(["report", "--csv"]) == 0
    assert "\x1b" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("failure", "status", "text"),
    [
        (("Failed to parse timestamp: x", 1), 2, "the time of --since or --until is not valid"),
        (("Hint: You are currently not seeing messages from other users and the system.", 0), 77, "systemd-journal"),
        (("No journal files were opened due to insufficient permissions.", 1), 77, "no access"),
        (("Bad message", 1), 1, "cannot read the journal"),
        (("", 3), 1, "exit status 3"),
    ],
)
def test_failure_of_journalctl_is_explained(
    failure: tuple[str, int], status: int, text: str, journalctl: Journalctl, capsys: pytest.CaptureFixture[str]
) -> None:
    journalctl(error=failure[0], status=failure[1])
    assert main(["report"]) == status
    assert text in capsys.readouterr().err


def test_missing_journalctl_is_explained(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(report, "JOURNALCTL", "/nonexistent/journalctl")
    assert main(["report"]) == 1
    assert "Install systemd" in capsys.readouterr().err


def test_volatile_journal_is_stated(
    journalctl: Journalctl, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journalctl()
    monkeypatch.setattr(report, "_PERSISTENT", "/nonexistent/*")
    assert main(["report"]) == 0
    assert capsys.readouterr().out == (
        "No ended workload was found. The journal begins at 2026-11-01 00:00:00. It is not kept across reboots.\n"
    )


def test_daemon_of_another_socket_is_not_in_the_journal(
    journalctl: Journalctl, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the socket of a simulation, the report was empty without a reason."""
    journalctl()
    assert main(["report", "--socket", "/tmp/sim/run/org.resctrlmon.Manager"]) == 0
    assert capsys.readouterr().err == (
        "resctrlctl: the journal has only the workloads of resctrlmond.service, not those of the daemon at "
        "/tmp/sim/run/org.resctrlmon.Manager\n"
    )
    assert main(["report"]) == 0
    assert capsys.readouterr().err == ""


# -- a real journald, in a mount namespace of its own


@pytest.fixture
def journald(tmp_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a journald that has a /run and /var/log of its own."""
    script = "mount -t tmpfs t /run && mount -t tmpfs t /var/log && mkdir -p /run/systemd/journal && exec "
    with open(tmp_path / "journald", "wb") as log:
        process = subprocess.Popen(
            ["unshare", "--mount", "sh", "-c", script + "/usr/lib/systemd/systemd-journald"], stdout=log, stderr=log
        )
    try:
        wait_until(lambda: Path(f"/proc/{process.pid}/root/run/systemd/journal/io.systemd.journal").exists())
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


@pytest.fixture
def service() -> Iterator[Path]:
    """Create the control group of resctrlmond.service, by which journald attributes entries."""
    top = Path(next(mount.point for mount in mounts() if mount.fstype == "cgroup2"))
    made = [path for path in (top / "system.slice", top / "system.slice/resctrlmond.service") if not path.exists()]
    for path in made:
        path.mkdir()
    yield top / "system.slice/resctrlmond.service"
    for path in reversed(made):
        path.rmdir()


_SEND = """
import sys
from resctrlmond.daemon.ledger import Ledger, recorded_in_journal, run_of
from resctrlmond.service.journal import JournalSocket
from resctrlmond.resctrl.counters import event
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.model.workload import Group, GroupState, Member, Workload

key = sys.argv[1]
totals = [Total(event("core_energy"), 12, Quality.EXACT)]
group = Group(name=key, state=GroupState.COMPLETED, created_at="a", created_ns=10**9, completed_ns=3 * 10**9)
member = Member(id="m", kind="service", owner="me", cgroup="/sys/fs/cgroup/system.slice/web.service")
workload = Workload(key=key, groups=(group,), members=(member,))
ledger = Ledger("/run/ledger", "boot", JournalSocket(), lambda _: totals)
ledger.started()
ledger.record(workload)
run = run_of(workload, "boot")
# The daemon that starts after a kill finds the entry, and sends no second one.
assert recorded_in_journal([run, "0" * 32]) == {run}
second = Ledger("/run/ledger", "boot", JournalSocket(), lambda _: totals)
second.record(workload)
second.started()
second.settle()
"""


def test_report_reads_what_the_ledger_sends_to_a_real_journald(
    journald: subprocess.Popen[bytes], service: Path
) -> None:
    def run(*command: str, cgroup: Path | None = None) -> str:
        join = f"echo $$ >{cgroup}/cgroup.procs && " if cgroup else ""
        inside = [
            "nsenter",
            f"--mount=/proc/{journald.pid}/ns/mnt",
            f"--wd={ROOT}",
            "sh",
            "-c",
            join + 'exec "$@"',
            "-",
        ]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [*inside, *command], env=environment, check=True, stdout=subprocess.PIPE, text=True, timeout=60
        )
        return done.stdout

    run(sys.executable, "-c", _SEND, "web", cgroup=service)
    run(sys.executable, "-c", _SEND, "forged")
    found = json.loads(run(sys.executable, "-m", "resctrlctl", "report", "--since", "-1h", "--by", "unit", "--json"))
    assert [(group["name"], group["runs"], group["totals"][0]["value"]) for group in found["groups"]] == [
        ("web.service", 1, "12")
    ]
    assert found["journalIsVolatile"]
    assert found["invalidEntries"] == found["duplicateEntries"] == 0
    lines = run("journalctl", "-u", "web.service", "-o", "cat", "--no-pager").splitlines()
    assert "web: Used 12.0 J core energy in 2s." in lines
    assert "No ended workload" in run(sys.executable, "-m", "resctrlctl", "report", "--until", "2020-01-01")
