# SPDX-License-Identifier: Apache-2.0
"""``list``, ``show`` and ``status``: what is monitored, what it used, how the machine stands."""

from __future__ import annotations

import argparse
import glob
import os
from collections.abc import Sequence

from resctrlctl import render
from resctrlctl.ask import OK, SOCKET, Daemon, DaemonDown, Failure
from resctrlctl.screen import Json, Screen, complain
from resctrlctl.tree_view import RUN, TreeView
from resctrlmond.api.pods import pods_of
from resctrlmond.api.types import (
    Foreign,
    ForeignRequest,
    KeyRequest,
    ListPodsReply,
    ListReply,
    NoParameters,
    ReadForeignReply,
    ReadReply,
    StatusReply,
)
from resctrlmond.resctrl.errors import printable
from resctrlmond.resctrl.tree import DEFAULT_PATH


class Source:
    """Where groups are read from: the daemon; this machine's tree, if its daemon does not run; or a given tree."""

    def __init__(self, args: argparse.Namespace, screen: Screen) -> None:
        self._daemon = Daemon(args.socket)
        self._screen = screen
        # Records under /run speak of the machine's own tree only.
        self._view = None if args.root is None else self._open(args.root, simulation=True, run="")

    def groups(self) -> ListReply:
        """Our groups and those of others."""
        if self._view is None:
            try:
                pages = self._daemon.stream("list the groups", "List", NoParameters(), ListReply)
                return ListReply(
                    groups=[group for page in pages for group in page.groups],
                    foreign=[group for page in pages for group in page.foreign],
                )
            except DaemonDown as error:
                self._view = self._fall_back(error)
        return self._view.groups()

    def pods(self) -> ListPodsReply:
        """All pods that are known; without the daemon, those that have a group."""
        if self._view is None:
            try:
                parts = self._daemon.stream("list the pods", "ListPods", NoParameters(), ListPodsReply)
                return ListPodsReply(
                    pods=[pod for part in parts for pod in part.pods],
                    reported=[report for part in parts for report in part.reported],
                )
            except DaemonDown as error:
                self._view = self._fall_back(error)
        return ListPodsReply(pods=pods_of((), self._view.groups().groups), reported=[])

    def read(self, key: str) -> ReadReply:
        """One of our groups with its counters and totals."""
        if self._view is None:
            try:
                return self._daemon.call(f"show {key!r}", "Read", KeyRequest(key=key), ReadReply)
            except DaemonDown as error:
                self._view = self._fall_back(error)
        return self._view.read(key)

    def foreign(self, name: str) -> list[ReadForeignReply]:
        """The foreign groups of that name or path, one for each class, with their counters."""
        return [self._read_foreign(one) for one in self.groups().foreign if name in (one.name, one.path)]

    def _read_foreign(self, foreign: Foreign) -> ReadForeignReply:
        if self._view is not None:
            return self._view.read_foreign(foreign)
        request = ForeignRequest(class_=foreign.class_, name=foreign.name)
        return self._daemon.call(f"show {foreign.name!r}", "ReadForeign", request, ReadForeignReply)

    def _fall_back(self, error: DaemonDown) -> TreeView:
        # Another socket, such as that of a simulation, says nothing about this machine's resctrl.
        if self._daemon.socket != SOCKET:
            raise error
        self._screen.note(f"resctrlmond is not running: read from {DEFAULT_PATH}")
        return self._open(DEFAULT_PATH, simulation=False, run=RUN)

    def _open(self, root: str, *, simulation: bool, run: str) -> TreeView:
        view, notes = TreeView.open(root, simulation=simulation, run=run)
        for note in notes:
            self._screen.note(note)
        return view


def list_groups(args: argparse.Namespace, screen: Screen) -> int:
    """Print our groups and those of others."""
    if args.pods:
        return _list_pods(Source(args, screen), screen)
    reply = Source(args, screen).groups()
    if screen.json is not Json.OFF:
        screen.answer(reply)
    elif screen.quiet:
        for key in sorted(group.key for group in reply.groups):
            screen.line(printable(key))
    else:
        screen.show(render.group_list(reply))
    return OK


def _list_pods(source: Source, screen: Screen) -> int:
    reply = source.pods()
    if screen.json is not Json.OFF:
        screen.answer(reply)
    elif screen.quiet:
        for pod in reply.pods:
            screen.line(printable(pod.key))
    else:
        screen.show(render.pod_list(reply))
    return OK


def show(args: argparse.Namespace, screen: Screen) -> int:
    """Print each workload with its counters and totals; the exit status of the first that cannot be shown."""
    source = Source(args, screen)
    result = OK
    for index, key in enumerate(args.key):
        try:
            replies = _read(source, key)
        except Failure as failure:
            complain(str(failure))
            result = result or failure.status
            continue
        for number, reply in enumerate(replies):
            if screen.json is not Json.OFF:
                screen.answer(reply)
                continue
            if index or number:
                screen.line("")
            screen.show(render.group_show(reply) if isinstance(reply, ReadReply) else render.foreign_show(reply))
    return result


def _read(source: Source, key: str) -> Sequence[ReadReply | ReadForeignReply]:
    """The workload of that key; if there is none, the foreign groups of that name or path."""
    try:
        return [source.read(key)]
    except Failure as failure:
        # A path is not a valid key.
        if failure.name not in ("NoSuchGroup", "InvalidKey") or not (found := source.foreign(key)):
            raise
        return found


def status(args: argparse.Namespace, screen: Screen) -> int:
    """Print how the daemon and the machine stand; 3 where the daemon does not run."""
    reply = Daemon(args.socket).call("ask for the status", "Status", NoParameters(), StatusReply)
    if screen.json is not Json.OFF:
        screen.answer(reply)
    elif not screen.quiet:
        screen.show(render.status_sheet(reply, runtimes_without_hook()))
    return OK


def runtimes_without_hook(root: str = "/") -> list[str]:
    """The container runtimes of this host that never call the OCI hook, by the files that they have in /run."""
    found = ["Docker"] if os.path.exists(os.path.join(root, "run/docker.sock")) else []
    # /run/user/UID/libpod is made by the Podman of a user.
    return [*found, *(["rootless Podman"] if glob.glob(os.path.join(root, "run/user/*/libpod")) else [])]
