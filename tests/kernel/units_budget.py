# SPDX-License-Identifier: Apache-2.0
"""``make units-budget-kernel``: 300 systemd units in a guest with 64 RMIDs, and each of their tasks is in a group.

    python3 -m tests.kernel.units_budget [--units 300] [--reserve 16] [--seed 1]

The counters of the guest read 0, so this checks in which group each task is, what is reported about each unit, and
that no start of a unit failed. ``tests.truth.units`` compares figures.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .host import SOCKET, Host
from .install import install, stage
from .machine import Machine

UNITS = "/run/systemd/system"
DROP_IN = "/etc/resctrlmond/resctrlmond.d/budget.yaml"
# The templates by their ranks, and the slices in which they are.
SLICES = {"budget-a@": "system.slice", "budget-b@": "shop.slice", "budget-c@": "batch.slice"}
RMIDS = 64
OVERFLOW = 4
_SECONDS = 900.0
# Prints the tasks of each unit with their groups, and the tasks of each group, as JSON.
_LOOK = """\
import json, os
units, groups = {}, {}
for top, folders, files in os.walk("/sys/fs/cgroup"):
    name = os.path.basename(top)
    if name.startswith("budget-") and name.endswith(".service"):
        tasks = units[name] = {}
        for tid in open(top + "/cgroup.threads").read().split():
            try:
                with open(f"/proc/{tid}/cpu_resctrl_groups") as file:
                    tasks[tid] = file.read().split("mon:")[1].split("\\n")[0]
            except (FileNotFoundError, ProcessLookupError):
                pass
for name in os.listdir("/sys/fs/resctrl/mon_groups"):
    groups[name] = open(f"/sys/fs/resctrl/mon_groups/{name}/tasks").read().split()
print(json.dumps([units, groups]))
"""


@dataclass
class Look:
    """One look at all units: the group of each task, by unit and task, the tasks of each group, and all reports.

    ``usages`` are the workloads with their totals, by key. ``wrong`` has a line for each contradiction.
    """

    units: dict[str, dict[str, str]]
    groups: dict[str, list[str]]
    usages: dict[str, dict[str, Any]]
    wrong: list[str] = field(default_factory=list)

    @property
    def own(self) -> list[str]:
        """The units with a group of their own."""
        return [name for name, tasks in self.units.items() if set(tasks.values()) == {name}]

    @property
    def shared(self) -> dict[str, list[str]]:
        """The units in each shared group."""
        found: dict[str, list[str]] = {}
        for name, tasks in self.units.items():
            for group in {group for group in tasks.values() if group.startswith("overflow@")}:
                found.setdefault(group, []).append(name)
        return found

    def __str__(self) -> str:
        sizes = ", ".join(f"{key} has {len(names)}" for key, names in sorted(self.shared.items()))
        tasks = sum(map(len, self.units.values()))
        own = ", ".join(f"{sum(name.startswith(template) for name in self.own)} {template}" for template in SLICES)
        return (
            f"{len(self.units)} units with {tasks} tasks: {len(self.own)} have a group of their own ({own}); "
            f"{sizes or 'none is shared'}; {len(self.groups)} groups"
        )


class Budget:
    """Units of three templates on a host whose daemon runs and watches them. All that is wrong is in ``wrong``."""

    def __init__(self, host: Host, units: int, reserve: int) -> None:
        self.host = host
        self.reserve = reserve
        templates = list(SLICES)
        self.names = [f"{templates[number % 3]}{number // 3 + 1}.service" for number in range(units)]
        self.wrong: list[str] = []
        for template, slice_ in SLICES.items():
            text = f"[Service]\nType=exec\nExecStart=sh -c 'sleep 60%i & exec sleep 60%i'\nSlice={slice_}\n"
            host.guest.write(f"{UNITS}/{template}.service", text)
        host.run("systemctl daemon-reload", timeout=_SECONDS)

    def select(self, *, is_watched: bool = True) -> None:
        """Watch the units of the three templates, or none of them."""
        globs = [f"{template}*.service" for template in SLICES] if is_watched else []
        keys = {"units": globs, "reserve": self.reserve, "overflow": OVERFLOW}
        self.host.guest.write(DROP_IN, json.dumps(keys) + "\n")
        self.host.run("systemctl reload resctrlmond", timeout=_SECONDS)

    def systemctl(self, verb: str, names: Sequence[str]) -> None:
        """Start, restart or stop units at once. systemctl fails if one of them fails."""
        done = self.host.run(f"systemctl {verb} {' '.join(names)}", check=False, timeout=_SECONDS)
        if done.returncode:
            self.wrong.append(f"systemctl {verb} failed: {done.output[:500]}")

    def start_times(self) -> list[float]:
        """Return how many milliseconds systemd needed to execute the command of each unit."""
        names = "InactiveExitTimestampMonotonic,ActiveEnterTimestampMonotonic"
        shown = self.host.out(f"systemctl show -p {names} 'budget-*.service'", _SECONDS)
        found = [
            dict(line.split("=") for line in unit.splitlines()) for unit in shown.split("\n\n") if "=0\n" not in unit
        ]
        begun, active = names.split(",")
        return sorted((int(unit[active]) - int(unit[begun])) / 1000 for unit in found)

    def look(self) -> Look:
        """Return what is seen now. ``wrong`` has a line for each task that is not counted as it should be."""
        units, groups = json.loads(self.host.out(f"python3 -IS -c '{_LOOK}'", _SECONDS))
        call = f"varlinkctl call --timeout=600 --more -j {SOCKET} org.resctrlmon.Manager.ReadAll '{{}}'"
        pages = self.host.out(call, _SECONDS).replace("\x1e", "").splitlines()
        usages = {
            usage["workload"]["key"]: usage for page in pages if page for usage in json.loads(page).get("usages", ())
        }
        look = Look(units, groups, usages)
        for name, tasks in units.items():
            look.wrong += _problems(look, name, set(tasks.values()))
        for group, names in look.shared.items():
            expected = {tid for name in names for tid, where in units[name].items() if where == group}
            if strangers := set(groups[group]) - expected:
                look.wrong.append(f"{group} has tasks of no unit: {sorted(strangers)}")
        return look

    def settled(self, running: int) -> Look:
        """Wait until all tasks of so many units are in groups, and units have all RMIDs for them; return the look."""
        deadline = time.monotonic() + _SECONDS / 3
        expected = running, min(running, RMIDS - 1 - self.reserve - OVERFLOW)
        while True:
            look = self.look()
            seen = len(look.units), len(look.own)
            if (not look.wrong and seen == expected) or time.monotonic() > deadline:
                break
            time.sleep(1)
        if seen != expected:
            look.wrong.append(f"units that run, and those with a group of their own: {seen}, not {expected}")
        limit = RMIDS - 1 - self.reserve
        if len(look.groups) > limit:
            look.wrong.append(f"{len(look.groups)} groups, which leaves less than {self.reserve} RMIDs free")
        self.wrong += look.wrong
        return look

    def until_over(self) -> None:
        """Stop all units, and wait until no group is left: shared groups are kept for half a minute."""
        self.systemctl("stop", self.names)
        self._until(lambda: not [name for name in self.host.groups() if "budget-" in name], "the ends of the units")
        self._until(lambda: not [name for name in self.host.groups() if "overflow@" in name], "the shared groups")
        for one in self.host.call("List")["workloads"]:
            if one["key"].startswith(("budget-", "overflow@")) and one["state"] != "completed":
                self.wrong.append(f"{one['key']} is {one['state']} after its end")

    def containers(self, number: int) -> None:
        """Let as many other workloads begin as RMIDs are left for them: each gets one at once."""
        keys = [f"box{index}" for index in range(number)]
        for key in keys:
            pid = self.host.process("sleep 600")
            workload = self.host.call("Assign", key=key, pid=pid, claim="box")["workload"]
            if workload["state"] != "active":
                self.wrong.append(f"{key} is {workload['state']}: {workload.get('reason')}")
        for key in keys:
            self.host.call("Release", key=key, claim="box")

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        try:
            self.host.until(condition, what, _SECONDS / 3)
        except AssertionError as error:
            self.wrong.append(str(error))


def _problems(look: Look, name: str, groups: set[str]) -> list[str]:
    """Return what is wrong with the tasks and totals of one unit."""
    usage = look.usages.get(name)
    if usage is None:
        return [f"{name} is not a workload"]
    totals = {(total["quality"], total.get("reason", "")) for total in usage["totals"]}
    if groups == {name}:
        is_said = all(quality == "late" and "CPU time before" in reason for quality, reason in totals)
        return [] if totals and is_said else [f"{name} has a group of its own: {sorted(totals)}"]
    (template,) = [template for template in SLICES if name.startswith(template)]
    group = f"overflow@{SLICES[template]}"
    if groups != {group}:
        return [f"{name} has tasks in {sorted(groups)}"]
    members = {member["id"]: member for member in look.usages[group]["workload"]["members"]}
    others = len(look.shared[group]) - 1
    is_said = all(quality == "unknown" and group in reason for quality, reason in totals)
    if name not in members or members[name].get("endedAt") or not totals or not is_said:
        return [f"{name} shares a group with {others} others: {sorted(totals)}"]
    return []


def play(budget: Budget, seed: int, report: Callable[[str], None]) -> None:
    """Start all units, restart and stop some, and stop all. ``report`` gets a line for each step."""
    chance, host, names = random.Random(seed), budget.host, budget.names

    def cpu() -> float:
        return int(host.out("systemctl show -P CPUUsageNSec resctrlmond")) / 1e9

    before = cpu()
    budget.systemctl("start", names)
    report(f"started: {_summary(budget.start_times())}")
    look = budget.settled(len(names))
    report(f"{look}; the daemon used {cpu() - before:.2f} s")
    reported = Counter(total["quality"] for key in look.shared for total in look.usages[key]["totals"])
    report(f"qualities of the totals of the shared groups: {dict(reported)}")
    budget.containers(4)
    before = cpu()
    budget.systemctl("restart", chance.sample(names, len(names) // 3))
    stopped = chance.sample(names, len(names) // 5)
    budget.systemctl("stop", stopped)
    look = budget.settled(len(names) - len(stopped))
    report(f"after restarts and stops: {look}; the daemon used {cpu() - before:.2f} s")
    budget.systemctl("start", stopped)
    look = budget.settled(len(names))
    report(f"after their start: {look}")
    before = cpu()
    budget.until_over()
    report(f"stopped; the daemon used {cpu() - before:.2f} s")


def _summary(times: Sequence[float]) -> str:
    return f"{len(times)} units, {times[len(times) // 2]:.0f} ms each (median), at most {times[-1]:.0f} ms"


def main() -> int:
    """Print a line for each step, and return 1 if something was wrong."""
    parser = argparse.ArgumentParser(prog="tests.kernel.units_budget", description=__doc__)
    for name, default in (("units", 300), ("reserve", 16), ("seed", 1)):
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help="default: %(default)s")
    arguments = parser.parse_args()
    begun = time.monotonic()

    def report(text: str) -> None:
        print(f"{time.monotonic() - begun:5.0f} s: {text}", flush=True)

    with tempfile.TemporaryDirectory() as staged, Machine("cat").start() as guest:
        install(guest, stage(Path(staged)))
        host = Host(guest)
        host.start()
        budget = Budget(host, arguments.units, arguments.reserve)
        budget.select(is_watched=False)
        budget.systemctl("start", budget.names)
        report(f"started unwatched: {_summary(budget.start_times())}")
        budget.systemctl("stop", budget.names)
        budget.select()
        play(budget, arguments.seed, report)
        if restarts := int(host.out("systemctl show -P NRestarts resctrlmond")):
            journal = host.out("journalctl -b -o short-monotonic -u resctrlmond | grep -v 'Used .* memory traffic'")
            print(journal)
            budget.wrong.append(f"systemd has started the daemon {restarts} times again")
    for line in budget.wrong:
        print(f"WRONG: {line}")
    report(f"{len(budget.wrong)} wrong")
    return 1 if budget.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
