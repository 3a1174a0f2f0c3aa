# SPDX-License-Identifier: Apache-2.0
"""The daemon as the agent of the simulated workloads: called over varlink, and killed at random moments."""

from __future__ import annotations

import contextlib
import os
import random
import threading
import time
from decimal import Decimal
from pathlib import Path
from typing import Any

from resctrlmond.client import Client, DaemonUnavailable, ProtocolError, VarlinkError
from resctrlmond.resctrl.counters import parse_value
from tests.daemon.conftest import MANAGER, Machine
from tests.truth.ours import OTHER, reported, unseen
from tests.truth.script import Owner
from tests.truth.world import Life, Reported

_OVER = ("completed", "lost", "failed")
# A call takes some milliseconds: the daemon is killed before, during or after it.
_MOST_DELAY_S = 0.05
# The daemon uses the real clock: the real time of a second of the script, and that in which it can detect an end.
_PAUSE_S = 0.02
_WAIT_S = 0.1
_GONE = (DaemonUnavailable, ProtocolError, ConnectionError)


def _claim(owner: Owner) -> str:
    """Return the name of a claim. The hook's own is reserved, so "engine" replaces it."""
    return "engine" if owner is Owner.HOOK else owner.value


class _SlowMachine(Machine):
    """A machine on which each start of the daemon may take long, because of the load."""

    def wait_for_notify(self, wanted: str, timeout_s: float = 120) -> list[str]:
        return super().wait_for_notify(wanted, timeout_s)


class Daemon:
    """A running daemon. ``share`` is the share of calls during which it is killed; ``kills`` counts the kills."""

    def __init__(self, top: str, seed: int, share: float = 0.03) -> None:
        self._chance = random.Random(f"{seed} of the daemon")
        self._share = share
        self._machine = _SlowMachine(Path(top))
        self._machine.start()
        self._client = Client(self._machine.socket, timeout_s=120)
        self._lives: dict[str, Life] = {}
        self._unreported: set[str] = set()
        # The start of the last reported run of a key: a later run that was not reported has another start.
        self._reported: dict[str, str] = {}
        self._killers: list[threading.Timer] = []
        self.kills = 0

    def close(self) -> None:
        """End the daemon."""
        for killer in self._killers:
            killer.cancel()
            killer.join()
        self._client.close()
        self._machine.close()

    def _call(self, verb: str, **parameters: Any) -> dict[str, Any]:
        return self._client.call(f"{MANAGER}.{verb}", {name.rstrip("_"): value for name, value in parameters.items()})

    def _do(self, verb: str, *, repeat: bool = True, **parameters: Any) -> dict[str, Any] | None:
        """Call the daemon, and return its reply. If it is killed, start it; then repeat the call, or return None."""
        if self._chance.random() < self._share:
            assert self._machine.daemon is not None
            killer = threading.Timer(self._chance.random() * _MOST_DELAY_S, self._machine.daemon.kill)
            self._killers.append(killer)
            killer.start()
        while True:
            try:
                return self._call(verb, **parameters)
            except _GONE:
                self._start_again()
                if not repeat:
                    return None

    def _start_again(self) -> None:
        for killer in self._killers:
            killer.join()
        self._killers.clear()
        self._machine.kill()
        self.kills += 1
        self._machine.start()

    def adopt(self, life: Life, late: bool) -> None:
        of = life.of
        self._lives[of.key] = life
        parameters: dict[str, Any] = {
            "key": of.key,
            "pid": life.first.tid,
            "member": f"c{life.container}",
            # A container without a control group of its own is late: processes may join it unseen.
            "kind": "process",
            "late": late,
        }
        # The hook calls once, and the container starts even after an error.
        rule = {"endRule": "container"} if of.owner is Owner.HOOK else {}
        answer = self._do("Assign", repeat=of.owner is not Owner.HOOK, claim=_claim(of.owner), **rule, **parameters)
        if answer is None:
            self._unreported.add(of.key)
        elif of.second_claim:
            self._do("Assign", claim=OTHER, **parameters)

    def move(self, life: Life, class_: str) -> bool:
        try:
            self._do("Move", key=life.of.key, class_=class_)
        except VarlinkError:
            return False  # it has no group, or several
        return True

    def group(self, life: Life) -> str:
        try:
            answer = self._do("Get", key=life.of.key)
        except VarlinkError:
            return ""
        workload = answer["workload"] if answer else {}
        return os.path.relpath(workload["path"], self._machine.top / "resctrl") if workload.get("path") else ""

    def end(self, life: Life) -> None:
        of = life.of
        if of.owner is Owner.HOOK and (of.key in self._unreported or not of.second_claim):
            return  # no call reports the end
        kills = self.kills
        answer = None
        try:
            answer = self._do("Release", key=of.key, claim=_claim(of.owner))
        except VarlinkError as error:
            # The claim ended with the container, by its rule, or in the call during which the daemon was killed.
            assert error.name == f"{MANAGER}.NoSuchClaim"
            assert of.second_claim
            assert of.owner is Owner.HOOK or self.kills > kills
        if of.second_claim:
            answer = self._do("Release", key=of.key, claim=OTHER)
        if answer and answer["completed"]:
            life.reported = self._report(life, answer)

    def second(self, number: int) -> None:
        is_waiting = any(life.is_over and life.reported is None for life in self._lives.values())
        time.sleep(_WAIT_S if is_waiting else _PAUSE_S)
        answer = self._do("List")
        assert answer is not None
        states = {workload["key"]: workload["state"] for workload in answer["workloads"]}
        claimed = {workload["key"] for workload in answer["workloads"] if workload["claims"]}
        begun = {workload["key"]: workload.get("createdAt", "") for workload in answer["workloads"]}
        for key, life in self._lives.items():
            if not life.is_over or life.reported is not None:
                continue
            if key not in states or (key in self._unreported and begun[key] == self._reported.get(key)):
                life.reported = unseen(life, key in self._unreported)
            elif states[key] in _OVER and key not in claimed:
                answer = self._do("Read", key=key)
                assert answer is not None
                life.reported = self._report(life, answer)

    def _report(self, life: Life, answer: dict[str, Any]) -> Reported:
        read = self._do("Read", key=life.of.key)
        if read is None or read["totals"] != answer["totals"]:
            life.problems.append("the totals of Read and of Release differ")
        totals: dict[str, tuple[int | Decimal | None, str]] = {
            total["event"]: (parse_value(total.get("value") or "").number, total["quality"])
            for total in answer["totals"]
        }
        workload = answer["workload"]
        self._reported[life.of.key] = workload.get("createdAt", "")
        folder = str(self._machine.run / "groups" / life.of.key)
        return reported(life, folder, totals, workload["state"], workload.get("reason") or "")

    def forget(self, life: Life) -> None:
        self._lives.pop(life.of.key, None)
        self._unreported.discard(life.of.key)

    def left(self) -> list[str]:
        """Return the daemon's groups that remain at the end; there must be none."""
        with contextlib.suppress(*_GONE):
            self._call("Status")
        return self._machine.groups()
