# SPDX-License-Identifier: Apache-2.0
"""The verbs of all interfaces. Each is declared once: its request, its function, its reply and errors."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from typing import Any

import msgspec

from resctrlmond.api import calls, oci_hook, signatures, types
from resctrlmond.api.access import Access, Caller
from resctrlmond.api.lists import MAX_LIST_BYTES, MAX_PAGES_BYTES
from resctrlmond.api.oci_state import InvalidOciState
from resctrlmond.api.service import Service
from resctrlmond.api.signatures import HOOK, MANAGER, UNIT, Signature
from resctrlmond.api.workers import Lane
from resctrlmond.resctrl.cgroups import NoSuchCgroup
from resctrlmond.resctrl.errors import (
    ClassMismatch,
    GroupExists,
    KernelRefused,
    MonitoringUnavailable,
    NoSuchClass,
    NoSuchGroup,
    NoSuchProcess,
    NotMounted,
    NotRead,
    OutOfResources,
    PermissionDenied,
    ProcessChanged,
    ResctrlError,
    RmidsExhausted,
)
from resctrlmond.workloads.manager import Manager
from resctrlmond.workloads.model.errors import (
    AlreadyMonitored,
    ForeignGroup,
    InvalidAttributes,
    InvalidClass,
    InvalidKey,
    InvalidRequest,
    LimitExceeded,
    NoSuchClaim,
    NoSuchWorkload,
    NotWatched,
    NotWritten,
    TooSlow,
)

INTERFACES = {
    MANAGER: """
Monitoring groups of Linux resctrl on this host: one for each workload (a pod, container, service or command), kept as
long as the workload lives, with what it used.

Root may call every method. Root and the members of the groups resctrlmon and resctrlmon-read may call the methods
that only read.
Times are RFC 3339 in UTC. Values of counters are strings, exactly as the kernel wrote them. A field with "?" may be
absent.

Every error except InternalError has a message, which states what failed and why, and, if they are known, the path,
the name of the errno, the kernel's explanation from last_cmd_status (status), and what to do (remedy).
""",
    HOOK: """
The interface of the OCI hook, resctrlmon-oci-hook. Its errors are those of org.resctrlmon.Manager.
""",
    UNIT: """
The interface of resctrlmon-unit-exec, on a socket of its own. Its errors are those of org.resctrlmon.Manager.

Every user may call it.
""",
}


class Verb(msgspec.Struct, frozen=True):
    """A verb. ``run`` is the blocking call; it runs in a thread of ``lane``, for callers with ``access``.

    ``handle`` is a coroutine function in the place of ``run``, which it calls if needed.
    ``pages`` yields the reply in several parts, for calls with *more* over varlink. ``follow`` yields replies without
    end, in the event loop: such a verb is only for calls with *more*. ``errors`` are the errors of this verb other
    than ``COMMON_ERRORS``. ``description`` is for the interfaces and the manual page, in the markup of
    scdoc(5).
    """

    signature: Signature[Any, Any]
    lane: Lane
    access: Access
    run: Callable[[Manager, Any, Caller], types.Reply]
    pages: Callable[[Manager, Any], Iterator[types.Reply]] | None = None
    follow: Callable[[Service, Caller], AsyncGenerator[types.Reply, None]] | None = None
    handle: Callable[[Service, Any, Caller], Awaitable[types.Reply]] | None = None
    errors: tuple[type[ResctrlError], ...] = ()
    description: str = ""

    @property
    def name(self) -> str:
        """Return the name without its interface."""
        return self.signature.name

    @property
    def full_name(self) -> str:
        """Return the name with its varlink interface."""
        return self.signature.full_name

    @property
    def interface(self) -> str:
        """Return the name of its varlink interface."""
        return self.signature.interface

    @property
    def request(self) -> type[types.Request]:
        """Return the type of its request."""
        request: type[types.Request] = self.signature.request
        return request

    @property
    def reply(self) -> type[types.Reply]:
        """Return the type of its reply."""
        reply: type[types.Reply] = self.signature.reply
        return reply

    @property
    def reply_bytes(self) -> int:
        """Return the bytes to reserve for the reply before the call; 0 for verbs that change something or follow."""
        if self.access is not Access.READ or self.follow:
            return 0
        return MAX_PAGES_BYTES if self.pages else MAX_LIST_BYTES


# The errors of every verb. InternalError, which is not raised, stands for every other exception.
COMMON_ERRORS: tuple[type[ResctrlError], ...] = (
    InvalidRequest,
    PermissionDenied,
    NotMounted,
    KernelRefused,
    OutOfResources,
    NotWritten,
    NotRead,
)
_CREATE_ERRORS: tuple[type[ResctrlError], ...] = (
    InvalidKey,
    InvalidClass,
    InvalidAttributes,
    LimitExceeded,
    NoSuchGroup,
    NoSuchClass,
    RmidsExhausted,
    MonitoringUnavailable,
    GroupExists,
    ForeignGroup,
    NotWatched,
)
_ASSIGN_ERRORS: tuple[type[ResctrlError], ...] = (
    *_CREATE_ERRORS,
    ClassMismatch,
    AlreadyMonitored,
    NoSuchCgroup,
    NoSuchProcess,
    ProcessChanged,
)

# To add a verb, add a row here, a function in calls.py, its signature in signatures.py, its request and reply in
# types.py, and a function in workloads/verbs. "make interfaces" generates the rest.
_TABLE = (
    Verb(
        signatures.CREATE,
        Lane.CHANGE,
        Access.WRITE,
        calls.run_create,
        errors=_CREATE_ERRORS,
        description="""
Create a workload's monitoring group, without a task yet, and claim the workload. If the workload exists and has not
ended, only add the claim and the attributes; its group does not change.
""",
    ),
    Verb(
        signatures.ASSIGN,
        Lane.CHANGE,
        Access.WRITE,
        calls.run_assign,
        errors=_ASSIGN_ERRORS,
        description="""
Put a process with all its threads, or a control group with all control groups below it, into the workload's group,
and claim the workload. Exactly one of *pid*, *pidFd* and *cgroup* is required. If the workload does not exist, create
it, as *Create* does. The baseline is read before the first task joins.
""",
    ),
    Verb(
        signatures.RELEASE,
        Lane.CHANGE,
        Access.WRITE,
        calls.run_release,
        errors=(InvalidKey, NoSuchWorkload, NoSuchClaim),
        description="""
End an owner's claim. A workload ends with its last claim: the end values are read and written, the group is removed,
and its RMID becomes free. If the workload has already ended, return its totals again, for any *claim*.
""",
    ),
    Verb(
        signatures.ADD_MEMBER,
        Lane.CHANGE,
        Access.WRITE,
        calls.run_add_member,
        errors=(InvalidKey, LimitExceeded, NoSuchWorkload),
        description="""
Add a member that has no task of its own, such as a pod's sandbox, to an existing workload, and claim the
workload.
""",
    ),
    Verb(
        signatures.REMOVE_MEMBER,
        Lane.CHANGE,
        Access.WRITE,
        calls.run_remove_member,
        errors=(InvalidKey, NoSuchWorkload),
        description="""
Record that a member has ended. The daemon itself detects the end of a member that has tasks.
""",
    ),
    Verb(
        signatures.EXPOSE,
        Lane.RECORDS,
        Access.WRITE,
        calls.run_expose,
        errors=(InvalidKey, LimitExceeded),
        description="""
Create the directory with the figures of a workload for its containers, if there is none, and return its path. The
caller can then mount it into a container that is being created. The workload need not exist yet. See *expose* in
*resctrlmond-profiles*(5).
""",
    ),
    Verb(
        signatures.RECONCILE,
        Lane.CHANGE,
        Access.WRITE,
        calls.run_reconcile,
        errors=(InvalidKey,),
        description="""
End an owner's claims on all workloads except *keys*. Claims of other owners do not change. An owner that was not
running calls this method when it starts again.
""",
    ),
    Verb(
        signatures.MOVE,
        Lane.CHANGE,
        Access.WRITE,
        calls.run_move,
        errors=(
            InvalidKey,
            InvalidClass,
            NoSuchWorkload,
            NoSuchGroup,
            NoSuchClass,
            ClassMismatch,
            GroupExists,
            ForeignGroup,
        ),
        description="""
Move the whole group to another class. It keeps its RMID and its counters; its tasks change class. The error is
*ClassMismatch* if the workload has groups in several classes, or if it has tasks and the kernel cannot move groups
(before Linux 6.5).
""",
    ),
    Verb(
        signatures.REPORT_PODS,
        Lane.RECORDS,
        Access.WRITE,
        calls.run_report_pods,
        errors=(InvalidKey, InvalidAttributes, LimitExceeded),
        description="""
Report the pods that an owner knows, also those without a group, for *ListPods*. A report changes no group. Reports
are kept in memory only: an owner must report again after a restart of the daemon.
""",
    ),
    Verb(
        signatures.LIST,
        Lane.RECORDS,
        Access.READ,
        calls.run_list,
        calls.list_pages,
        errors=(LimitExceeded,),
        description="""
List all workloads, and the monitoring groups of other programs, without counters.

Over varlink, a call with *more* (*varlinkctl --more*) returns a list of any length, in several replies of about 256
KiB; *foreign* is in the first one. Without *more*, and over D-Bus, a list of more than 2 MiB fails with
*LimitExceeded*.
""",
    ),
    Verb(
        signatures.LIST_PODS,
        Lane.RECORDS,
        Access.READ,
        calls.run_list_pods,
        calls.pod_pages,
        errors=(LimitExceeded,),
        description="""
List all pods that an owner reported, and all other pods with a workload that has not ended. Long lists are returned
as by *List*, with *reported* in the first reply.
""",
    ),
    Verb(
        signatures.LIST_UNWATCHED,
        Lane.RECORDS,
        Access.READ,
        calls.run_list_unwatched,
        errors=(LimitExceeded,),
        description="""
List the containers and the units of systemd that run and are in no group because of their profiles. The daemon keeps
this list in memory only: after a restart, it has all units, and the containers that start, or that an owner assigns,
from then on.
""",
    ),
    Verb(
        signatures.GET,
        Lane.COUNTERS,
        Access.READ,
        calls.run_get,
        errors=(InvalidKey, NoSuchWorkload),
        description="""
Return one workload, with the proofs on which its quality rests. The witness is asked for this.
""",
    ),
    Verb(
        signatures.READ,
        Lane.COUNTERS,
        Access.READ,
        calls.run_read,
        errors=(InvalidKey, NoSuchWorkload, NoSuchGroup),
        description="""
Return one workload with its current counters, and with what it used since its baseline.
""",
    ),
    Verb(
        signatures.READ_ALL,
        Lane.COUNTERS,
        Access.READ,
        calls.run_read_all,
        calls.read_all_pages,
        description="""
Return all workloads with what they used since their baselines. The counters are read at most every half second,
however many clients call this: *readAt* is the time of each reading.

Over varlink, a call with *more* (*varlinkctl --more*) returns all workloads in several replies of about 256 KiB.
Otherwise a reply has at most 512 KiB: if workloads are left, it has *next*, for *after* in the next call.
""",
    ),
    Verb(
        signatures.WATCH,
        Lane.RECORDS,
        Access.READ,
        calls.run_watch,
        follow=lambda service, caller: service.watches.stream(caller, service.run),
        errors=(LimitExceeded, TooSlow),
        description="""
List the workloads that have not ended, as _present_, and then report what happens to workloads, until the client
closes the connection. Call this with *more* (*varlinkctl --more*); D-Bus has signals instead.

The changes of one workload are in their order, and changes within 10 ms become one. But every run that ends is
reported, with its totals, also if several runs of a key end within that time. Counters are not read for this: call
*ReadAll* for the use of workloads that have not ended.

A client that does not read for long gets the error *TooSlow*, or its connection is closed.
""",
    ),
    Verb(
        signatures.MACHINE,
        Lane.COUNTERS,
        Access.READ,
        calls.run_machine,
        description="""
Return what the whole machine used since the daemon began to count, by pool: the groups of workloads, those of other
programs, and the tasks that are in no group. Nothing that the hardware counted is left out or counted twice; where
that cannot be shown, the quality is _estimated_. From the first call on, the counters continue over restarts and
kills of the daemon, and none falls while *since* stays the same. While no daemon runs, changes of other programs are
not seen: after a restart, the counters of their groups and of tasks in no group are _estimated_, and so is the pool
_uncore_, which is computed from them. The pool _tracked_ is _estimated_ if another program removed the group of a
workload, or may have removed it: after a kill during the removal of a group, the daemon cannot know whether it or
another program removed the group.
A reason for _estimated_ lasts until the pools begin again. The counters are read at most every half second, however
many clients call this.
""",
    ),
    Verb(
        signatures.SUMS,
        Lane.COUNTERS,
        Access.READ,
        calls.run_sums,
        errors=(LimitExceeded,),
        description="""
Return what all workloads used since the boot, by namespace, slice, user and profile: those that have ended, also
after their records and files are removed, and those that run until now. Each run is counted once, also after a kill
of the daemon. No number falls when a workload ends. The counters are read at most every half second, however many
clients call this.
""",
    ),
    Verb(
        signatures.READ_FOREIGN,
        Lane.COUNTERS,
        Access.READ,
        calls.run_read_foreign,
        errors=(InvalidClass, NoSuchGroup),
        description="""
Return a monitoring group of another program with its current counters. There are no totals, because its baseline is
not known.
""",
    ),
    Verb(
        signatures.STATUS,
        Lane.RECORDS,
        Access.READ,
        calls.run_status,
        description="""
Return the state of the daemon and of the machine.
""",
    ),
    Verb(
        signatures.RUN,
        Lane.HOOKS,
        Access.WRITE,
        oci_hook.run,
        errors=(InvalidOciState, *_ASSIGN_ERRORS),
        description="""
Handle one stage of a container's life, for *resctrlmon-oci-hook*(8).

If many containers start at once, a call has to wait. With *more*, it then gets a reply with *queueTimeoutMs* at once
and every 2 seconds, and the other fields in the last reply.
""",
    ),
    Verb(
        signatures.ASSIGN_SELF,
        Lane.COMMANDS,
        Access.SELF,
        calls.run_assign_self,
        handle=calls.assign_unit,
        errors=_ASSIGN_ERRORS,
        description="""
Put the calling process into the workload of its own systemd service, before it executes a command of the service,
for *resctrlmon-unit-exec*(8). The caller is the process that has connected. It must be the process that systemd has
started for the command, and *units* in *resctrlmond.yaml*(5) must select the service.

With *more*, the caller gets an empty reply at once and every half second until the last one.
""",
    ),
)
VERBS = {verb.name: verb for verb in _TABLE}
assert len(VERBS) == len(_TABLE)
