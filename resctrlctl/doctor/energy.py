# SPDX-License-Identifier: Apache-2.0
"""Why core energy is not counted: from the processor over the kernel's configuration to the first mount."""

from __future__ import annotations

import re
from collections.abc import Iterator

from resctrlctl.doctor import kernel
from resctrlctl.doctor.finding import Finding, Severity
from resctrlctl.doctor.host import Host
from resctrlctl.doctor.resctrl import info, mounted_at

CHECK = "energy"
# Kconfig of X86_CPU_RESCTRL_INTEL_AET: it depends on drivers that are built in, and each of these on the first.
OPTIONS = ("INTEL_VSEC", "INTEL_TPMI", "INTEL_PMT_TELEMETRY", "X86_CPU_RESCTRL", "X86_CPU_RESCTRL_INTEL_AET")
_DRIVERS = OPTIONS[:3]
# The GUIDs of telemetry regions with the energy of each RMID: energy_* in arch/x86/kernel/cpu/resctrl/intel_aet.c.
ENERGY_GUIDS = frozenset({0x26696143})
_TELEMETRY = "/sys/class/intel_pmt"
_PAGE = "CORE ENERGY in resctrlmond(7)"


def check(host: Host) -> Iterator[Finding]:
    """Find each reason for which there are no joules."""
    events = info(host, "PERF_PKG_MON/mon_features").split()
    if "core_energy" in events:
        yield Finding(Severity.OK, CHECK, "core energy is counted (core_energy, in joules)")
        return
    vendor, name, _ = kernel.processor(host)
    if vendor != "GenuineIntel":
        yield Finding(
            Severity.NOTE,
            CHECK,
            f"no joules: the processor is not from Intel ({name or vendor or 'unknown'})",
            "Only Intel processors with Application Energy Telemetry count the energy of their cores for each RMID.",
        )
        return
    if hypervisor := kernel.virtual_machine(host):
        yield Finding(
            Severity.NOTE,
            CHECK,
            f"no joules: this is a virtual machine ({hypervisor})",
            "Hypervisors do not pass the energy telemetry of the processor to virtual machines.",
            ("Run resctrlmond on the physical machine, and assign the virtual machines there",),
        )
        return
    yield from _links(host)


def _links(host: Host) -> Iterator[Finding]:
    """Find the broken links of a physical machine with an Intel processor."""
    guids = telemetry_guids(host)
    # Without the telemetry driver, the hardware is unknown: nothing is known to be missing.
    severity = Severity.WARNING if guids & ENERGY_GUIDS else Severity.NOTE
    broken = [*_hardware(host, guids), *_built(host, severity), *_command_line(host), *_log(host)]
    yield from broken
    if not broken:
        yield _first_mount(host, severity)


def telemetry_guids(host: Host) -> set[int]:
    """Return the GUID of each telemetry region that the driver shows."""
    texts = [host.read(f"{_TELEMETRY}/{name}/guid").strip() for name in host.names(_TELEMETRY, "telem*")]
    return {int(text, 16) for text in texts if re.fullmatch(r"(?:0x)?[0-9a-fA-F]+", text)}


def _hardware(host: Host, guids: set[int]) -> Iterator[Finding]:
    if guids & ENERGY_GUIDS:
        return
    _, name, _ = kernel.processor(host)
    if guids:
        yield Finding(
            Severity.NOTE,
            CHECK,
            f"no joules: no telemetry region of this processor ({name}) is known to have the energy of each RMID",
            "The driver shows other telemetry. A later kernel may know more regions.",
        )
    elif not host.names("/sys/bus/pci/drivers/intel_vsec", "0000:*"):
        yield Finding(
            Severity.NOTE,
            CHECK,
            f"no joules: no telemetry device is in use ({name})",
            "Either the processor has none (Clearwater Forest has), or the driver intel_vsec is missing.",
            ("modprobe intel_vsec pmt_telemetry && cat /sys/class/intel_pmt/telem*/guid  # 0x26696143 is energy",),
        )


def _built(host: Host, severity: Severity) -> Iterator[Finding]:
    path, options = kernel.configuration(host)
    if not options:
        yield Finding(
            Severity.NOTE,
            CHECK,
            "the kernel's configuration was not found, so it is unknown whether the kernel can count energy",
            "/usr/lib/modules/RELEASE/config, /boot/config-RELEASE and /proc/config.gz do not exist.",
        )
        return
    wrong = [f"{name}={options.get(name, 'n')}" for name in OPTIONS if options.get(name) != "y"]
    if not wrong:
        return
    modules = [name for name in _DRIVERS if options.get(name) == "m"]
    why = "X86_CPU_RESCTRL_INTEL_AET is the code that counts energy."
    if modules:
        why += " It can be built only if these drivers are built in (y): as modules (m), no order of loading helps."
    yield Finding(
        severity,
        CHECK,
        f"no joules: the kernel is built without core energy ({', '.join(wrong)} in {path})",
        f"{why} See {_PAGE}.",
        (
            "Build the kernel with these options, install it and reboot. In the source of this kernel:",
            f"cp {path} .config",
            f"scripts/config {' '.join(f'-e {name}' for name in OPTIONS)}",
            "make olddefconfig && grep INTEL_AET .config && make -j$(nproc) bindeb-pkg",
        ),
    )


def _command_line(host: Host) -> Iterator[Finding]:
    if kernel.is_off(host, "energy"):
        yield Finding(
            Severity.WARNING,
            CHECK,
            "no joules: rdt= on the kernel's command line turns energy off (!energy)",
            "The kernel does not count energy, also if it and the processor can.",
            kernel.boot_fix(host, "rdt=", "remove !energy from rdt="),
        )


def _log(host: Host) -> Iterator[Finding]:
    """Find the kernel's own reason."""
    try:
        text, is_complete = host.kernel_log()
    except FileNotFoundError:
        return
    except OSError as error:
        yield Finding(
            Severity.NOTE,
            CHECK,
            f"the kernel's log was not examined: /dev/kmsg: {error.strerror}",
            "It has the kernel's reason if the telemetry regions have too few RMIDs.",
            ("sudo resctrlctl doctor",),
        )
        return
    if re.search(r"energy:0x[0-9a-f]+ monitoring not enabled due to insufficient RMIDs", text):
        yield Finding(
            Severity.WARNING,
            CHECK,
            "no joules: the kernel found the energy telemetry and did not enable it: insufficient RMIDs",
            "It has fewer counters than RMIDs. If forced, it limits the number of monitoring groups to that.",
            kernel.boot_fix(host, "rdt=", "add energy to rdt= (rdt=energy)"),
        )
    elif not is_complete:
        yield Finding(
            Severity.NOTE,
            CHECK,
            "the kernel's log has lost the messages of its start, so a reason in them is unknown",
            "",
            ("journalctl -k -b --grep 'insufficient RMIDs'",),
        )


def _first_mount(host: Host, severity: Severity) -> Finding:
    if not mounted_at(host):
        return Finding(
            severity,
            CHECK,
            "core energy is looked for when resctrl is mounted for the first time: it is not mounted",
            "The processor and the kernel have what core energy needs.",
            ("systemctl enable --now sys-fs-resctrl.mount",),
        )
    return Finding(
        severity,
        CHECK,
        "no joules: the kernel can count energy, and found none when resctrl was first mounted",
        "The kernel looks once in each boot. A new mount does not repeat it, and a driver that became ready later is "
        "not seen.",
        ("journalctl -k -b --grep 'resctrl|intel_vsec|pmt'  # the reason, if the kernel logged one", "reboot"),
    )
