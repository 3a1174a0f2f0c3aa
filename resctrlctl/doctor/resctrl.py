# SPDX-License-Identifier: Apache-2.0
"""Whether the kernel has resctrl, where it is mounted, what it counts, and how the RMIDs are used."""

from __future__ import annotations

import grp
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from resctrlctl.doctor import kernel
from resctrlctl.doctor.finding import Finding, Severity
from resctrlctl.doctor.host import Host
from resctrlmond.configuration import config
from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.resctrl.bandwidth import Mode, by_domain, can_assign, kernel_mode_of, mode_of
from resctrlmond.resctrl.tree import MODALIAS, Tree

# Flags of /proc/cpuinfo for monitoring; the first is required.
_FLAGS = ("cqm_llc", "cqm_occup_llc", "cqm_mbm_total", "cqm_mbm_local")
_MOUNT = "systemctl enable --now sys-fs-resctrl.mount"
# This part of the RMIDs is few.
_FEW = 0.1


def settings(host: Host) -> config.Config:
    """Return the daemon's configuration; the default if it cannot be read."""
    try:
        return config.parse(host.read(config.DEFAULT_PATH).encode(), config.DEFAULT_PATH)
    except (ConfigError, OSError):
        return config.Config()


def place(host: Host) -> str:
    """Return the directory where the daemon expects resctrl."""
    return settings(host).resctrl


def mounted_at(host: Host) -> bool:
    """Return whether resctrl is what a path lookup finds at the place where the daemon expects it."""
    at = [mount.fstype for mount in host.mounts() if mount.point == place(host)]
    return bool(at) and at[-1] == "resctrl"


def info(host: Host, name: str) -> str:
    """Return the text of a file below ``info`` of resctrl; "" if resctrl is not mounted or has no such file."""
    return host.read(f"{place(host)}/info/{name}") if mounted_at(host) else ""


def check_support(host: Host) -> Iterator[Finding]:
    """Check that the processor can monitor and that the kernel has resctrl."""
    vendor, name, flags = kernel.processor(host)
    is_x86 = vendor != ""
    if host.exists("/sys/fs/resctrl") or mounted_at(host):
        if is_x86 and not {*_FLAGS[1:]} & flags and not mounted_at(host):
            yield _no_monitoring(host, name)
        else:
            yield Finding(Severity.OK, "resctrl", "the kernel has resctrl")
        return
    has_flags = bool({*_FLAGS, "rdt_a"} & flags) or not is_x86
    if not has_flags:
        yield _no_monitoring(host, name)
    path, options = kernel.configuration(host)
    option = "X86_CPU_RESCTRL" if is_x86 else "RESCTRL_FS"
    if options and options.get(option) != "y":
        yield Finding(
            Severity.ERROR,
            "resctrl",
            f"the kernel is built without resctrl (CONFIG_{option} is not set in {path})",
            "resctrl is the kernel's interface to the monitoring counters: nothing can be monitored.",
            (f"Install a kernel with CONFIG_{option}=y, and reboot",),
        )
    elif has_flags:
        yield Finding(
            Severity.ERROR,
            "resctrl",
            "/sys/fs/resctrl does not exist",
            "The kernel creates it only if the processor can control or monitor resources, and rdt= does not turn "
            "all of them off.",
            ("journalctl -k -b --grep resctrl",),
        )


def _no_monitoring(host: Host, name: str) -> Finding:
    hypervisor = kernel.virtual_machine(host)
    return Finding(
        Severity.ERROR,
        "processor",
        f"the processor ({name or 'unknown'}) has no monitoring: none of {', '.join(_FLAGS)} is in /proc/cpuinfo",
        f"This is a virtual machine ({hypervisor}), and its hypervisor hides the counters."
        if hypervisor
        else "Without the counters, nothing can be monitored. Some firmware has a switch for Intel RDT or AMD QoS.",
        ("resctrlmond --simulate /tmp/sim  # a simulation, to try the commands",),
    )


def check_mount(host: Host) -> Iterator[Finding]:
    """Check that resctrl is mounted where the daemon expects it, and that no other mount hides it.

    All mounts show the same groups, and the kernel reports what programs write to any of them.
    """
    expected = place(host)
    all_mounts = host.mounts()
    found = [mount for mount in all_mounts if mount.fstype == "resctrl"]
    at = [mount for mount in all_mounts if mount.point == expected]
    if not found:
        if host.exists("/sys/fs/resctrl"):
            yield Finding(
                Severity.ERROR,
                "mount",
                f"resctrl is not mounted at {expected}",
                "The daemon does not start, and no workload is monitored.",
                (_MOUNT if expected == "/sys/fs/resctrl" else f"mount -t resctrl resctrl {expected}",),
            )
        return
    if at and at[-1] not in found:
        yield Finding(
            Severity.ERROR,
            "mount",
            f"a filesystem of type {at[-1].fstype} is mounted over {expected}",
            "It hides resctrl: the daemon cannot read or create monitoring groups.",
            (f"umount {expected}",),
        )
        return
    others = [mount for mount in found if mount.point != expected]
    if not at:
        points = ", ".join(mount.point for mount in others)
        yield Finding(
            Severity.ERROR,
            "mount",
            f"resctrl is mounted at {points}, and the daemon expects it at {expected}",
            "The daemon does not start, and no workload is monitored.",
            (f"umount {points} && {_MOUNT}", f"or {config.DEFAULT_PATH}: resctrl: {others[0].point}"),
        )
        return
    options = ", ".join(sorted(at[-1].options - {"rw"})) or "no options"
    yield Finding(Severity.OK, "mount", f"resctrl is mounted at {expected} ({options})")


def check_events(host: Host) -> Iterator[Finding]:
    """Check that resctrl counts something, and that bandwidth counters are not taken away."""
    if not mounted_at(host):
        return
    if not host.names(f"{place(host)}/info", "*_MON"):
        yield Finding(
            Severity.ERROR,
            "events",
            f"resctrl counts nothing: {place(host)}/info has no directory *_MON",
            "The processor can limit resources but not monitor them, or rdt= turns monitoring off. "
            "The daemon does not start.",
            ("grep -o 'rdt=[^ ]*' /proc/cmdline  # if this turns off cmt, mbmtotal and mbmlocal, remove that",),
        )
        return
    events = " ".join(
        event
        for resource in host.names(f"{place(host)}/info", "*_MON")
        for event in info(host, f"{resource}/mon_features").split()
        if not event.endswith("_config")
    )
    yield Finding(Severity.OK, "events", f"counted: {events}")
    yield from _bandwidth(host)


def _bandwidth(host: Host) -> Iterator[Finding]:
    resources = host.names(f"{place(host)}/info", "*_MON")
    counting = [resource for resource in resources if "mbm_" in info(host, f"{resource}/mon_features")]
    for resource in counting or ["L3_MON"]:
        yield from _bandwidth_of(host, resource)


def check_kernel_mode(host: Host) -> Iterator[Finding]:
    """Check that the kernel counts its work for a task in the group of the task."""
    if mode := kernel_mode_of(info(host, "kernel_mode")):
        yield Finding(
            Severity.WARNING,
            "kernel-mode",
            f"the kernel may count its work for tasks in another group than theirs (info/kernel_mode: {mode})",
            "No total is exact: what the kernel does for a workload, such as its system calls, may be missing or be "
            "that of others.",
            (f"echo inherit_ctrl_and_mon >{place(host)}/info/kernel_mode",),
        )


def _bandwidth_of(host: Host, resource: str) -> Iterator[Finding]:
    assign_mode, features = info(host, f"{resource}/mbm_assign_mode"), info(host, f"{resource}/mon_features")
    file = f"{place(host)}/info/{resource}/mbm_assign_mode"
    match mode_of(assign_mode, features, host.read(MODALIAS)):
        case Mode.REALLOCATED:
            fix = (f"echo mbm_event >{file}",) if can_assign(assign_mode) else ()
            yield Finding(
                Severity.WARNING if fix else Severity.NOTE,
                "bandwidth",
                "the processor takes bandwidth counters from one RMID for another: no total of bandwidth is exact",
                "In the mode mbm_event, the kernel assigns counters to groups, and their totals can be exact."
                if fix
                else "The processor does not offer the mode mbm_event, in which the kernel assigns the counters.",
                fix,
            )
        case Mode.ASSIGNED:
            name = resource.removesuffix("_MON")
            counters = by_domain(name, info(host, f"{resource}/num_mbm_cntrs"))
            available = by_domain(name, info(host, f"{resource}/available_mbm_cntrs"))
            left = ", ".join(
                f"{available.get(domain, 0)} of {counters[domain]} in {domain}" for domain in sorted(counters)
            )
            is_short = any(not available.get(domain, 0) for domain in counters)
            yield Finding(
                Severity.WARNING if is_short else Severity.OK,
                "bandwidth",
                f"the kernel assigns bandwidth counters (mbm_event); available: {left}",
                "Groups without a counter have no figure of bandwidth (Unassigned)." if is_short else "",
                ("resctrlctl list  # and release the workloads that are no longer needed",) if is_short else (),
            )
            if info(host, f"{resource}/mbm_assign_on_mkdir").strip() == "0":
                yield Finding(
                    Severity.NOTE,
                    "bandwidth",
                    "new groups get no bandwidth counter from the kernel (mbm_assign_on_mkdir is 0)",
                    "The daemon assigns counters to its own groups; those of other programs stay without.",
                    (f"echo 1 >{place(host)}/info/{resource}/mbm_assign_on_mkdir",),
                )
        case Mode.DEDICATED:
            yield Finding(Severity.OK, "bandwidth", "each RMID has its own bandwidth counters")


@dataclass(frozen=True, slots=True)
class Rmids:
    """The number of RMIDs, and their users: classes (with the root), the daemon's groups, and other groups."""

    number: int
    classes: int
    own: int
    foreign: tuple[str, ...]

    @property
    def free(self) -> int:
        """RMIDs that no group uses. Some may be in limbo, which no file of the kernel shows."""
        return self.number - self.classes - self.own - len(self.foreign)

    @property
    def is_short(self) -> bool:
        """Whether so few are free that a burst of containers uses up the rest."""
        return self.missing > 0

    @property
    def missing(self) -> int:
        """How many more would have to be free."""
        return max(int(self.number * _FEW) + 1 - self.free, 0)


def rmids(host: Host) -> Rmids | None:
    """Count the RMIDs; None if resctrl is not mounted or does not monitor. ``foreign``: paths of groups."""
    if not mounted_at(host) or not host.names(f"{place(host)}/info", "*_MON"):
        return None
    tree = Tree(host.path(place(host)), None)
    mark = _mark(host)
    groups = [found for group in tree.groups() if (found := tree.find(group)) is not None]
    # A path of the machine, not of the tests' tree.
    foreign = tuple(os.path.join(place(host), found.ref.path) for found in groups if found.gid != mark)
    number = min(capacity.rmids for capacity in tree.capacity())
    return Rmids(number, len(tree.classes()), len(groups) - len(foreign), foreign)


def _mark(host: Host) -> int | None:
    """Return the Unix group of the daemon's monitoring groups, as resctrlmond writes it to its directory in /run."""
    try:
        return os.stat(host.path(f"{settings(host).runtime_dir}/records")).st_gid
    except OSError:
        pass
    name = settings(host).group
    if isinstance(name, int):
        return name
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        return None


def owner(path: str) -> str:
    """Return the probable owner of a foreign group, from the form of its name."""
    name = os.path.basename(path)
    if re.fullmatch(r"[0-9a-f]{64}", name):
        return "named after containers (a runtime with enableMonitoring)"
    if re.fullmatch(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}", name):
        return "named after pods (nri-resctrl-mon or Kepler)"
    return "of unknown programs"


def check_rmids(host: Host) -> Iterator[Finding]:
    """Check that RMIDs are free, that freed ones become usable again, and count their users."""
    found = rmids(host)
    if found is None:
        return
    by_owner: dict[str, list[str]] = {}
    for path in found.foreign:
        by_owner.setdefault(owner(path), []).append(path)
    users = [f"{found.classes} by classes", f"{found.own} by groups of resctrlmond"]
    users += [f"{len(paths)} by foreign groups {named}" for named, paths in sorted(by_owner.items())]
    what = f"{found.free} of {found.number} RMIDs are free; used: {', '.join(users)}"
    if not found.is_short:
        yield Finding(Severity.OK, "rmids", what)
    else:
        shown = " ".join(map(shlex.quote, found.foreign[: found.missing]))
        fix = ["resctrlctl list --all  # all groups; resctrlctl release ends a workload"]
        if found.foreign:
            fix.insert(0, f"rmdir {shown}  # foreign groups, after their owner has stopped")
        yield Finding(
            Severity.ERROR if found.free <= 0 else Severity.WARNING,
            "rmids",
            what,
            "Without a free RMID, a new workload is pending, and what it uses is not counted. A container that has "
            "enableMonitoring in its configuration does not start then.",
            tuple(fix),
        )
    yield from _limbo(host, found.number)


def _limbo(host: Host, number: int) -> Iterator[Finding]:
    """Find a threshold with which the kernel never reuses a freed RMID."""
    file = "L3_MON/max_threshold_occupancy"
    if "llc_occupancy" not in info(host, "L3_MON/mon_features").split() or info(host, file).strip() != "0":
        return
    cache = re.match(r"(\d+)K", host.read("/sys/devices/system/cpu/cpu0/cache/index3/size"))
    threshold = int(cache[1]) * 1024 // number if cache else 65536
    # The kernel rounds the number down to the unit of the counter, which no file shows.
    name = file.rpartition("/")[2]
    command = f'while [ "$(cat {name})" = 0 ] && echo $n >{name}; do n=$((n * 2)); done'
    yield Finding(
        Severity.WARNING,
        "rmids",
        f"RMIDs that become free stay in limbo for ever ({place(host)}/info/{file} is 0)",
        "The kernel reuses an RMID only if its data in the cache is less than this number of bytes.",
        (f"(cd {place(host)}/info/L3_MON && n={threshold} && {command})",),
    )
