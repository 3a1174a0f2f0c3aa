# SPDX-License-Identifier: Apache-2.0
"""``make starved-units``: restart exact services at once on a guest with one emulated CPU, most of which is taken.

    python3 -m tests.kernel.starved_units [--services 20] [--share 0.5]

A real-time process takes a share of the CPU. The services restart first without resctrlmon-unit-exec, for comparison,
and then as exact services; last, they restart while the daemon is stopped by a signal. Exits with 1 if a service did
not start, if a start took longer than the program may wait, or if a service that executed outside its group is
reported as exact.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from resctrlmond.host.unit_exec import LONGEST_WAIT_S, WAIT_S

from .host import SOCKET, Host
from .install import install, stage
from .machine import Machine
from .starved import PROFILE

TEMPLATE = "/run/systemd/system/starved@.service"
DROP_IN = "/etc/resctrlmond/resctrlmond.d/starved.yaml"
FOLDER = "/run/starved-units"
_SECONDS = 1500.0
_SETTLED_S = 600.0
# Prints the group of the first instruction of a service, without another process.
_COMMAND = f"""\
while read -r line; do
    case $line in mon:*) echo "$line" >{FOLDER}/$1 ;; esac
done </proc/self/cpu_resctrl_groups
exec sleep 3600
"""
_LOAD = """\
import sys, time
share = float(sys.argv[1])
while True:
    begin = time.monotonic()
    while time.monotonic() - begin < share / 2:
        pass
    time.sleep((1 - share) / 2)
"""


@dataclass
class Outcome:
    """The result of one restart of all services: the groups of their first instructions, and their qualities.

    ``start_s`` are the times from the start of each service to the execution of its command. ``errors`` has what
    systemctl printed.
    """

    count: int
    groups: dict[str, str]
    start_s: list[float]
    qualities: dict[str, str] = field(default_factory=dict)
    errors: str = ""

    @property
    def inside(self) -> int:
        """The number of services whose first instruction was in their group."""
        return sum(group == name for name, group in self.groups.items())

    @property
    def unsaid(self) -> list[str]:
        """The services that executed outside their groups and are reported as exact."""
        return [name for name, group in self.groups.items() if group != name and self.qualities.get(name) == "exact"]

    @property
    def has_all_started(self) -> bool:
        """Whether each service has started and has executed its command."""
        return len(self.groups) == len(self.start_s) == self.count and not self.errors

    def __str__(self) -> str:
        exact = sum(quality == "exact" for quality in self.qualities.values())
        times = (
            f"{self.start_s[len(self.start_s) // 2]:.1f} s, at most {self.start_s[-1]:.1f} s" if self.start_s else "-"
        )
        return (
            f"{len(self.groups)} of {self.count} started, {self.inside} in their group from the first instruction, "
            f"{exact} exact, {len(self.unsaid)} outside and called exact; median start {times} {self.errors[:500]}"
        )


class Services:
    """The services on a host whose daemon runs and watches them."""

    def __init__(self, host: Host, count: int) -> None:
        self.host = host
        self.names = [f"starved@{number}.service" for number in range(1, count + 1)]
        host.guest.write("/run/starved-command", _COMMAND)
        host.guest.write("/run/starved-load", _LOAD)
        host.guest.write(
            TEMPLATE, "[Service]\nType=exec\nTimeoutStartSec=infinity\nExecStart=sh /run/starved-command %n\n"
        )
        host.guest.write(DROP_IN, json.dumps({"units": ["starved@*.service"]}) + "\n")
        host.run(f"mkdir -p {FOLDER} && systemctl daemon-reload")

    def load(self, share: float) -> None:
        """Take a share of the CPU from all processes that are not real-time ones."""
        self.host.run(f"nohup setsid chrt --fifo 10 python3 -IS /run/starved-load {share} >/dev/null 2>&1 &")

    def restart(self, names: list[str] | None = None, *, while_stopped: bool = False) -> Outcome:
        """Restart services at once; return the outcome without qualities.

        ``while_stopped``: SIGSTOP stops the daemon before, and it goes on after that.
        """
        chosen = self.names if names is None else names
        pid = self.host.pid()
        self.host.run(f"rm -f {FOLDER}/*; {f'kill -STOP {pid}' if while_stopped else 'true'}", timeout=_SECONDS)
        done = self.host.run(f"systemctl restart {' '.join(chosen)}", check=False, timeout=_SECONDS)
        if while_stopped:
            self.host.run(f"kill -CONT {pid}", timeout=_SECONDS)
        printed = f"test $(ls {FOLDER} | wc -l) -ge {len(chosen)}"
        self.host.until(lambda: self._holds(printed), "commands", _SETTLED_S)
        lines = self.host.out(f"cd {FOLDER} && grep -H mon: *", _SECONDS).splitlines()
        places = [line.partition(":mon:") for line in lines]
        groups = {name: group for name, _, group in places}
        return Outcome(len(chosen), groups, self._start_times(chosen), errors=done.output if done.returncode else "")

    def _holds(self, command: str) -> bool:
        return self.host.run(command, check=False, timeout=_SECONDS).returncode == 0

    def _start_times(self, names: list[str]) -> list[float]:
        begun, active = "InactiveExitTimestampMonotonic", "ActiveEnterTimestampMonotonic"
        shown = self.host.out(f"systemctl show -p {begun},{active} {' '.join(names)}", _SECONDS)
        found = [dict(line.split("=") for line in unit.splitlines()) for unit in shown.split("\n\n")]
        return sorted((int(unit[active]) - int(unit[begun])) / 1e6 for unit in found if int(unit[active]))

    def judge(self, outcome: Outcome) -> Outcome:
        """Add the qualities, as soon as each service is in its group."""
        self.host.until(lambda: set(outcome.groups) <= set(self._qualities()), "the groups", _SETTLED_S)
        outcome.qualities = self._qualities()
        return outcome

    def _qualities(self) -> dict[str, str]:
        call = f"varlinkctl call --timeout=600 --more -j {SOCKET} org.resctrlmon.Manager.ReadAll '{{}}'"
        pages = self.host.out(call, _SECONDS).replace("\x1e", "").splitlines()
        usages = [usage for page in pages if page for usage in json.loads(page).get("usages", ())]
        return {
            usage["workload"]["key"]: total["quality"]
            for usage in usages
            for total in usage["totals"]
            if total["event"] == "mbm_total_bytes" and usage["workload"]["state"] == "active"
        }

    def look(self) -> str:
        """Return the restarts of the daemon, and its last warnings."""
        shown = "journalctl -u resctrlmond -p warning -n 10 --no-pager -o cat"
        return self.host.out(f"systemctl show -p NRestarts resctrlmond; {shown}", _SECONDS)


def main() -> int:
    """Print one line for each restart of all services. Return the exit status."""
    parser = argparse.ArgumentParser(prog="tests.kernel.starved_units", description=__doc__)
    parser.add_argument("--services", type=int, default=20)
    parser.add_argument("--share", type=float, default=0.5, help="of the CPU that a real-time process takes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as staged, Machine(PROFILE).start() as guest:
        install(guest, stage(Path(staged)))
        host = Host(guest)
        services = Services(host, arguments.services)
        host.start()
        host.run(f"systemctl start {' '.join(services.names)}", timeout=_SECONDS)
        services.load(arguments.share)
        bare = services.restart()
        print("without the program:", bare, flush=True)
        host.run(
            f"systemctl stop {' '.join(services.names)}; resctrlctl units exact starved@.service", timeout=_SECONDS
        )
        host.until(lambda: not [name for name in host.groups() if name.startswith("starved@")], "ends", _SETTLED_S)
        busy = services.judge(services.restart())
        print("first start, exact: ", busy, flush=True)
        again = services.judge(services.restart())
        print("restart, exact:     ", again, flush=True)
        stopped = services.judge(services.restart(services.names[:10], while_stopped=True))
        print("daemon stopped:     ", stopped, flush=True)
        print(services.look())
    # Each of them waits by itself, and no longer than that; a starved program needs the CPU before and after it.
    slow = [
        outcome
        for outcome, longest in ((busy, LONGEST_WAIT_S), (again, LONGEST_WAIT_S), (stopped, WAIT_S))
        if outcome.start_s and outcome.start_s[-1] > longest + bare.start_s[-1]
    ]
    all_started = all(outcome.has_all_started for outcome in (bare, busy, again, stopped))
    unsaid = [name for outcome in (busy, again, stopped) for name in outcome.unsaid]
    return 0 if all_started and not slow and not unsaid else 1


if __name__ == "__main__":
    sys.exit(main())
