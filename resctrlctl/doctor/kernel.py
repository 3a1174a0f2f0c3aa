# SPDX-License-Identifier: Apache-2.0
"""How the kernel was built and started: its configuration, its command line and its processor."""

from __future__ import annotations

import gzip
import os
import re
from collections.abc import Iterator

from resctrlctl.doctor.finding import Finding, Severity
from resctrlctl.doctor.host import Host

# The tokens of rdt= in Documentation/admin-guide/kernel-parameters.txt.
_MONITORING = {"cmt": "llc_occupancy", "mbmtotal": "mbm_total_bytes", "mbmlocal": "mbm_local_bytes"}
_TOKENS = frozenset(
    {*_MONITORING, "l3cat", "l3cdp", "l2cat", "l2cdp", "mba", "smba", "bmec", "abmc", "sdciae", "energy", "perf"}
)
# Files from which boot loaders take the command line.
_BOOT_FILES = ("/etc/default/grub", "/etc/kernel/cmdline")
_BOOT_FOLDERS = (
    ("/etc/default/grub.d", "*.cfg"),
    ("/boot/loader/entries", "*.conf"),
    ("/efi/loader/entries", "*.conf"),
)


def configuration(host: Host) -> tuple[str, dict[str, str]]:
    """Return the file of the kernel's configuration and its options without "CONFIG_"; ("", {}) if there is none."""
    release = host.read("/proc/sys/kernel/osrelease").strip() or os.uname().release
    for path in (f"/usr/lib/modules/{release}/config", f"/lib/modules/{release}/config", f"/boot/config-{release}"):
        if text := host.read(path):
            return path, _options(text)
    path = "/proc/config.gz"
    if host.exists(path):
        with gzip.open(host.path(path), "rt", encoding="utf-8", errors="replace") as file:
            return path, _options(file.read())
    return "", {}


def _options(text: str) -> dict[str, str]:
    return dict(re.findall(r"^CONFIG_(\w+)=(.*)$", text, re.MULTILINE))


def rdt_tokens(host: Host) -> list[str]:
    """Return the words of all ``rdt=`` on the kernel's command line, such as ``!mba``."""
    values = re.findall(r"(?:^|\s)rdt=(\S*)", host.read("/proc/cmdline"))
    return [token for value in values for token in value.split(",") if token]


def is_off(host: Host, name: str) -> bool:
    """Return whether ``rdt=`` turns a feature off, such as ``energy``."""
    return any(token.startswith("!") and token[1:].partition(":")[0] == name for token in rdt_tokens(host))


def origins(host: Host, word: str) -> list[str]:
    """Return each file and line of the boot loader's configuration that has a word, as ``file:line``."""
    files = [*_BOOT_FILES]
    for folder, pattern in _BOOT_FOLDERS:
        try:
            files += [f"{folder}/{name}" for name in host.names(folder, pattern)]
        except PermissionError:  # /boot is often closed to users
            continue
    return [
        f"{path}:{number}"
        for path in files
        for number, line in enumerate(_readable(host, path).splitlines(), 1)
        if word in line and not line.lstrip().startswith("#")
    ]


def _readable(host: Host, path: str) -> str:
    try:
        return host.read(path)
    except OSError:
        return ""


def boot_fix(host: Host, word: str, change: str) -> tuple[str, ...]:
    """Return the lines of a fix that changes a word of the kernel's command line."""
    places = ", ".join(origins(host, word)) or "the boot loader's configuration (GRUB: /etc/default/grub)"
    update = "update-grub && reboot" if host.program("update-grub") else "reboot"
    return (f"{places}: {change}", f"{update}  # after the change of the boot loader's configuration")


def check_rdt_parameter(host: Host) -> Iterator[Finding]:
    """Check ``rdt=`` on the kernel's command line."""
    tokens = rdt_tokens(host)
    off = [event for name, event in _MONITORING.items() if is_off(host, name)]
    if off:
        is_all = len(off) == len(_MONITORING)
        yield Finding(
            Severity.ERROR if is_all else Severity.WARNING,
            "kernel-parameter",
            f"rdt={','.join(tokens)} on the kernel's command line turns off {', '.join(off)}",
            "The kernel does not count cache and memory bandwidth, and the daemon does not start without an event."
            if is_all
            else "The kernel does not count these events for any workload.",
            boot_fix(host, "rdt=", f"remove {', '.join(f'!{name}' for name in _MONITORING if is_off(host, name))}"),
        )
    unknown = [token for token in tokens if token.removeprefix("!").partition(":")[0] not in _TOKENS]
    if unknown:
        yield Finding(
            Severity.WARNING,
            "kernel-parameter",
            f"rdt= on the kernel's command line has words that the kernel does not know: {', '.join(unknown)}",
            "The kernel ignores them without a message.",
            boot_fix(
                host, "rdt=", f"remove or correct {', '.join(unknown)}; known words: {', '.join(sorted(_TOKENS))}"
            ),
        )
    if not off and not unknown:
        text = f"rdt={','.join(tokens)} turns off no event" if tokens else "no rdt= on the kernel's command line"
        yield Finding(Severity.OK, "kernel-parameter", text)


def processor(host: Host) -> tuple[str, str, frozenset[str]]:
    """Return the vendor, the name and the flags of the processor; "" and no flags if the kernel shows none."""
    first = host.read("/proc/cpuinfo").partition("\n\n")[0]
    fields = dict(re.findall(r"^([^:\n]+?)\s*:[ \t]*(.*)$", first, re.MULTILINE))
    return fields.get("vendor_id", ""), fields.get("model name", ""), frozenset(fields.get("flags", "").split())


def virtual_machine(host: Host) -> str:
    """Return the name of the hypervisor, or ``unknown hypervisor``; "" on a physical machine."""
    _, _, flags = processor(host)
    found = (host.run("systemd-detect-virt", "--vm") or "").strip()
    if found and found != "none":
        return found
    # x86 hypervisors set this bit of CPUID leaf 1; others are known by the firmware's tables.
    vendor = host.read("/sys/class/dmi/id/sys_vendor").strip()
    is_known = re.search(r"QEMU|VMware|Xen|innotek|Parallels|Amazon EC2|Google|Bochs|KVM", vendor) is not None
    product = host.read("/sys/class/dmi/id/product_name").strip()
    if "hypervisor" in flags or (is_known and "metal" not in product):
        return vendor or "unknown hypervisor"
    return ""
