# SPDX-License-Identifier: Apache-2.0
"""Mount a simulation: in this process until it is stopped, or in a child process for the duration of a block."""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import errno
import importlib
import os
import select
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.sim.fuse.filesystem import Filesystem
from resctrlmond.sim.host.procs import ProcTable
from resctrlmond.sim.host.virtual import VirtualTasks
from resctrlmond.sim.kernel.clock import Clock, Stopwatch
from resctrlmond.sim.kernel.model import Resctrl
from resctrlmond.sim.profiles import Kernel, Profile, profile_named

FSTYPE = "resctrlmond-sim"  # reads fuse.resctrlmond-sim in /proc/self/mountinfo
POLL_SECONDS = 0.005
MOST_POLLING = 1 / 20  # of one CPU
START_SECONDS = 10.0
END_SECONDS = 5.0
GRACE_SECONDS = 0.5
_ENDING = {signal.SIGTERM, signal.SIGINT, signal.SIGHUP}
_MNT_DETACH = 2


class SimulationFailed(ResctrlError):
    """The simulation could not be mounted, or ended by itself."""


def check_mountpoint(mountpoint: str) -> None:
    """Check that ``mountpoint`` is an empty directory with nothing mounted on it. Raises ``SimulationFailed``."""

    def refuse(why: str, remedy: str, number: int = 0) -> SimulationFailed:
        return SimulationFailed(f"cannot mount a simulation: {why}", path=mountpoint, errno=number, remedy=remedy)

    try:
        if os.path.ismount(mountpoint):
            raise refuse("something is mounted there already", "Choose another directory, or unmount it first")
        if os.listdir(mountpoint):
            raise refuse("the directory is not empty", "Choose an empty directory")
    except OSError as failure:
        if failure.errno == errno.ENOTCONN:
            remedy = f"A simulation died there: run 'umount --lazy {mountpoint}'"
        else:
            remedy = f"Make it with 'mkdir {mountpoint}', or choose another directory"
        raise refuse("the mount point cannot be used", remedy, failure.errno or 0) from failure


def load_fuse() -> Any:
    """Load mfusepy with libfuse 3. Raises ``SimulationFailed`` if one of them, or /dev/fuse, is missing."""
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
    except OSError as failure:
        remedy = "Run it as root" if failure.errno == errno.EACCES else "Load the kernel module: 'modprobe fuse'"
        raise SimulationFailed(
            "cannot open the FUSE device", path="/dev/fuse", errno=failure.errno or 0, remedy=remedy
        ) from failure
    library = ctypes.util.find_library("fuse3")
    if library is None:
        raise SimulationFailed("libfuse 3 is not installed", remedy="Install it: 'apt install fuse3'")
    # mfusepy prefers libfuse 2 if it is installed.
    os.environ.setdefault("FUSE_LIBRARY_PATH", library)
    try:
        return importlib.import_module("mfusepy")
    except ImportError as failure:
        raise SimulationFailed(
            "the Python module mfusepy is not installed", remedy="Install it: 'pip install resctrlmond[sim]'"
        ) from failure


def unmount(mountpoint: str) -> bool:
    """Unmount lazily, even if files in it are open. Return False if this was refused."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.umount2(os.fsencode(mountpoint), _MNT_DETACH) == 0:
        return True
    if ctypes.get_errno() != errno.EPERM:
        return False
    command = ["fusermount3", "-u", "-z", mountpoint]
    return subprocess.run(command, check=False, capture_output=True).returncode == 0


def serve(
    mountpoint: str,
    profile: Profile,
    residue: int | None,
    *,
    cpus: int | None = None,
    virtual_cpus: int | None,
    until_eof: bool,
) -> None:
    """Mount, report it on standard output, and serve until SIGTERM, SIGINT, SIGHUP or an unmount.

    ``cpus``: the number of CPUs instead of that of the host; nothing runs on CPUs that the host does not have, and
    additional ones of the host are counted as CPU 0, 1 and so on. ``virtual_cpus``: use virtual tasks on this number
    of CPUs. ``until_eof``: also stop when standard input ends, as it does when the parent process dies.
    """
    check_mountpoint(mountpoint)
    fuse = load_fuse()
    mountpoint = os.path.abspath(mountpoint)
    procs = ProcTable.open(cpus) if virtual_cpus is None else ProcTable()
    virtual = (VirtualTasks(virtual_cpus, host=procs), Stopwatch()) if virtual_cpus else None

    def announce() -> None:
        print(f"simulated resctrl (profile {profile.name}) on {mountpoint}: NOT hardware", flush=True)

    table, clock = (virtual[0], Clock(virtual[1].now)) if virtual else (procs, Clock())
    model = Resctrl(profile, table, clock, residue)
    filesystem = Filesystem(model, procs, fuse.fuse_get_context, announce, virtual)
    # Block signals in all threads, so that only the watching thread takes them: libfuse's own handlers can miss a
    # signal that arrives just before they wait for a request.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    ended = threading.Event()
    watcher = threading.Thread(target=_watch, args=(filesystem, mountpoint, until_eof, ended), daemon=True)
    watcher.start()
    try:
        fuse.FUSE(
            filesystem,
            mountpoint,
            foreground=True,
            # In one thread, so that requests see each decision of the model in order.
            nothreads=True,
            allow_other=os.geteuid() == 0,
            subtype=FSTYPE,
            fsname=FSTYPE,
        )
    except RuntimeError as failure:
        raise SimulationFailed(
            "libfuse could not mount the simulation", path=mountpoint, remedy="Its own message is above"
        ) from failure
    finally:
        ended.set()
        watcher.join()
        procs.close()


def _watch(filesystem: Filesystem, mountpoint: str, until_eof: bool, ended: threading.Event) -> None:
    """Poll until it is time to stop, then unmount; also after an error, because only this thread takes signals."""
    try:
        _poll(filesystem, until_eof, ended)
    finally:
        if not ended.is_set():
            unmount(mountpoint)
            if not ended.wait(GRACE_SECONDS):
                # A file is still open, so libfuse continues to serve it; its connection ends with this process.
                os._exit(0)


def _poll(filesystem: Filesystem, until_eof: bool, ended: threading.Event) -> None:
    """Sample the tasks every 5 ms, or less often if that is expensive, until a signal or the end of input."""
    pause = POLL_SECONDS
    while signal.sigtimedwait(_ENDING, pause) is None and not (until_eof and _stdin_ended()):
        if ended.is_set():
            return
        started = time.thread_time()  # without the wait for a request
        filesystem.poll()
        pause = max(POLL_SECONDS, (time.thread_time() - started) / MOST_POLLING)


def _stdin_ended() -> bool:
    readable, _, _ = select.select([0], [], [], 0)
    return bool(readable) and os.read(0, 4096) == b""


class Simulation:
    """A simulated resctrl in a child process: ``mountpoint`` is mounted while the block runs.

    A separate process, because file operations of a process must not wait for that process itself. It unmounts and
    ends with the block, at SIGTERM, and, unless it ``outlives`` this process, when this process dies. ``residue`` as
    in ``Counters``; the numbers as in ``profile_named``; ``cpus``: the number of CPUs (see ``serve``);
    ``virtual_cpus``: use virtual tasks (see ``Control``) on this number of CPUs. Raises ``SimulationFailed``, and
    ``ValueError`` for an unknown profile or an invalid number.
    """

    def __init__(
        self,
        mountpoint: str,
        profile: str = "intel-aet",
        rmids: int | None = None,
        *,
        domains: int | None = None,
        closids: int | None = None,
        counters: int | None = None,
        kernel: str = Kernel.NEWEST,
        lag_ms: float | None = None,
        telemetry_bits: int | None = None,
        mbm_bits: int | None = None,
        cbm_bits: int | None = None,
        shareable_bits: int | None = None,
        sparse_masks: int | None = None,
        events: str | None = None,
        debug: bool = False,
        cpus: int | None = None,
        residue: int | None = None,
        virtual_cpus: int | None = None,
        outlives: bool = False,
    ) -> None:
        self._outlives = outlives
        self.mountpoint = os.path.abspath(mountpoint)
        numbers: dict[str, Any] = {
            "rmids": rmids,
            "domains": domains,
            "closids": closids,
            "counters": counters,
            "kernel": kernel,
            "lag_ms": lag_ms,
            "telemetry_bits": telemetry_bits,
            "mbm_bits": mbm_bits,
            "cbm_bits": cbm_bits,
            "shareable_bits": shareable_bits,
            "sparse_masks": sparse_masks,
            "events": events,
        }
        self.profile = profile_named(profile, **numbers, debug=debug)
        numbers |= {"profile": profile, "residue": residue, "cpus": cpus, "virtual": virtual_cpus}
        if shareable_bits is not None:
            numbers["shareable_bits"] = f"{shareable_bits:x}"
        # As on the command line: --lag-ms 0.5
        self._options = [
            word
            for name, value in numbers.items()
            if value is not None
            for word in (f"--{name.replace('_', '-')}", str(value))
        ]
        self._options += ["--debug"] if debug else []
        self._server: subprocess.Popen[str] | None = None
        self._complaints: IO[str] | None = None

    @property
    def pid(self) -> int:
        """The pid of the process that serves the filesystem; 0 if there is none."""
        return self._server.pid if self._server else 0

    def start(self) -> None:
        """Start the server and wait until the filesystem is mounted."""
        check_mountpoint(self.mountpoint)
        command = [sys.executable, "-m", "resctrlmond.sim", self.mountpoint, *self._options]
        command += [] if self._outlives else ["--until-eof"]
        package = str(Path(__file__).parents[3])
        path = os.pathsep.join([package, *filter(None, [os.environ.get("PYTHONPATH")])])
        self._complaints = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by _end()
        self._server = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL if self._outlives else subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
            # A Ctrl-C in the terminal is for this process, which then stops the simulation itself.
            start_new_session=True,
        )
        if not self._announced():
            output = self._end() or f"no answer within {START_SECONDS:.0f} s"
            raise SimulationFailed(f"the simulation did not start: {output}", path=self.mountpoint)

    def _announced(self) -> bool:
        assert self._server is not None
        assert self._server.stdout is not None
        readable, _, _ = select.select([self._server.stdout], [], [], START_SECONDS)
        return bool(readable) and self._server.stdout.readline() != ""

    def stop(self) -> None:
        """Unmount and end the server, in any state, and show the errors that it has printed."""
        if complaints := self._end():
            print(complaints, file=sys.stderr)

    def _end(self) -> str:
        """End the server, and return what it has printed on standard error."""
        server, self._server = self._server, None
        if server is None:
            return ""
        server.terminate()
        try:
            server.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
        for pipe in (server.stdin, server.stdout):
            if pipe:
                pipe.close()
        if server.returncode < 0:
            # A killed server could not unmount.
            with contextlib.suppress(OSError):
                unmount(self.mountpoint)
        assert self._complaints
        with self._complaints as file:
            file.seek(0)
            return file.read().strip()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
