# SPDX-License-Identifier: Apache-2.0
"""One QEMU process. All its files are open descriptors, so it leaves nothing behind, however the tests end."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from .debugger import Stub
from .errors import GuestDiedError
from .inside.agent import PORT
from .kernel import NEWEST
from .profiles import Profile
from .tools import ENVIRONMENT

PROGRAM = "qemu-system-x86_64"
QUIT_SECONDS = 10.0
SAVE_SECONDS = 120.0
# Printed for features of the CPU model that QEMU does not emulate: 20 lines at each start, without consequence.
TCG_LACKS = "warning: TCG doesn't support requested feature"


def cpu(profile: Profile) -> str:
    """Return the value of QEMU's -cpu.

    The L3 in the cache table of EPYC-Milan is larger than one (borrowed) unit of occupancy, so the threshold of
    the limbo can be set. Vendor and model are those of a server without the kernel's RDT quirks.

    QEMU 7.2 leaves wrong flags after cmpxchg16b, also the single-step flag. Linux 6.12 allocates memory with that
    instruction if it exists, and four of ten boots panicked or warned. So cx16=off.
    """
    return f"EPYC-Milan,vendor=GenuineIntel,level={profile.cpu_level},family=6,model=106,stepping=6,cx16=off"


def machine_arguments(profile: Profile) -> list[str]:
    """Return the part of the command line that a saved state depends on."""
    # thread=single: with a thread for each emulated processor, guests have panicked or hung after the restore.
    # mitigations=off: page table isolation would flush the emulated TLB at each system call.
    append = "console=ttyS0 quiet panic=-1 tsc=reliable mitigations=off systemd.show_status=no"
    return [
        *("-machine", "q35,hpet=on", "-accel", "tcg,thread=single", "-cpu", cpu(profile)),
        *("-smp", profile.smp, "-m", str(profile.memory), "-nodefaults", "-no-reboot", "-display", "none"),
        *("-append", f"{append} setcpuid={','.join(profile.features)}" if profile.kernel == NEWEST else append),
        *("-chardev", "stdio,id=console,signal=off", "-serial", "chardev:console"),
        *("-device", "virtio-serial-pci", "-device", f"virtserialport,chardev=agent,name={PORT}"),
        *("-device", "virtio-blk-pci,drive=root"),
    ]


def version() -> str:
    """Return QEMU's version line. Only the QEMU that saved a state can restore it."""
    return subprocess.run([PROGRAM, "--version"], capture_output=True, text=True, check=True, env=ENVIRONMENT).stdout


class Qemu:
    """A running guest; ``agent`` is the host's end of the agent's port."""

    def __init__(
        self,
        profile: Profile,
        vmlinux: Path,
        initrd: Path,
        disk: Path,
        state: Path | None = None,
        *,
        writes: bool = True,
    ) -> None:
        """Boot from *disk* (qcow2), or, with a saved *state*, restore it. Unless *writes*, discard what is written.

        A kernel that does not know setcpuid= does not begin to boot until ``force`` was called.
        """
        self.profile = profile
        arguments = [*machine_arguments(profile), "-kernel", str(vmlinux), "-initrd", str(initrd)]
        drive = f"file={disk},format=qcow2,if=none,id=root,cache=unsafe"
        arguments += ["-drive", drive if writes else f"{drive},snapshot=on"]
        if state is not None:
            arguments += ["-incoming", f"exec:cat {shlex.quote(str(state))}"]
        halted = state is None and profile.kernel != NEWEST
        with contextlib.ExitStack() as stack:
            self._console: IO[bytes] = stack.enter_context(tempfile.TemporaryFile())
            self.agent, agent = self._pair(stack)
            self._monitor, monitor = self._pair(stack)
            arguments += ["-chardev", f"socket,id=agent,fd={agent.fileno()}"]
            arguments += ["-chardev", f"socket,id=monitor,fd={monitor.fileno()}", "-mon", "monitor,mode=control"]
            self._debugger, debugger = self._pair(stack)
            if halted:
                arguments += ["-chardev", f"socket,id=debugger,fd={debugger.fileno()}"]
                arguments += ["-gdb", "chardev:debugger", "-S"]
            self._process = subprocess.Popen(
                # The kernel ends QEMU with the process that started it, even one that was killed.
                ["setpriv", "--pdeathsig", "KILL", PROGRAM, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=self._console,
                stderr=self._console,
                pass_fds=(agent.fileno(), monitor.fileno(), debugger.fileno()),
                env=ENVIRONMENT,
            )
            agent.close()
            monitor.close()
            debugger.close()
            self._open = stack.pop_all()
        self._answers: Iterator[bytes] | None = None

    @property
    def pid(self) -> int:
        """QEMU's process id."""
        return self._process.pid

    def force(self, addresses: dict[str, int]) -> None:
        """Let a kernel that does not know setcpuid= begin to boot, with the profile's features forced."""
        Stub(self._debugger).force(self.profile.features, addresses)

    @staticmethod
    def _pair(stack: contextlib.ExitStack) -> tuple[socket.socket, socket.socket]:
        ours, theirs = socket.socketpair()
        stack.enter_context(ours)
        stack.enter_context(theirs)
        return ours, theirs

    def console(self) -> str:
        """All that the guest's console and QEMU itself have said."""
        size = os.fstat(self._console.fileno()).st_size
        text = os.pread(self._console.fileno(), size, 0).decode(errors="replace")
        return "".join(line for line in text.splitlines(keepends=True) if TCG_LACKS not in line)

    def save(self, state: Path) -> None:
        """Write memory and devices to *state* and end QEMU; the disk is left as it was at that moment.

        The guest is not stopped first: the state would remember that, and a restored guest would stand still.
        """
        self.ask("migrate-set-parameters", {"max-bandwidth": 1 << 40})
        self.ask("migrate", {"uri": f"exec:cat >{shlex.quote(str(state))}"})
        deadline = time.monotonic() + SAVE_SECONDS
        while (status := self.ask("query-migrate")["status"]) != "completed":
            if status in {"failed", "cancelled"} or time.monotonic() > deadline:
                raise GuestDiedError(f"QEMU could not save the guest's state ({status})", self.console())
            time.sleep(0.05)
        self.ask("quit")
        self._process.wait(QUIT_SECONDS)

    def ask(self, command: str, arguments: dict[str, Any] | None = None) -> Any:
        """One command of the QEMU Machine Protocol; its return value."""
        if self._answers is None:
            self._monitor.settimeout(SAVE_SECONDS)
            self._answers = iter(self._open.enter_context(self._monitor.makefile("rb")))
            next(self._answers)  # the greeting
            self.ask("qmp_capabilities")
        self._monitor.sendall(json.dumps({"execute": command, "arguments": arguments or {}}).encode() + b"\n")
        for line in self._answers:
            answer = json.loads(line)
            if "return" in answer:
                return answer["return"]
            if "error" in answer:
                raise GuestDiedError(f"QEMU refused {command}: {answer['error']}", self.console())
        raise GuestDiedError(f"QEMU ended while asked to {command}", self.console())

    def close(self) -> None:
        """End the guest like a power cut does. The overlay of its disk is removed."""
        self._process.kill()
        self._process.wait(QUIT_SECONDS)
        self._open.close()
