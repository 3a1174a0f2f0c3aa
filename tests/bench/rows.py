# SPDX-License-Identifier: Apache-2.0
"""The rows of the benchmark: the interfaces of a running daemon, and the lowest layer without a daemon."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import msgspec
from dbus_fast import Variant

from resctrlmond.client import Client
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tasks import ProcessTasks, move
from resctrlmond.resctrl.tree import GroupRef, Tree
from resctrlmond.workloads.records.usage import INTERVAL_S
from tests.api import private_bus
from tests.bench.host import AS_INSTALLED, IDLE, ROOT, Host, python, resident, spawn, spawn_at_once, threaded
from tests.bench.measure import BYTES, COUNT, MEBIBYTES, SECONDS, Row, interleaved
from tests.daemon.containers import containers, state_of
from tests.hook.builds import compile_hook

MANAGER = "org.resctrlmon.Manager."
# So that the next call reads the counters again.
PAUSE_S = 3 * INTERVAL_S
MBM = ("mbm_total_bytes", "mbm_local_bytes")
COUNTERS = [
    *(f"mon_data/mon_L3_0{n}/{event}" for n in "01" for event in ("llc_occupancy", *MBM)),
    *(f"mon_data/mon_PERF_PKG_0{n}/{event}" for n in "01" for event in ("core_energy", "activity")),
]
CLAIM = {"claim": "bench"}
# Where Debian's packages have the sources of libraries.
GO_SOURCES = Path("/usr/share/gocode")


def read_by_hand(directory: str) -> None:
    """Every counter of a group, its names known."""
    group = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    for name in COUNTERS:
        fd = os.open(name, os.O_RDONLY, dir_fd=group)
        os.read(fd, 4096)
        os.close(fd)
    os.close(group)


def scan_by_hand(tree: str) -> None:
    """Mark and nonce of every group of the root class."""
    with os.scandir(f"{tree}/mon_groups") as entries:
        for entry in entries:
            entry.stat(follow_symlinks=False)


def life_by_hand(tree: str, pid: int) -> None:
    """The system calls of Create, Assign and Release."""
    group = f"{tree}/mon_groups/bare"
    os.mkdir(group)
    os.utime(group, ns=(1, 1))
    read_by_hand(group)
    fd = os.open(f"{group}/tasks", os.O_WRONLY)
    os.write(fd, b"%d\n" % pid)
    os.close(fd)
    read_by_hand(group)
    os.rmdir(group)


# -- a daemon for each round


def cpu_s(pid: int) -> float:
    """The CPU time that a process has used, in seconds (proc_pid_stat(5))."""
    with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stat:
        fields = stat.read().rpartition(") ")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def calls_of(pid: int, work: Callable[[], object]) -> float:
    """Count the system calls of all threads of a process while the work is done, by strace(1)."""
    threads = list(Path(f"/proc/{pid}/task").glob("*/status"))
    with tempfile.NamedTemporaryFile("r") as counts:
        # The messages by which strace tells that it has attached are off, so wait until each thread is traced.
        with subprocess.Popen(
            ["strace", "-c", "-U", "calls,name", "-f", "-q", "-o", counts.name, "-p", str(pid)]
        ) as tracer:
            while any("TracerPid:\t0\n" in status.read_text(encoding="ascii") for status in threads):
                if tracer.poll() is not None:
                    raise OSError("strace cannot trace the process")
                time.sleep(0.01)
            work()
            tracer.send_signal(signal.SIGINT)
            tracer.wait(30)
        calls, name = counts.read().splitlines()[-1].split()
    assert name == "total"
    return float(calls)


def starts(host: Host, rounds: int, groups: int, ready_s: float | None, memory_mib: int) -> Iterator[Row]:
    """Start-up and memory of the daemon on the tree and records as they stand, with their goals."""
    ready, used, memory, without_dbus, imports, importing, idle = [], [], [], [], [], [], []
    for _ in range(rounds):
        with host.daemon() as (pid, took):
            ready.append(took)
            used.append(cpu_s(pid))
            memory.append(resident(pid))
            with Client(host.varlink) as client:
                assert client.call(f"{MANAGER}Status")["groups"] == groups
        with host.daemon(dbus=False) as (pid, _):
            without_dbus.append(resident(pid))
        began = time.perf_counter()
        with python(*IDLE) as pid:
            imports.append(time.perf_counter() - began)
            importing.append(cpu_s(pid))
            idle.append(resident(pid))
    what, bare_is = f"daemon's start to READY, {groups} groups", "python -c 'import asyncio'"
    yield Row(what, ready, bare_is, imports, SECONDS, goal=ready_s, goal_is_ours=True)
    yield Row(f"daemon's CPU time to READY, {groups} groups", used, bare_is, importing, SECONDS)
    what, bare_is = f"daemon's memory (RSS), {groups} groups", "python with asyncio that waits"
    yield Row(what, memory, bare_is, idle, MEBIBYTES)
    goal = memory_mib * 2.0**20
    yield Row(f"{what}, no D-Bus", without_dbus, bare_is, idle, MEBIBYTES, goal=goal, goal_is_ours=True)


# -- a daemon that runs


def hook(host: Host, client: Client, pid: int, rounds: int) -> Iterator[Row]:
    """The OCI hook as a runtime runs it, with a new container each time."""
    state = host.folder / "state.json"
    number = itertools.count()

    def new_container() -> None:
        # A round also runs commands that create no container.
        for workload in client.call(f"{MANAGER}List")["workloads"]:
            if workload["state"] == "active":
                client.call(f"{MANAGER}Release", {"key": workload["key"], "claim": "oci"})
        container = {"ociVersion": "1.2.0", "id": f"container{next(number)}", "status": "created", "pid": pid}
        state.write_text(json.dumps(container), encoding="ascii")

    program = [str(compile_hook()), "createRuntime", "--strict", "--socket", host.varlink]
    ours, true = interleaved(
        rounds, lambda: spawn(program, str(state)), lambda: spawn(["/bin/true"]), before=new_container
    )
    new_container()
    yield Row("OCI hook, spawn to exit", ours, "/bin/true", true, SECONDS)


def costs(host: Host, client: Client, daemon: int, pid: int, count: int) -> Iterator[Row]:
    """Measure the CPU time and the system calls that a createRuntime costs the daemon, one call after another."""
    container = json.dumps({"ociVersion": "1.2.0", "id": "costs", "status": "created", "pid": pid})

    def create() -> None:
        client.call("org.resctrlmon.Hook.Run", {"stage": "createRuntime", "state": container})

    def release() -> None:
        client.call(f"{MANAGER}Release", {"key": "costs", "claim": "oci"})

    create()
    release()
    used, by_hand = 0.0, 0.0
    for _ in range(count):
        before = cpu_s(daemon)
        create()
        used += cpu_s(daemon) - before
        release()
        before = time.process_time()
        life_by_hand(str(host.tree), pid)
        by_hand += time.process_time() - before
    bare_is = "Create, Assign, Release by hand"
    yield Row("daemon's CPU time for createRuntime", [used / count], bare_is, [by_hand / count], SECONDS, fuse=True)
    calls = []
    for _ in range(count):
        calls.append(calls_of(daemon, create))
        release()
    # mkdir, utime, twice open and close with 10 counters, and open, write, close of tasks, rmdir
    bare = [float(2 * (2 + 3 * len(COUNTERS)) + 6)] * count
    yield Row("daemon's system calls for createRuntime", calls, bare_is, bare, COUNT, goal=150, goal_is_ours=True)


class Spent(NamedTuple):
    """The CPU time of a process in a minute, and how often its threads waited in a second."""

    cpu_s: float
    wake_ups: float


def _wake_ups(pid: int) -> int:
    """Return how often the threads of a process have waited (voluntary switches, proc_pid_status(5))."""
    found = 0
    for status in Path(f"/proc/{pid}/task").glob("*/status"):
        with contextlib.suppress(OSError):  # the thread has ended
            lines = status.read_text(encoding="ascii", errors="replace").splitlines()
            found += next(int(line.split()[1]) for line in lines if line.startswith("voluntary_ctxt_switches"))
    return found


def spent_in(pid: int, work: Callable[[], object]) -> Spent:
    """Return what a process spends while the work is done."""
    before, switches, began = cpu_s(pid), _wake_ups(pid), time.monotonic()
    work()
    passed = time.monotonic() - began
    return Spent((cpu_s(pid) - before) * 60 / passed, (_wake_ups(pid) - switches) / passed)


def spent_asleep(pid: int, for_s: float) -> Spent:
    """Return what a process spends while nothing is asked of it."""
    return spent_in(pid, lambda: time.sleep(for_s))


def idle(daemon: int, groups: int, for_s: float) -> Iterator[Row]:
    """The daemon's CPU time in a minute in which nothing is asked of it, and its wake-ups."""
    spent = spent_asleep(daemon, for_s)
    what = f"daemon's CPU time in an idle minute, {groups} groups"
    yield Row(what, [spent.cpu_s], "a minute", [60.0], SECONDS, goal=0.5, goal_is_ours=True)
    what = f"daemon's wake-ups a second in that minute, {groups} groups"
    yield Row(what, [spent.wake_ups], "a timer each second", [1.0], COUNT)


def cycles(client: Client, daemon: int, pid: int, count: int) -> Iterator[Row]:
    """The daemon's memory after many short workloads."""

    def live(number: int) -> None:
        for verb, more in (("Create", {}), ("Assign", {"pid": pid}), ("Release", {})):
            client.call(MANAGER + verb, {"key": f"cycle{number % 100}", **CLAIM, **more})

    warm = min(count, 100)
    for number in range(warm):
        live(number)
    before = resident(daemon)
    for number in range(count):
        live(number)
    what = f"daemon's memory (RSS) after {count} more workloads"
    yield Row(what, [resident(daemon)], f"before them, after the first {warm}", [before], MEBIBYTES, fuse=True)


def bursts(host: Host, client: Client, rounds: int, count: int = 500) -> Iterator[Row]:
    """The hooks of many containers that start at once. A hook is lost if it gave up, or was refused."""
    program = [str(compile_hook()), "createRuntime", "--strict", "--socket", host.varlink]
    lost, ours, bare = [], [], []
    with containers(count) as inits:
        states = {id_: host.folder / f"{id_}.json" for id_ in inits}
        for id_, init in inits.items():
            states[id_].write_bytes(state_of(id_, init.pid))
        for _ in range(rounds):
            started = time.perf_counter()
            lost.append(float(spawn_at_once((program, str(state)) for state in states.values())))
            ours.append(time.perf_counter() - started)
            started = time.perf_counter()
            spawn_at_once((["/bin/true"], os.devnull) for _ in states)
            bare.append(time.perf_counter() - started)
            for group in client.call(f"{MANAGER}List")["workloads"]:
                if group["state"] == "active":
                    client.call(f"{MANAGER}Release", {"key": group["key"], "claim": "oci"})
    yield Row(f"{count} OCI hooks at once, lost", lost, "all of them", [float(count)] * rounds, COUNT)
    yield Row(
        f"{count} OCI hooks at once, to the last exit", ours, f"{count} times /bin/true", bare, SECONDS, fuse=True
    )


def lives(host: Host, client: Client, pid: int, rounds: int) -> Iterator[Row]:
    """Measure the whole life of a group over each interface, on an open connection."""
    options = {"claim": Variant("s", "bench")}

    def by_varlink() -> None:
        for verb, more in (("Create", {}), ("Assign", {"pid": pid}), ("Release", {})):
            client.call(MANAGER + verb, {"key": "varlink", **CLAIM, **more})

    async def by_dbus() -> None:
        for verb, more in (("Create", {}), ("Assign", {"pid": Variant("x", pid)}), ("Release", {})):
            await bus.call(verb, "sa{sv}", "dbus", {**options, **more})

    def by_hand() -> None:
        life_by_hand(str(host.tree), pid)

    with asyncio.Runner() as runner:
        bus = private_bus.Client(host.bus.address)
        runner.run(bus.__aenter__())
        varlink, dbus, bare = interleaved(rounds, by_varlink, lambda: runner.run(by_dbus()), by_hand)
        runner.run(bus.__aexit__())
    bare_is = "their system calls on resctrl, by hand"
    yield Row("Create, Assign, Release by varlink", varlink, bare_is, bare, SECONDS, fuse=True)
    yield Row("Create, Assign, Release by D-Bus", dbus, bare_is, bare, SECONDS, fuse=True)


def beside_goresctrl(host: Host, client: Client, pid: int, rounds: int) -> Iterator[Row]:
    """Measure each verb beside goresctrl's, which keeps nothing and reads the L3's counters only, in its process.

    There is no row without Go and Debian's source of goresctrl.
    """
    go = shutil.which("go")
    if go is None or not (GO_SOURCES / "src/github.com/intel/goresctrl/pkg/rdt").is_dir():
        needed = "golang-go and golang-github-intel-goresctrl-dev"
        print(f"no rows beside goresctrl: {needed} are not installed", file=sys.stderr)
        return
    # goresctrl looks for a mount of the type resctrl, which only the kernel's has.
    (host.folder / "mounts").write_text(f"resctrl {host.tree} resctrl rw 0 0\n", encoding="ascii")
    program = ROOT / "build" / "goresctrl"
    flags = f"-X github.com/intel/goresctrl/pkg/rdt.mountInfoPath={host.folder}/mounts"
    subprocess.run(
        [go, "build", "-ldflags", flags, "-o", str(program), str(ROOT / "tests" / "bench" / "goresctrl.go")],
        check=True,
        env=os.environ | {"GO111MODULE": "off", "GOPATH": str(GO_SOURCES), "GOCACHE": str(ROOT / "build" / "go")},
    )
    verbs = {"Create": {}, "Assign": {"pid": pid}, "Release": {}}
    ours: dict[str, list[float]] = {verb: [] for verb in verbs}
    theirs: dict[str, list[float]] = {verb: [] for verb in verbs}
    with subprocess.Popen([program], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as peer:
        assert peer.stdin and peer.stdout
        for number in range(rounds + 1):
            for verb, more in verbs.items():
                started = time.perf_counter()
                client.call(MANAGER + verb, {"key": "goresctrl", **CLAIM, **more})
                ours[verb].append(time.perf_counter() - started)
            print(f"goresctrl{number} {pid}", file=peer.stdin, flush=True)
            for verb, microseconds in zip(verbs, peer.stdout.readline().split(), strict=True):
                theirs[verb].append(int(microseconds) / 1e6)
        peer.stdin.close()
    names = {"Create": "CreateMonGroup, GetMonData", "Assign": "AddPids", "Release": "GetMonData, DeleteMonGroup"}
    for verb, calls in names.items():
        samples = ours[verb][1:], theirs[verb][1:]
        yield Row(f"{verb} by varlink", samples[0], f"goresctrl's {calls}", samples[1], SECONDS, True, 1)


def mounts(host: Host, client: Client, daemon: int, pid: int, rounds: int) -> Iterator[Row]:
    """The daemon's part of a container's start and end, with many mounts in its mount namespace."""
    container = json.dumps({"ociVersion": "1.2.0", "id": "mounts", "status": "created", "pid": pid})

    def life() -> None:
        client.call("org.resctrlmon.Hook.Run", {"stage": "createRuntime", "state": container})
        client.call(f"{MANAGER}Release", {"key": "mounts", "claim": "oci"})

    (without,) = interleaved(rounds, life)
    mounted = 0
    for number in (1500, 5000):
        host.mount(daemon, mounted, number)
        mounted = number
        (ours,) = interleaved(rounds, life)
        yield Row(f"Hook.Run, Release with {number} mounts", ours, "without them", without, SECONDS, True, 1.1)


def commands(host: Host, rounds: int) -> Iterator[Row]:
    """Verbs of resctrlctl as processes: the least time of all rounds."""
    main = [sys.executable, "-c", f"{AS_INSTALLED}; from resctrlctl.__main__ import main; raise SystemExit(main())"]
    socket = ["--socket", host.varlink]
    bare, version, listed, ran = interleaved(
        rounds,
        lambda: spawn([sys.executable, "-c", "pass"]),
        lambda: spawn([*main, "--version"]),
        lambda: spawn([*main, *socket, "list"]),
        lambda: spawn([*main, *socket, "run", "-q", "--", "true"]),
    )
    for what, taken, goal in (("--version", version, 2), ("list", listed, 3), ("run -- true", ran, 4.5)):
        yield Row(f"resctrlctl {what}", [min(taken)], "python3 -c pass", [min(bare)], SECONDS, goal=goal)


def fill(client: Client, groups: int) -> None:
    """Create groups and leave them standing."""
    for number in range(groups):
        client.call(f"{MANAGER}Create", {"key": f"group{number}", **CLAIM})


def listing(host: Host, client: Client, rounds: int) -> Iterator[Row]:
    """List with many groups, by the group."""
    records = host.folder / "run" / "records"

    def by_hand() -> None:
        scan_by_hand(str(host.tree))
        for record in os.listdir(records):
            (records / record).read_bytes()

    ours, bare = interleaved(rounds, lambda: client.call(f"{MANAGER}List"), by_hand)
    groups = client.call(f"{MANAGER}List")["workloads"]
    each = [[taken / len(groups) for taken in samples] for samples in (ours, bare)]
    bare_is = "tree listed, records read as bytes"
    yield Row(f"List with {len(groups)} groups, time for each", each[0], bare_is, each[1], SECONDS, fuse=True)
    reply = [float(len(msgspec.json.encode(group))) for group in groups]
    stored = [float((records / f"{group['key']}.json").stat().st_size) for group in groups]
    yield Row("a group in List's reply", reply, "its record on disk", stored, BYTES)


def reading_all(host: Host, client: Client, daemon: int, pid: int, rounds: int) -> Iterator[Row]:
    """The use of all groups in one call, and the delay of an Assign while another client asks for it all the time."""
    groups = [path for path in (host.tree / "mon_groups").iterdir() if path.is_dir()]
    used: list[float] = []

    def read_all() -> None:
        before = cpu_s(daemon)
        found = sum(len(page["usages"]) for page in client.stream(f"{MANAGER}ReadAll"))
        used.append(cpu_s(daemon) - before)
        assert found == len(groups)

    def by_hand() -> None:
        for group in groups:
            read_by_hand(str(group))

    # A pause, so that each call reads the counters again.
    ours, bare = interleaved(rounds, read_all, by_hand, before=lambda: time.sleep(PAUSE_S))
    what = f"ReadAll of {len(groups)} groups"
    yield Row(what, ours, "all counters by hand", bare, SECONDS, fuse=True)
    yield Row(f"daemon's CPU time for {what}", used[1:], "all counters by hand", bare, SECONDS, fuse=True)

    pools: list[float] = []

    def machine() -> None:
        before = cpu_s(daemon)
        assert client.call(f"{MANAGER}Machine")["pools"]
        pools.append(cpu_s(daemon) - before)

    (ours,) = interleaved(rounds, machine, before=lambda: time.sleep(PAUSE_S))
    yield Row(f"Machine with {len(groups)} groups", ours, "all counters by hand", bare, SECONDS, fuse=True)
    yield Row(f"daemon's CPU time for Machine with {len(groups)}", pools[1:], "by hand", bare, SECONDS, fuse=True)

    def life() -> None:
        for verb, more in (("Create", {}), ("Assign", {"pid": pid}), ("Release", {})):
            client.call(MANAGER + verb, {"key": "beside", **CLAIM, **more})

    (alone,) = interleaved(rounds, life, times=5)
    is_over = threading.Event()

    def keep_reading() -> None:
        with Client(host.varlink) as reader:
            while not is_over.is_set():
                for _ in reader.stream(f"{MANAGER}ReadAll"):
                    pass

    with ThreadPoolExecutor(1) as thread:
        reading = thread.submit(keep_reading)
        (beside,) = interleaved(rounds, life, times=5)
        is_over.set()
        reading.result()
    yield Row(f"Create, Assign, Release beside {what}", beside, "alone", alone, SECONDS, fuse=True)


# -- the ground floor


def ground(host: Host, rounds: int) -> Iterator[Row]:
    """Reading and moving without a daemon, in the groups that stand, and reading from a copy in plain files."""
    tree = Tree.open(str(host.tree), allow_simulation=True)
    group = tree.scan()[0].ref
    copy = host.folder / "copy"
    shutil.copytree(host.tree, copy)
    for place, kind in ((tree, "FUSE"), (Tree(str(copy), None), "plain files")):
        yield from _reads(place, kind, rounds)
    yield from _moves(tree, group, rounds)
    pid = os.getpid()
    ours, bare = interleaved(
        rounds, lambda: Process.open(pid).close(), lambda: os.close(os.pidfd_open(pid)), times=500
    )
    yield Row("Process.open(), close()", ours, "os.pidfd_open, os.close", bare, SECONDS)


def _reads(tree: Tree, kind: str, rounds: int) -> Iterator[Row]:
    fuse = tree.simulation is not None
    groups = [found.ref for found in tree.scan()]
    directories = [tree.full_path(ref) for ref in groups]

    def ours() -> None:
        for ref in groups:
            tree.read(ref)

    def by_hand() -> None:
        for directory in directories:
            read_by_hand(directory)

    # The goal is for resctrl, where a read takes longer than the Python around it, as it does not in plain files.
    what = f"all 10 counters of {len(groups)} groups, {kind}"
    taken, bare = interleaved(rounds, ours, by_hand)
    yield Row(what, taken, "os.open, os.read by dir_fd", bare, SECONDS, fuse, 1.5 if fuse else None)
    taken, bare = interleaved(rounds, tree.scan, lambda: scan_by_hand(tree.path))
    yield Row(f"Tree.scan() of {len(groups)} groups, {kind}", taken, "os.scandir, stat", bare, SECONDS, fuse)


def _moves(tree: Tree, ref: GroupRef, rounds: int) -> Iterator[Row]:
    with threaded(50) as pid, Process.open(pid) as process:
        threads = process.threads()

        def by_hand(directory: str) -> None:
            fd = os.open(f"{directory}/tasks", os.O_WRONLY)
            for tid in threads:
                os.write(fd, b"%d\n" % tid)
            os.close(fd)

        ours, bare = interleaved(
            rounds,
            lambda: move(tree, ProcessTasks(process), ref),
            lambda: by_hand(tree.full_path(ref)),
            before=lambda: by_hand(tree.path),
        )
        assert sorted(tree.tasks(ref)) == sorted(threads)
    yield Row(f"move of a process with {len(threads)} threads", ours, "as many writes to tasks", bare, SECONDS, True)
