# SPDX-License-Identifier: Apache-2.0
"""The source of what the verbs that only read print: the daemon, or the resctrl filesystem."""

from __future__ import annotations

import argparse
import os
import shlex
from typing import TYPE_CHECKING

from resctrlctl.base.defaults import SOCKET
from resctrlctl.base.errors import CommandError, DaemonDown
from resctrlctl.connection.daemon import daemon_of
from resctrlctl.screen.output import Output
from resctrlmond.api import signatures
from resctrlmond.api.exit_codes import NOT_RUNNING
from resctrlmond.api.types import (
    Foreign,
    ForeignRequest,
    KeyRequest,
    ListPodsReply,
    ListReply,
    Proof,
    ReadAllRequest,
    ReadForeignReply,
    ReadReply,
    Unwatched,
    Usage,
)

if TYPE_CHECKING:
    from resctrlctl.workloads.tree_view import TreeView
    from resctrlmond.resctrl.tree import Tree


class Source:
    """The source of workloads and groups.

    With --root, this is the resctrl filesystem at that path. Otherwise it is the daemon or, if the daemon of this
    machine does not run, the resctrl filesystem of the machine.
    """

    def __init__(self, args: argparse.Namespace, output: Output) -> None:
        self._daemon = daemon_of(args)
        self._output = output
        self._view = None if args.root is None else self._open(args.root)

    @property
    def is_here(self) -> bool:
        """Whether the workloads and groups are those of this host."""
        return isinstance(self._daemon.socket, str)

    @property
    def is_daemon(self) -> bool:
        """Whether the last call was answered by the daemon, and not by the resctrl filesystem."""
        return self._view is None

    def refresh(self) -> None:
        """Read the records again before the next listing, if they are read in place of the daemon."""
        if self._view is not None:
            self._view = self._view.refreshed()

    def workloads(self) -> ListReply:
        """Return the workloads and the foreign groups."""
        if self._view is None:
            try:
                pages = self._daemon.stream("list the workloads", signatures.LIST)
                return ListReply(
                    workloads=[workload for page in pages for workload in page.workloads],
                    foreign=[group for page in pages for group in page.foreign],
                )
            except DaemonDown as error:
                self._view = self._fall_back(error)
        return self._view.workloads()

    def usages(self, *, with_ended: bool) -> list[Usage]:
        """Return the use of each workload, in order of the key."""
        if self._view is None:
            try:
                request = ReadAllRequest(with_ended=with_ended)
                pages = self._daemon.stream("list the workloads", signatures.READ_ALL, request)
                return [usage for page in pages for usage in page.usages]
            except DaemonDown as error:
                self._view = self._fall_back(error)
        return self._view.usages(with_ended=with_ended)

    def unwatched(self) -> list[Unwatched]:
        """Return the containers that are in no group because of their profiles; [] without the daemon."""

        if self._view is not None:
            return []
        action = "list the unwatched containers"
        return self._daemon.call(action, signatures.LIST_UNWATCHED).containers

    def pods(self) -> ListPodsReply:
        """Return all pods; without the daemon, only the pods that have a group."""
        if self._view is None:
            try:
                pages = self._daemon.stream("list the pods", signatures.LIST_PODS)
                return ListPodsReply(
                    pods=[pod for page in pages for pod in page.pods],
                    reported=[report for page in pages for report in page.reported],
                )
            except DaemonDown as error:
                self._view = self._fall_back(error)
        return self._view.pods()

    def read(self, key: str) -> ReadReply:
        """Return a workload with its counters and totals."""
        if self._view is None:
            try:
                return self._daemon.call(f"show {key!r}", signatures.READ, KeyRequest(key=key))
            except DaemonDown as error:
                self._view = self._fall_back(error)
        return self._view.read(key)

    def proofs(self, key: str) -> list[Proof]:
        """Return the proofs on which the quality of a workload rests. Raises CommandError without the daemon."""
        if self._view is not None:
            raise CommandError("only resctrlmond knows the proofs: start it to use --why", NOT_RUNNING)
        return self._daemon.call(f"show {key!r}", signatures.GET, KeyRequest(key=key)).proofs

    def read_foreign(self, foreign: Foreign) -> ReadForeignReply:
        """Return a foreign group with its counters."""
        if self._view is not None:
            return self._view.read_foreign(foreign)
        request = ForeignRequest(class_=foreign.class_, name=foreign.name)
        return self._daemon.call(f"show {foreign.name!r}", signatures.READ_FOREIGN, request)

    def tree(self) -> Tree:
        """Open the resctrl filesystem to read its classes, which no verb of the daemon does. Raises NotMounted."""
        from resctrlmond.resctrl.tree import Tree  # noqa: PLC0415 - see _open()

        if self._view is not None:
            return self._view.tree
        status = self._daemon.call("ask where resctrl is mounted", signatures.STATUS)
        return Tree.open(status.mount, allow_simulation=status.simulation is not None)

    def _fall_back(self, error: DaemonDown) -> TreeView:
        # The daemon of another socket, such as that of a simulation, does not serve this machine's resctrl.
        if self._daemon.socket != SOCKET:
            root = simulator_beside(self._daemon.socket) if isinstance(self._daemon.socket, str) else ""
            hint = (
                f". To read the groups of the simulation without it, use: --root {shlex.quote(root)}" if root else ""
            )
            raise DaemonDown(f"{error}{hint}", error.status, error.name)
        return self._open(None)

    def _open(self, root: str | None) -> TreeView:
        """Open the resctrl filesystem at ``root``; None: that of the machine, with the daemon's records."""
        # With a daemon, its lower layers are not needed: they take three times as long to import as all of list.
        from resctrlctl.workloads import tree_view  # noqa: PLC0415

        if root is None:
            self._output.note(f"resctrlmond is not running: read from {tree_view.ROOT}")
            view, notes = tree_view.TreeView.open(tree_view.ROOT, simulation=False, run=tree_view.RUN)
        else:
            # The records in /run are about the machine's own resctrl filesystem only. A simulation has its own.
            view, notes = tree_view.TreeView.open(root, simulation=True, run="")
        for note in notes:
            self._output.note(note)
        return view


def simulator_beside(socket: str) -> str:
    """Return the mount point of the simulator whose daemon had this socket (daemon/simulated.py); "" if none is."""
    root = os.path.join(os.path.dirname(os.path.dirname(os.path.realpath(socket))), "resctrl")
    return root if os.path.ismount(root) else ""
