# SPDX-License-Identifier: Apache-2.0
"""Intel's pqos, an independent program, monitors and allocates on the simulation.

It runs in a mount namespace of its own, with a /sys/fs that has a mount point, the word resctrl in /proc/filesystems,
and the processor's flags in /proc/cpuinfo.
"""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

_HOST = r"""
import json, os, re, subprocess, sys
from resctrlmond.sim.fuse.mount import Simulation

def run(*words):
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    return [done.returncode, done.stdout, done.stderr]

def make_up(name, change):
    with open("/proc/" + name) as true, open("/sys/fs/" + name, "w") as made:
        made.write(change(true.read()))
    subprocess.run(["mount", "--bind", "/sys/fs/" + name, "/proc/" + name], check=True)

subprocess.run(["mount", "-t", "tmpfs", "tmpfs", "/sys/fs"], check=True)
os.mkdir("/sys/fs/resctrl")
make_up("filesystems", lambda text: text + "nodev\tresctrl\n")
flags = "cqm rdt_a cqm_llc cqm_occup_llc cqm_mbm_total cqm_mbm_local cat_l3"
make_up("cpuinfo", lambda text: re.sub("(?m)^flags.*", lambda line: line[0] + " " + flags, text))
with Simulation("/sys/fs/resctrl", "intel-rdt"):
    burner = subprocess.Popen(["taskset", "1", sys.executable, "-c", "while True: pass"])
    results = {"display": run("pqos", "-I", "-d"), "show": run("pqos", "-I", "-s")}
    # Without perf events, which are not part of resctrl and do not exist on every machine.
    quiet = ["--disable-mon-ipc", "--disable-mon-llc_miss"]
    events = ";".join(f"{event}:{burner.pid}" for event in ("llc", "mbt", "mbl"))
    results["monitor"] = run("pqos", "-I", *quiet, "-u", "csv", "-t", "2", "-p", events)
    results["core"] = run("pqos", "-I", *quiet, "-u", "csv", "-t", "2", "-m", "llc:0;mbt:0;mbl:0")
    results["groups"] = sorted(os.listdir("/sys/fs/resctrl/mon_groups"))
    results["classes"] = sorted(name for name in os.listdir("/sys/fs/resctrl") if name.startswith("COS"))
    results["pid"] = burner.pid
    results["allocate"] = run("pqos", "-I", "-e", "llc:1=0x3", "-a", "llc:1=0")
    results["allocated"] = run("pqos", "-I", "-s")
    burner.kill()
    burner.wait()
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def results() -> dict[str, object]:
    """Run pqos. Return [exit status, output, errors] of each command, and the groups that remain."""
    command = ["unshare", "--mount", "--propagation", "private", sys.executable, "-c", _HOST]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    answer: dict[str, object] = json.loads(done.stdout)
    return answer


def output(results: dict[str, object], what: str) -> str:
    value = results[what]
    assert isinstance(value, list)
    code, text, complaints = value
    assert code == 0, (text, complaints)
    return str(text)


def test_pqos_detects_the_features_of_the_simulated_machine(results: dict[str, object]) -> None:
    text = output(results, "display")
    assert all(
        words in text for words in ("LLC Occupancy", "Total Memory Bandwidth", "Local Memory Bandwidth", "L3 CAT")
    )
    assert "Num COS: 4" in text


def test_pqos_makes_its_classes_and_shows_them(results: dict[str, object]) -> None:
    assert results["classes"] == ["COS1", "COS2", "COS3"]
    assert "L3CA COS3 => MASK 0xfff" in output(results, "show")


def fullest_row(text: str) -> dict[str, str]:
    """Return the second with the most traffic: on a busy machine, the burner does not run in some of them."""
    # The output begins with a line for the user.
    table = text.partition("Time,")
    return max(csv.DictReader(io.StringIO(table[1] + table[2])), key=lambda row: float(row["MBT[MB/s]"]))


def test_pqos_monitors_a_process(results: dict[str, object]) -> None:
    row = fullest_row(output(results, "monitor"))
    assert row["PID"] == str(results["pid"])
    assert float(row["LLC[KB]"]) == 1024
    assert 0 < float(row["MBL[MB/s]"]) < float(row["MBT[MB/s]"])


def test_pqos_monitors_a_core(results: dict[str, object]) -> None:
    """pqos creates a group with the core: it counts the use of the burner there, which is in no group."""
    row = fullest_row(output(results, "core"))
    assert row["Core"] == "0"
    assert float(row["LLC[KB]"]) == 1024
    assert 0 < float(row["MBL[MB/s]"]) < float(row["MBT[MB/s]"])


def test_pqos_cleans_up(results: dict[str, object]) -> None:
    assert results["groups"] == []


def test_pqos_allocates(results: dict[str, object]) -> None:
    assert "L3CA COS1 => MASK 0x3" in output(results, "allocate")
    shown = output(results, "allocated")
    assert "L3CA COS1 => MASK 0x3" in shown
    assert "L3CA COS0 => MASK 0xfff" in shown
    assert re.search("Core 0, .*=> COS1", shown)
