# SPDX-License-Identifier: Apache-2.0
"""Force CPU features on a kernel without setcpuid=, through QEMU's debugger stub, before the kernel reads them.

The stub speaks GDB's remote protocol ("Debugging with GDB", appendix E). This needs only six of its packets, and no
gdb.
"""

from __future__ import annotations

import re
import socket
import subprocess
from collections.abc import Iterable
from pathlib import Path

from .errors import BuildError, GuestDiedError
from .tools import ENVIRONMENT

# Word and bit of a feature in the kernel's table (arch/x86/include/asm/cpufeatures.h).
FEATURES = {
    "cat_l3": (7, 4),
    "cqm": (9, 12),
    "rdt_a": (9, 15),
    "cqm_llc": (11, 0),
    "cqm_occup_llc": (11, 1),
    "cqm_mbm_total": (11, 2),
    "cqm_mbm_local": (11, 3),
}
# Runs once, after the .bss is cleared and before the kernel reads any feature (arch/x86/kernel/cpu/common.c).
STOP_AT = "early_cpu_init"
# apply_forced_caps() adds these to the features of each CPU, at boot and when it comes online.
FORCED = "cpu_caps_set"
SECONDS = 60.0


def words(features: Iterable[str]) -> dict[int, int]:
    """Return the 32-bit words of the kernel's table to change, by index. Raises KeyError for an unknown feature."""
    found: dict[int, int] = {}
    for name in features:
        word, bit = FEATURES[name]
        found[word] = found.get(word, 0) | 1 << bit
    return found


def symbols(program: str, cpu: str, vmlinux: Path, initrd: Path) -> dict[str, int]:
    """Return the addresses of STOP_AT and FORCED, which the kernel itself prints in a boot of two seconds.

    Debian's packages have no System.map with addresses (it is in the debug symbols, some hundred MB). An ELF image
    that QEMU boots directly is not moved (KASLR is the decompressor's), so they are the same in the next boot.
    """
    command = [
        *(program, "-machine", "q35,hpet=on", "-accel", "tcg", "-cpu", cpu, "-m", "256"),
        *("-nodefaults", "-no-reboot", "-display", "none", "-serial", "stdio"),
        *("-kernel", str(vmlinux), "-initrd", str(initrd)),
        *("-append", f"console=ttyS0 quiet panic=-1 rdinit=/symbols symbols={STOP_AT}|{FORCED}"),
    ]
    try:
        printed = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=SECONDS, check=True, env=ENVIRONMENT
        ).stdout.decode(errors="replace")
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise BuildError(f"the kernel did not print its symbols: {error}\n{error.stdout!r}") from error
    return parsed(printed)


def parsed(kallsyms: str) -> dict[str, int]:
    """Return the addresses in lines of /proc/kallsyms. Raises BuildError if one is missing or hidden (0)."""
    lines = re.findall(r"(?m)^([0-9a-f]+) \w (\w+)\r?$", kallsyms)
    found = {name: int(address, 16) for address, name in lines if name in (STOP_AT, FORCED)}
    if len(found) != 2 or 0 in found.values():
        raise BuildError(f"/proc/kallsyms has no addresses of {STOP_AT} and {FORCED}:\n{kallsyms[-2000:]}")
    return found


class Stub:
    """A connection to QEMU's stub. The machine is halted while it is open."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""
        connection.settimeout(SECONDS)

    def ask(self, packet: str) -> str:
        """Send a packet and return its reply. Raises GuestDiedError if the stub refuses it or does not reply."""
        try:
            self._connection.sendall(framed(packet))
            reply = self._reply()
            self._connection.sendall(b"+")
        except OSError as error:
            raise GuestDiedError(f"QEMU's debugger stub, asked {packet!r}: {error}", "") from error
        if not reply or reply.startswith("E"):
            raise GuestDiedError(f"QEMU's debugger stub refused {packet!r}: {reply or 'unknown packet'}", "")
        return reply

    def force(self, features: Iterable[str], addresses: dict[str, int]) -> None:
        """Run a machine that was started halted up to STOP_AT, force the features there, and let it run on."""
        stop = f"1,{addresses[STOP_AT]:x},1"  # 1: a hardware breakpoint, because no page can be written yet
        self.ask(f"Z{stop}")
        self.ask("c")
        for word, bits in words(features).items():
            address = addresses[FORCED] + 4 * word
            value = int.from_bytes(bytes.fromhex(self.ask(f"m{address:x},4")), "little") | bits
            self.ask(f"M{address:x},4:{value.to_bytes(4, 'little').hex()}")
        self.ask(f"z{stop}")
        self.ask("D")

    def _reply(self) -> str:
        while not (match := re.search(rb"\$([^#]*)#[0-9a-f]{2}", self._received)):
            data = self._connection.recv(4096)
            if not data:
                raise ConnectionError("QEMU ended")
            self._received += data
        self._received = self._received[match.end() :]
        return match[1].decode("ascii")


def framed(packet: str) -> bytes:
    """Return the packet in its frame: the text, then its checksum modulo 256."""
    data = packet.encode("ascii")
    return b"$%s#%02x" % (data, sum(data) % 256)
