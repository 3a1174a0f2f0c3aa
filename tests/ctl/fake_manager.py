# SPDX-License-Identifier: Apache-2.0
"""An in-memory implementation of org.resctrlmon.Manager behind the real varlink server.

It is not the daemon: its workloads are in a dict, it needs no resctrl, and its readings and totals are constants.
"""

from __future__ import annotations

import asyncio
import importlib.resources
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from resctrlmond.api import types
from resctrlmond.api.access import Caller
from resctrlmond.api.pods import pods_of
from resctrlmond.api.sockets import listen
from resctrlmond.api.types import Claim, Member
from resctrlmond.api.varlink.server import Interface, Method, Server, VarlinkError
from resctrlmond.resctrl.counters import Kind, Status
from resctrlmond.resctrl.processes import pidfd_numbers
from resctrlmond.workloads.model.pods import Report, ReportedSandbox
from resctrlmond.workloads.model.states import FOLLOW, ProofKind, Quality
from resctrlmond.workloads.model.workload import EndRule, State
from tests.ctl.samples import since_boot

INTERFACE = "org.resctrlmon.Manager"
NOW = "2026-11-21T11:13:22.500000Z"
LATER = "2026-11-21T11:20:00Z"

READINGS = [
    types.Reading(
        domain="mon_L3_00",
        event="llc_occupancy",
        kind=Kind.GAUGE,
        unit="bytes",
        status=Status.OK,
        value="1572864",
        text="1572864",
        nested=False,
    ),
    types.Reading(
        domain="mon_L3_00",
        event="mbm_total_bytes",
        kind=Kind.CUMULATIVE,
        unit="bytes",
        status=Status.UNAVAILABLE,
        text="Unavailable",
        nested=False,
    ),
    types.Reading(
        domain="mon_PERF_PKG_00",
        event="core_energy",
        kind=Kind.CUMULATIVE,
        unit="joules",
        status=Status.OK,
        value="54446119.644974",
        text="54446119.644974",
        nested=False,
    ),
]
TOTALS = [
    types.Total(event="core_energy", unit="joules", value="12.345678", quality=Quality.EXACT),
    types.Total(
        event="mbm_total_bytes",
        unit="bytes",
        quality=Quality.UNKNOWN,
        reason="mon_L3_00 read 'Unavailable' at the end",
    ),
]

PROOFS = [
    types.Proof(kind=ProofKind.ENTERED, shown=True, text="the first task of c1 was in the group before it ran"),
    types.Proof(kind=ProofKind.CLOSED, shown=False, text="c1 has no control group of its own"),
]

ONLY_CACHE = [types.Capacity(resource="L3_MON", rmids=64, events=("llc_occupancy",))]
ALL_EVENTS = [
    types.Capacity(resource="L3_MON", rmids=64, events=("llc_occupancy", "mbm_total_bytes")),
    types.Capacity(resource="PERF_PKG_MON", rmids=64, events=("core_energy",)),
]


def _set_event() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


@dataclass
class FakeManager:
    """The state of the manager, which tests read and change.

    ``calls`` are the names of the methods that were called, with their parameters. ``refuse`` has the error of each
    method that fails. ``tasks_outside`` and ``descendants_outside`` are fields of the replies to Assign.
    """

    socket: str
    tree: Path
    workloads: dict[str, types.Workload] = field(default_factory=dict)
    foreign: list[types.Foreign] = field(default_factory=list)
    sandboxes: list[ReportedSandbox] = field(default_factory=list)
    unwatched: list[types.Unwatched] = field(default_factory=list)
    capacity: list[types.Capacity] = field(default_factory=lambda: ONLY_CACHE)
    calls: list[tuple[str, Any]] = field(default_factory=list)
    refuse: dict[str, VarlinkError] = field(default_factory=dict)
    # The error of each method that fails from its second call on.
    refuse_later: dict[str, VarlinkError] = field(default_factory=dict)
    # The methods that never reply.
    hangs: set[str] = field(default_factory=set)
    # The next replies of methods, in their order; then those of ``replies``.
    next_replies: dict[str, list[msgspec.Struct]] = field(default_factory=dict)
    # The replies of methods that do not depend on the state.
    replies: dict[str, msgspec.Struct] = field(default_factory=dict)
    # For each method, the number of further calls that close the connection instead of replying.
    cuts: dict[str, int] = field(default_factory=dict)
    # Assign waits for this event.
    may_assign: threading.Event = field(default_factory=_set_event)
    # How long Release and Read take.
    answer_takes_s: float = 0.0
    assign_fails: VarlinkError | None = None
    tasks_outside: int = 0
    descendants_outside: int = 0
    # The command line that each assigned process had during the call.
    command_lines: list[bytes] = field(default_factory=list)
    # The processes that were passed as pidfds.
    by_pidfd: list[int] = field(default_factory=list)

    def called(self, name: str) -> list[Any]:
        """Return the parameters of each call of a method."""
        return [parameters for method, parameters in self.calls if method == name]

    def add(self, key: str, **fields: Any) -> types.Workload:
        """Add an active workload with these fields; return it."""
        path = self.tree / key
        path.mkdir(exist_ok=True)
        (path / "tasks").touch()
        defaults: dict[str, Any] = {
            "class_": "",
            "state": State.ACTIVE,
            "path": str(path),
            "generation": 1,
            "baseline": Quality.EXACT,
            "claims": (Claim("cli", NOW, EndRule.RELEASE),),
            "members": (),
            "attributes": {},
            "created_at": NOW,
        }
        fields = defaults | fields
        for name in ("created", "completed"):
            fields.setdefault(f"{name}_ns", since_boot(fields.get(f"{name}_at")))
        self.workloads[key] = types.Workload(key=key, **fields)
        return self.workloads[key]

    def interface(self) -> Interface:
        """Return the interface for the varlink server, with the real description."""
        text = (importlib.resources.files("resctrlmond.api") / f"{INTERFACE}.varlink").read_text()
        requests: dict[str, type[msgspec.Struct]] = {
            "Create": types.CreateRequest,
            "Assign": types.AssignRequest,
            "Release": types.ReleaseRequest,
            "Move": types.MoveRequest,
            "Get": types.KeyRequest,
            "Read": types.KeyRequest,
            "ReadForeign": types.ForeignRequest,
            "ReadAll": types.ReadAllRequest,
            "List": types.NoParameters,
            "ListPods": types.NoParameters,
            "ListUnwatched": types.NoParameters,
            "Status": types.NoParameters,
            "Machine": types.NoParameters,
            "Sums": types.SumsRequest,
        }
        return Interface(INTERFACE, text, {name: self._method(name, kind) for name, kind in requests.items()})

    def _method(self, name: str, request: type[msgspec.Struct]) -> Method[Any]:
        async def handle(parameters: Any, caller: Caller) -> msgspec.Struct:
            if isinstance(parameters, types.AssignRequest) and parameters.pid_fd is not None:
                (pid,) = pidfd_numbers(caller.descriptors[parameters.pid_fd].fileno())
                self.by_pidfd.append(pid)
                parameters = msgspec.structs.replace(parameters, pid=pid, pid_fd=None)
            self.calls.append((name, parameters))
            if self.cuts.get(name):
                self.cuts[name] -= 1
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)
            if name in self.hangs:
                await asyncio.Event().wait()
            if name in self.refuse:
                raise self.refuse[name]
            if name in self.refuse_later:
                self.refuse[name] = self.refuse_later.pop(name)
            if self.next_replies.get(name):
                return self.next_replies[name].pop(0)
            if name in self.replies:
                return self.replies[name]
            reply: msgspec.Struct = await asyncio.to_thread(getattr(self, name.lower()), parameters)
            return reply

        return Method(request, handle)

    def _find(self, key: str) -> types.Workload:
        if key not in self.workloads:
            raise error("NoSuchWorkload", f"there is no workload {key!r}")
        return self.workloads[key]

    def machine(self, _request: types.NoParameters) -> types.MachineReply:
        return types.MachineReply(since=NOW, read_at=NOW, pools=[])

    def sums(self, _request: types.SumsRequest) -> types.SumsReply:
        return types.SumsReply(since=NOW, read_at=NOW, lost=0, names=[])

    def create(self, request: types.CreateRequest) -> types.WorkloadReply:
        workload = self.workloads.get(request.key) or self.add(
            request.key, state=State.IDLE, class_=request.class_ or "", attributes=request.attributes or {}
        )
        return types.WorkloadReply(workload=workload)

    def assign(self, request: types.AssignRequest) -> types.AssignReply:
        if request.pid is not None:
            self.may_assign.wait()
            if self.assign_fails is not None:
                raise self.assign_fails
            self.command_lines.append(Path(f"/proc/{request.pid}/cmdline").read_bytes())
        member = Member("pid", "process", request.claim or "", pid=request.pid or 0)
        workload = self.add(
            request.key,
            members=(member,),
            claims=(Claim(request.claim or "", NOW, EndRule.RELEASE),),
            attributes=request.attributes or {},
            class_="" if request.class_ in (None, "/", FOLLOW) else request.class_,
        )
        return types.AssignReply(
            workload=workload,
            moved=3,
            passes=2,
            tasks_outside=self.tasks_outside,
            descendants_outside=self.descendants_outside,
        )

    def release(self, request: types.ReleaseRequest) -> types.ReleaseReply:
        time.sleep(self.answer_takes_s)
        workload = self._find(request.key)
        claims = tuple(claim for claim in workload.claims if claim.owner != request.claim)
        state = workload.state if claims else State.COMPLETED
        workload = msgspec.structs.replace(
            workload,
            claims=claims,
            state=state,
            completed_at=None if claims else LATER,
            completed_ns=None if claims else since_boot(LATER),
        )
        self.workloads[request.key] = workload
        return types.ReleaseReply(workload=workload, completed=not claims, totals=TOTALS)

    def move(self, request: types.MoveRequest) -> types.WorkloadReply:
        workload = msgspec.structs.replace(self._find(request.key), class_=request.class_)
        self.workloads[request.key] = workload
        return types.WorkloadReply(workload=workload)

    def get(self, request: types.KeyRequest) -> types.GetReply:
        return types.GetReply(workload=self._find(request.key), proofs=PROOFS)

    def read(self, request: types.KeyRequest) -> types.ReadReply:
        time.sleep(self.answer_takes_s)
        workload = self._find(request.key)
        read_ns = workload.completed_ns or since_boot(LATER)
        return types.ReadReply(workload=workload, readings=READINGS, read_ns=read_ns, totals=TOTALS)

    def readforeign(self, request: types.ForeignRequest) -> types.ReadForeignReply:
        (found,) = [group for group in self.foreign if (group.class_, group.name) == (request.class_, request.name)]
        return types.ReadForeignReply(foreign=found, readings=READINGS)

    def readall(self, request: types.ReadAllRequest) -> types.ReadAllReply:
        usages = [
            types.Usage(
                workload=workload,
                read_at=LATER if workload.path else None,
                read_ns=since_boot(LATER) if workload.path else None,
                totals=TOTALS if workload.path else [],
                levels=[types.Level(event="llc_occupancy", unit="bytes", value="1572864")] if workload.path else [],
            )
            for workload in self.workloads.values()
            if request.with_ended or not workload.state.is_over
        ]
        return types.ReadAllReply(usages=usages)

    def list(self, _request: types.NoParameters) -> types.ListReply:
        return types.ListReply(workloads=list(self.workloads.values()), foreign=self.foreign)

    def listunwatched(self, _request: types.NoParameters) -> types.ListUnwatchedReply:
        return types.ListUnwatchedReply(containers=self.unwatched)

    def listpods(self, _request: types.NoParameters) -> types.ListPodsReply:
        return types.ListPodsReply(
            pods=pods_of(self.sandboxes, self.workloads.values()), reported=[Report("nri", LATER)]
        )

    def status(self, _request: types.NoParameters) -> types.StatusReply:
        return types.StatusReply(
            version="0.1.0",
            mount="/sys/fs/resctrl",
            mounted=True,
            rmids=64,
            rmids_used=5,
            pending=1,
            groups=len(self.workloads),
            foreign=self.foreign,
            classes=["", "gold"],
            capacity=self.capacity,
            problems=["nri-resctrl-mon runs here too"],
        )


def error(name: str, message: str, **fields: str) -> VarlinkError:
    """Return an error as the daemon would send it."""
    return VarlinkError(f"{INTERFACE}.{name}", {"message": message, **fields})


@contextmanager
def serving(folder: Path) -> Iterator[FakeManager]:
    """Serve a manager on a socket in ``folder``, from a separate thread, until the end of the block."""
    tree = folder / "tree"
    tree.mkdir()
    fake = FakeManager(str(folder / "socket"), tree)
    started = threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        server = Server([fake.interface()], vendor="resctrlmon", product="fake", version="0", url="about:blank")
        await server.start(listen(fake.socket))
        started.set()
        await stop.wait()
        await server.close(grace_s=1.0)

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert started.wait(60), "the varlink server did not start"
        yield fake
    finally:
        fake.may_assign.set()
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()
