# SPDX-License-Identifier: Apache-2.0
"""The name, request and reply of each verb: what a client needs to call it. ``verbs.py`` has what each one does."""

from __future__ import annotations

from typing import Generic, TypeVar

import msgspec

from resctrlmond.api import types

Q = TypeVar("Q", bound=msgspec.Struct)
R = TypeVar("R", bound=msgspec.Struct)

MANAGER = "org.resctrlmon.Manager"
HOOK = "org.resctrlmon.Hook"
UNIT = "org.resctrlmon.Unit"


class Signature(msgspec.Struct, Generic[Q, R], frozen=True):
    """The name, request and reply of a verb."""

    name: str
    request: type[Q]
    reply: type[R]
    interface: str = MANAGER

    @property
    def full_name(self) -> str:
        """Return the name with its varlink interface."""
        return f"{self.interface}.{self.name}"


CREATE = Signature("Create", types.CreateRequest, types.WorkloadReply)
ASSIGN = Signature("Assign", types.AssignRequest, types.AssignReply)
RELEASE = Signature("Release", types.ReleaseRequest, types.ReleaseReply)
ADD_MEMBER = Signature("AddMember", types.AddMemberRequest, types.WorkloadReply)
REMOVE_MEMBER = Signature("RemoveMember", types.RemoveMemberRequest, types.WorkloadReply)
EXPOSE = Signature("Expose", types.ExposeRequest, types.ExposeReply)
RECONCILE = Signature("Reconcile", types.ReconcileRequest, types.ReconcileReply)
MOVE = Signature("Move", types.MoveRequest, types.WorkloadReply)
REPORT_PODS = Signature("ReportPods", types.ReportPodsRequest, types.ReportPodsReply)
LIST = Signature("List", types.NoParameters, types.ListReply)
LIST_PODS = Signature("ListPods", types.NoParameters, types.ListPodsReply)
LIST_UNWATCHED = Signature("ListUnwatched", types.NoParameters, types.ListUnwatchedReply)
GET = Signature("Get", types.KeyRequest, types.GetReply)
READ = Signature("Read", types.KeyRequest, types.ReadReply)
READ_ALL = Signature("ReadAll", types.ReadAllRequest, types.ReadAllReply)
WATCH = Signature("Watch", types.NoParameters, types.WatchReply)
MACHINE = Signature("Machine", types.NoParameters, types.MachineReply)
SUMS = Signature("Sums", types.SumsRequest, types.SumsReply)
READ_FOREIGN = Signature("ReadForeign", types.ForeignRequest, types.ReadForeignReply)
STATUS = Signature("Status", types.NoParameters, types.StatusReply)
RUN = Signature("Run", types.RunRequest, types.RunReply, HOOK)
ASSIGN_SELF = Signature("AssignSelf", types.AssignSelfRequest, types.AssignSelfReply, UNIT)
