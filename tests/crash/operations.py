# SPDX-License-Identifier: Apache-2.0
"""The operations at which the daemon is interrupted: its verbs over the varlink socket, and its own work."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass

from resctrlmond.workloads.records.atomic_files import read_file
from resctrlmond.workloads.records.record_format import decode
from tests.crash.site import Site

_WAIT_S = 8.0


@dataclass(frozen=True)
class Operation:
    """An operation of the daemon: ``before`` prepares it and returns the function to run, which returns its outcome.

    ``settings`` are lines of the daemon's configuration. With ``is_loss``, another program removes a group, so that
    its run is lost; without it, no run may be lost. With ``prunes``, the daemon deletes the records of ended runs.
    """

    before: Callable[[Site], Callable[[], str]]
    settings: str = ""
    is_loss: bool = False
    prunes: bool = False


def _until(site: Site, holds: Callable[[], bool]) -> str:
    """Wait until the daemon has done its own work, or has died. Does not call the daemon, which would add faults."""
    deadline = time.monotonic() + _WAIT_S
    while not site.is_dead() and time.monotonic() < deadline:
        if holds():
            return "done"
        time.sleep(0.02)
    return "cut"


def _state(site: Site, key: str) -> str:
    """Return the state in the workload's record; "" if there is no record."""
    try:
        return str(decode(read_file(str(path := site.top / "run" / "records" / f"{key}.json")), str(path)).state)
    except FileNotFoundError:
        return ""


def _create(site: Site) -> Callable[[], str]:
    key = uuid.uuid4().hex
    return lambda: site.attempt("Create", key=key, claim="other")


def _assign(site: Site) -> Callable[[], str]:
    child, key = site.process(), uuid.uuid4().hex * 2

    def act() -> str:
        return site.attempt(
            "Assign", key=key, pid=child.pid, claim="engine", endRule="container", member="c1", late=False
        )

    return act


def _hook(site: Site) -> Callable[[], str]:
    child, container = site.process(), uuid.uuid4().hex * 2
    state = {"ociVersion": "1.2.0", "id": container, "status": "creating", "pid": child.pid, "bundle": "/b"}
    return lambda: site.attempt("org.resctrlmon.Hook.Run", stage="createRuntime", state=json.dumps(state))


def _in_group_of_runtime(site: Site) -> tuple[str, subprocess.Popen[bytes]]:
    """Start a container that its runtime puts into a group of its own."""
    child, container = site.process(), uuid.uuid4().hex * 2
    site.outside.tree.write_task(site.outside.make_foreign(container).path, child.pid)
    return container, child


def _assign_observed(site: Site) -> Callable[[], str]:
    """Assign a container with a group of its runtime, as a part of a pod with another container."""
    pod = str(uuid.uuid4())
    site.assigned(site.process(), key=pod, member="c1")
    container, child = _in_group_of_runtime(site)
    return lambda: site.attempt(
        "Assign", key=pod, pid=child.pid, claim="engine", member=container, kind="container", late=False
    )


def _end_observed(site: Site) -> Callable[[], str]:
    container, child = _in_group_of_runtime(site)
    site.assigned(child, key=container, member=container, kind="container")
    site.use(container, child)

    def act() -> str:
        site.end(child)
        return _until(site, lambda: _state(site, container) == "completed")

    return act


def _used(site: Site, class_: str = "") -> tuple[str, int]:
    child = site.process(class_)
    key = site.assigned(child, member="c1")
    site.use(key, child)
    return key, child.pid


def _assign_again(site: Site) -> Callable[[], str]:
    key = site.assigned(site.process(), member="c1")
    site.call("Release", key=key, claim="engine")
    child = site.process()
    return lambda: site.attempt(
        "Assign", key=key, pid=child.pid, claim="engine", endRule="container", member="c1", late=False
    )


def _assign_another_class(site: Site) -> Callable[[], str]:
    key, _ = _used(site)
    other = site.process("gold")
    return lambda: site.attempt(
        "Assign", key=key, pid=other.pid, claim="engine", endRule="container", member="c2", late=False
    )


def _release(site: Site) -> Callable[[], str]:
    key, _ = _used(site)
    return lambda: site.attempt("Release", key=key, claim="engine")


def _move(site: Site) -> Callable[[], str]:
    key, _ = _used(site)
    return lambda: site.attempt("Move", key=key, class_="gold")


def _expose(site: Site) -> Callable[[], str]:
    key, _ = _used(site)
    return lambda: site.attempt("Expose", key=key, member="c1", cgroup="/c1")


def _reconcile(site: Site) -> Callable[[], str]:
    _used(site)
    _used(site)
    return lambda: site.attempt("Reconcile", claim="engine", keys=[])


def _end_process(site: Site) -> Callable[[], str]:
    child = site.process()
    key = site.assigned(child, member="c1")
    site.use(key, child)

    def act() -> str:
        site.end(child)
        return _until(site, lambda: _state(site, key) == "completed")

    return act


def _read(site: Site) -> Callable[[], str]:
    key, _ = _used(site)
    return lambda: site.attempt("Read", key=key)


def _status(site: Site) -> Callable[[], str]:
    _used(site)
    return lambda: site.attempt("Status")


def _list(site: Site) -> Callable[[], str]:
    _used(site)
    return lambda: site.attempt("List")


def _checkpoint(site: Site) -> Callable[[], str]:
    key, _ = _used(site)
    path = site.top / "run" / "groups" / key / "checkpoint"

    def act() -> str:
        before = os.stat(path).st_mtime_ns if path.exists() else 0
        return _until(site, lambda: path.exists() and os.stat(path).st_mtime_ns != before)

    return act


def _prune(site: Site) -> Callable[[], str]:
    key = site.assigned(site.process(), member="c1")

    def act() -> str:
        outcome = site.attempt("Release", key=key, claim="engine")
        return _until(site, lambda: not _state(site, key)) if outcome == "done" else outcome

    return act


def _remove_group(site: Site) -> Callable[[], str]:
    key, _ = _used(site)
    path = site.machine.group(key)["path"]

    def act() -> str:
        os.rmdir(path)
        return _until(site, lambda: _state(site, key) == "lost")

    return act


def _reload(site: Site) -> Callable[[], str]:
    _used(site)

    def act() -> str:
        os.kill(site.pid, signal.SIGHUP)
        deadline = time.monotonic() + _WAIT_S
        while not site.is_dead() and time.monotonic() < deadline:
            if site.machine.wait_for_notify("READY=1", 0.2):
                return "done"
        return "cut"

    return act


def _stop(site: Site) -> Callable[[], str]:
    _used(site)

    def act() -> str:
        os.kill(site.pid, signal.SIGTERM)
        return "done" if _until(site, site.is_dead) == "cut" and site.is_dead() else "cut"

    return act


OPERATIONS: dict[str, Operation] = {
    "Create": Operation(_create),
    "Assign": Operation(_assign),
    "Assign (again)": Operation(_assign_again),
    "Assign (another class)": Operation(_assign_another_class),
    "Assign (observed)": Operation(_assign_observed),
    "Hook.Run": Operation(_hook),
    "Release": Operation(_release),
    "Expose": Operation(_expose),
    "Reconcile": Operation(_reconcile),
    "Move": Operation(_move),
    "Read": Operation(_read),
    "List": Operation(_list),
    "Status": Operation(_status),
    "end of a process": Operation(_end_process),
    "end of an observed container": Operation(_end_observed),
    "checkpoint": Operation(_checkpoint, "checkpoint_interval: 1s\n"),
    "prune": Operation(_prune, "snapshot_ttl: 0\n", prunes=True),
    "loss": Operation(_remove_group, is_loss=True),
    "reload": Operation(_reload),
    "stop": Operation(_stop),
}
