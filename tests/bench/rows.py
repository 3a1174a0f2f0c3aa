# SPDX-License-Identifier: Apache-2.0
"""The rows of the benchmark: the interfaces of a running daemon, and the lowest layer without a daemon."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Iterator

import msgspec
from dbus_fast import Variant

from resctrlmond.api.varlink.client import Client
from resctrlmond.resctrl.processes import Process
from resctrlmond.resctrl.tasks import ProcessTasks, move
from resctrlmond.resctrl.tree import GroupRef, Tree
from tests.api import private_bus
from tests.bench.host import IDLE, Host, python, resident, spawn, spawn_at_once, threaded
from tests.bench.measure import Row, interleaved, mebibytes, seconds
from tests.daemon.containers import containers, state_of
from tests.hook.forms import command_of, file_of

SYSTEM_PYTHON = "/usr/bin/python3"
MANAGER = "org.resctrlmon.Manager."
MBM = ("mbm_total_bytes", "mbm_local_bytes")
COUNTERS = [
    *(f"mon_data/mon_L3_0{n}/{event}" for n in "01" for event in ("llc_occupancy", *MBM)),
    *(f"mon_data/mon_PERF_PKG_0{n}/{event}" for n in "01" for event in ("core_energy", "activity")),
]
GROUPS = 200
CLAIM = {"claim": "bench"}


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


def starts(host: Host, rounds: int, groups: int) -> Iterator[Row]:
    """Start-up and memory of the daemon on the tree and records as they stand."""
    ready, memory, imports, idle = [], [], [], []
    for _ in range(rounds):
        with host.daemon() as (pid, took):
            ready.append(took)
            memory.append(resident(pid))
            with Client(host.varlink) as client:
                assert client.call(f"{MANAGER}Status")["groups"] == groups
        started = time.perf_counter()
        with python(*IDLE) as pid:
            imports.append(time.perf_counter() - started)
            idle.append(resident(pid))
    yield Row(f"daemon's start to READY, {groups} groups", ready, "python -c 'import asyncio'", imports, seconds)
    yield Row(f"daemon's memory (RSS), {groups} groups", memory, "python with asyncio that waits", idle, mebibytes)


# -- a daemon that runs


def hook(host: Host, client: Client, pid: int) -> Iterator[Row]:
    """The OCI hook as a runtime runs it, with a new container each time."""
    state = host.folder / "state.json"
    number = itertools.count()

    def new_container() -> None:
        # A round also runs commands that create no container.
        for group in client.call(f"{MANAGER}List")["groups"]:
            if group["state"] == "active":
                client.call(f"{MANAGER}Release", {"key": group["key"], "claim": "oci"})
        container = {"ociVersion": "1.2.0", "id": f"container{next(number)}", "status": "created", "pid": pid}
        state.write_text(json.dumps(container), encoding="ascii")

    options = ["createRuntime", "--strict", "--socket", host.varlink]
    compiled, python_file = ([*command_of(form, file_of(form)), *options] for form in ("compiled", "python"))
    ours, python_form, nothing, true = interleaved(
        30,
        lambda: spawn(compiled, str(state)),
        lambda: spawn(python_file, str(state)),
        lambda: spawn([SYSTEM_PYTHON, "-IS", "-c", "pass"]),
        lambda: spawn(["/bin/true"]),
        before=new_container,
    )
    new_container()
    yield Row("OCI hook, spawn to exit", ours, "its Python form", python_form, seconds)
    yield Row("OCI hook, spawn to exit", ours, "/bin/true", true, seconds)
    yield Row("OCI hook in Python, spawn to exit", python_form, "python3 -IS -c pass", nothing, seconds)


def bursts(host: Host, client: Client, rounds: int, count: int = 500) -> Iterator[Row]:
    """The hooks of many containers that start at once, compiled. A hook is lost if it gave up, or was refused."""
    program = [*command_of("compiled", file_of("compiled")), "createRuntime", "--strict", "--socket", host.varlink]
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
            for group in client.call(f"{MANAGER}List")["groups"]:
                if group["state"] == "active":
                    client.call(f"{MANAGER}Release", {"key": group["key"], "claim": "oci"})
    yield Row(f"{count} OCI hooks at once, lost", lost, "all of them", [float(count)] * rounds, "{:.0f}".format)
    yield Row(
        f"{count} OCI hooks at once, to the last exit", ours, f"{count} times /bin/true", bare, seconds, fuse=True
    )


def lives(host: Host, client: Client, pid: int) -> Iterator[Row]:
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
        varlink, dbus, bare = interleaved(30, by_varlink, lambda: runner.run(by_dbus()), by_hand)
        runner.run(bus.__aexit__())
    bare_is = "their system calls on resctrl, by hand"
    yield Row("Create, Assign, Release by varlink", varlink, bare_is, bare, seconds, fuse=True)
    yield Row("Create, Assign, Release by D-Bus", dbus, bare_is, bare, seconds, fuse=True)


def mounts(host: Host, client: Client, daemon: int, pid: int) -> Iterator[Row]:
    """The daemon's part of a container's start and end, with many mounts in its mount namespace."""
    container = json.dumps({"ociVersion": "1.2.0", "id": "mounts", "status": "created", "pid": pid})

    def life() -> None:
        client.call("org.resctrlmon.Hook.Run", {"stage": "createRuntime", "state": container})
        client.call(f"{MANAGER}Release", {"key": "mounts", "claim": "oci"})

    (without,) = interleaved(30, life)
    mounted = 0
    for number in (1500, 5000):
        host.mount(daemon, mounted, number)
        mounted = number
        (ours,) = interleaved(30, life)
        yield Row(f"Hook.Run, Release with {number} mounts", ours, "without them", without, seconds, fuse=True)


def commands(host: Host, rounds: int) -> Iterator[Row]:
    """Verbs of resctrlctl as processes: the least time of all rounds."""
    main = [sys.executable, "-c", "from resctrlctl.__main__ import main; raise SystemExit(main())"]
    socket = ["--socket", host.varlink]
    bare, version, listed, ran = interleaved(
        rounds,
        lambda: spawn([sys.executable, "-c", "pass"]),
        lambda: spawn([*main, "--version"]),
        lambda: spawn([*main, *socket, "list"]),
        lambda: spawn([*main, *socket, "run", "-q", "--", "true"]),
    )
    for what, taken in (("--version", version), ("list", listed), ("run -- true", ran)):
        yield Row(f"resctrlctl {what}", [min(taken)], "python3 -c pass", [min(bare)], seconds)


def listing(host: Host, client: Client) -> Iterator[Row]:
    """List with many groups, by the group; they are left standing."""
    for number in range(GROUPS):
        client.call(f"{MANAGER}Create", {"key": f"group{number}", **CLAIM})
    records = host.folder / "run" / "records"

    def by_hand() -> None:
        scan_by_hand(str(host.tree))
        for record in os.listdir(records):
            (records / record).read_bytes()

    ours, bare = interleaved(10, lambda: client.call(f"{MANAGER}List"), by_hand)
    groups = client.call(f"{MANAGER}List")["groups"]
    assert sum(group["state"] == "idle" for group in groups) == GROUPS
    each = [[taken / len(groups) for taken in samples] for samples in (ours, bare)]
    bare_is = "tree listed, records read as bytes"
    yield Row(f"List with {GROUPS} groups, time for each", each[0], bare_is, each[1], seconds, fuse=True)
    reply = [float(len(msgspec.json.encode(group))) for group in groups]
    stored = [float((records / f"{group['key']}.json").stat().st_size) for group in groups]
    yield Row("a group in List's reply", reply, "its record on disk", stored, "{:.0f} B".format)


# -- the ground floor


def ground(host: Host) -> Iterator[Row]:
    """Reading and moving without a daemon, in the groups that stand, and reading from a copy in plain files."""
    tree = Tree.open(str(host.tree), allow_simulation=True)
    group = tree.scan()[0].ref
    copy = host.folder / "copy"
    shutil.copytree(host.tree, copy)
    for place, kind in ((tree, "simulator"), (Tree(str(copy), None), "plain files")):
        yield from _reads(place, group, kind)
    yield from _moves(tree, group)
    pid = os.getpid()
    ours, bare = interleaved(20, lambda: Process.open(pid).close(), lambda: os.close(os.pidfd_open(pid)), times=500)
    yield Row("Process.open(), close()", ours, "os.pidfd_open, os.close", bare, seconds)


def _reads(tree: Tree, ref: GroupRef, kind: str) -> Iterator[Row]:
    fuse = tree.simulation is not None
    directory = tree.full_path(ref)
    ours, bare = interleaved(30, lambda: tree.read(ref), lambda: read_by_hand(directory), times=10)
    yield Row(f"Tree.read() of 10 counters, {kind}", ours, "os.open, os.read by dir_fd", bare, seconds, fuse)
    assert len(tree.scan()) == GROUPS
    ours, bare = interleaved(10, tree.scan, lambda: scan_by_hand(tree.path))
    yield Row(f"Tree.scan() of {GROUPS} groups, {kind}", ours, "os.scandir, stat", bare, seconds, fuse)


def _moves(tree: Tree, ref: GroupRef) -> Iterator[Row]:
    with threaded(50) as pid, Process.open(pid) as process:
        threads = process.threads()

        def by_hand(directory: str) -> None:
            fd = os.open(f"{directory}/tasks", os.O_WRONLY)
            for tid in threads:
                os.write(fd, b"%d\n" % tid)
            os.close(fd)

        ours, bare = interleaved(
            20,
            lambda: move(tree, ProcessTasks(process), ref),
            lambda: by_hand(tree.full_path(ref)),
            before=lambda: by_hand(tree.path),
        )
        assert sorted(tree.tasks(ref)) == sorted(threads)
    yield Row(f"move of a process with {len(threads)} threads", ours, "as many writes to tasks", bare, seconds, True)
