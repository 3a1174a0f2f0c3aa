# SPDX-License-Identifier: Apache-2.0
"""A guest as its administrator uses it: the daemon under systemd, real clients of the interfaces, containers."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.wait import wait_until

from .machine import Completed, Guest

TREE = "/sys/fs/resctrl"
RUN = "/run/resctrlmond"
SOCKET = f"{RUN}/org.resctrlmon.Manager"
BUSYBOX = "/var/lib/busybox"
# The hook files as shipped, by stage.
HOOKS = {stage: Path(__file__).parents[2] / f"systemd/resctrlmon-{stage}.json" for stage in ("createRuntime",)}
# The program of a container that prints the group of its first instruction.
WHERE = "cat /proc/self/cpu_resctrl_groups"


class Host:
    """A guest with the project installed; ``start`` starts the daemon and waits until it is ready."""

    def __init__(self, guest: Guest) -> None:
        self.guest = guest

    def run(self, command: str, *, check: bool = True, timeout: float = 60.0) -> Completed:
        """Run a shell command as root."""
        return self.guest.run(command, check=check, timeout=timeout)

    def out(self, command: str, timeout: float = 60.0) -> str:
        """Return the output of a command, without the newline at its end."""
        return self.run(command, timeout=timeout).stdout.rstrip("\n")

    # -- the daemon

    def start(self) -> None:
        """Start the daemon with systemctl, which returns when the daemon has sent READY."""
        self.run("systemctl start resctrlmond")

    def pid(self) -> int:
        """Return the main process of the daemon."""
        return int(self.out("systemctl show -P MainPID resctrlmond"))

    def kill(self) -> None:
        """Kill the daemon with SIGKILL, and wait for the next daemon, which systemd starts."""
        old = self.pid()
        self.run(f"kill -9 {old}")
        self.until(lambda: self.out("systemctl show -P ActiveState,MainPID resctrlmond") != "", "a state")
        self.until(
            lambda: self.out("systemctl show -P ActiveState resctrlmond") == "active" and self.pid() not in (0, old),
            "the daemon to be back",
        )

    # -- the varlink interface, with systemd's own client

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Make a successful call with varlinkctl."""
        reply: dict[str, Any] = json.loads(self.out(self._call(method, parameters)) or "{}")
        return reply

    def refused(self, method: str, **parameters: Any) -> str:
        """Return varlinkctl's output for a call that is refused: the error's name and its fields."""
        done = self.run(self._call(method, parameters), check=False)
        assert done.returncode != 0, f"{method} was not refused: {done.output}"
        return done.output

    @staticmethod
    def _call(method: str, parameters: dict[str, Any]) -> str:
        full = method if "." in method else f"org.resctrlmon.Manager.{method}"
        return f"varlinkctl call -j {SOCKET} {full} {shlex.quote(json.dumps(parameters))}"

    def state(self, key: str) -> str:
        """Return the state of a workload, "" if there is none."""
        # Not from List: loops call this, and the daemon needs the emulated processor for each workload in a list.
        done = self.run(self._call("Get", {"key": key}), check=False)
        if done.returncode and "NoSuchWorkload" in done.output:
            return ""
        assert done.returncode == 0, done.output
        state: str = json.loads(done.stdout)["workload"]["state"]
        return state

    # -- the kernel

    def groups(self, class_: str = "") -> list[str]:
        """Return the monitoring groups in a class."""
        return self.out(f"ls {TREE}/{class_ + '/' if class_ else ''}mon_groups").split()

    def unmount(self, then: str = "true") -> None:
        """Unmount resctrl, and run a command at once. umount fails with EBUSY while the daemon reads a file."""
        self.run(f"for i in $(seq 100); do umount {TREE} && break; sleep 0.1; done; ! mountpoint -q {TREE} && {then}")

    def membership(self, pid: int | str) -> tuple[str, str]:
        """Return the class and the monitoring group of a task from the kernel; ("/", "") for root and no group."""
        return parse_where(self.out(f"cat /proc/{pid}/cpu_resctrl_groups"))

    def identity(self, key: str, class_: str = "") -> str:
        """Return the inode, group ID and mtime of a group's directory."""
        return self.out(f"stat -c '%i %g %y' {TREE}/{class_ + '/' if class_ else ''}mon_groups/{key}")

    def snapshot(self, key: str) -> dict[str, str]:
        """Return the texts of a workload's snapshot by path, with ";" between lines; links are marked."""
        script = 'for f in $(find . -type f); do echo "$f=$(paste -sd";" $f)"; done; '
        script += 'find . -type l -printf "%p=LINK\\n"'
        lines = self.out(f"cd {RUN}/groups/{key} && {{ {script}; }}").splitlines()
        return dict(line.removeprefix("./").split("=", 1) for line in lines)

    def begins(self, key: str) -> dict[str, str]:
        """Return the begin values of the workload."""
        return {name: text for name, text in self.snapshot(key).items() if name.endswith(".begin")}

    def process(self, command: str) -> int:
        """Start a process in the background, in no control group of the daemon, and return its pid."""
        return int(self.out(f"nohup setsid sh -c {shlex.quote(f'exec {command}')} >/dev/null 2>&1 & echo $!"))

    def until(self, condition: Callable[[], bool], what: str, seconds: float = 60.0) -> None:
        """Wait for a condition."""
        wait_until(condition, interval_s=0.1, timeout_s=seconds, failure=f"still waiting for {what}")

    # -- containers

    def make_root(self) -> None:
        """Return a root filesystem that contains only busybox."""
        applets = "sh cat sleep true ps"
        self.run(
            f"mkdir -p {BUSYBOX}/bin {BUSYBOX}/proc {BUSYBOX}/sys {BUSYBOX}/dev {BUSYBOX}/tmp && "
            f"cp /bin/busybox {BUSYBOX}/bin/ && for a in {applets}; do ln -sf busybox {BUSYBOX}/bin/$a; done"
        )

    def enable_hooks(self) -> None:
        """Enable the hook for Podman, as an administrator of a slow host does: with a longer timeout."""
        folder = "/usr/share/containers/oci/hooks.d"
        self.run(f"mkdir -p {folder}")
        for file in HOOKS.values():
            whole = json.loads(file.read_text())
            self.guest.write(f"{folder}/{file.name}", json.dumps(whole | {"hook": _patient(whole["hook"])}))

    def bundle(
        self, name: str, command: str, annotations: dict[str, str], cgroup: str, *, as_shipped: bool = False
    ) -> str:
        """Create an OCI bundle as CRI-O and containerd do, with the hook in it. Return its directory.

        The hook has the timeout that it is shipped with, or a longer one for an emulated processor.
        """
        folder = f"/run/bundles/{name}"
        self.run(f"mkdir -p {folder} && cd {folder} && rm -f config.json && runc spec")
        spec = json.loads(self.guest.read(f"{folder}/config.json"))
        spec["process"] |= {"terminal": False, "args": ["/bin/sh", "-c", command]}
        spec["root"] = {"path": BUSYBOX, "readonly": True}
        spec["annotations"] = annotations
        spec["linux"]["cgroupsPath"] = cgroup
        hooks = {stage: json.loads(file.read_text())["hook"] for stage, file in HOOKS.items()}
        spec["hooks"] = {stage: [hook if as_shipped else _patient(hook)] for stage, hook in hooks.items()}
        self.guest.write(f"{folder}/config.json", json.dumps(spec))
        return folder


def _patient(hook: dict[str, Any]) -> dict[str, Any]:
    """Return the hook with a timeout of a minute."""
    return hook | {"args": [*hook["args"], "--timeout", "60", "--start-timeout", "300"]}


def parse_where(text: str) -> tuple[str, str]:
    """Return the class and the group in the text of cpu_resctrl_groups."""
    fields = dict(line.split(":", 1) for line in text.splitlines())
    return fields["res"], fields["mon"]
