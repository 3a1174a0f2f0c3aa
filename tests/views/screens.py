# SPDX-License-Identifier: Apache-2.0
"""Run the verbs while workloads start and end, and return what is wrong with their screens.

The figures change all the time: texts to compare with are in tests/ctl/screens, and these are rules for each screen.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from resctrlmond.api.types import AssignRequest, CreateRequest, ReleaseRequest
from resctrlmond.client import Client, DaemonUnavailable
from tests.wait import wait_until

ROOT = Path(__file__).resolve().parents[2]
MANAGER = "org.resctrlmon.Manager."
CLAIM = "views"
WIDTHS = (80, 200)
# The verbs, and the exit statuses that they may have. NAME is the name of a workload that does not end.
VERBS: tuple[tuple[tuple[str, ...], tuple[int, ...]], ...] = (
    (("list",), (0,)),
    (("list", "--all", "--sort", "power"), (0,)),
    (("list", "--rate", "--sort", "bandwidth"), (0,)),
    (("list", "--pods"), (0,)),
    *(
        (("top", "-b", "-n", "1", "-d", "0.5", "--by", by), (0,))
        for by in ("workload", "pod", "unit", "class", "domain")
    ),
    (("show", "NAME"), (0,)),
    (("show", "/"), (0,)),
    (("status",), (0,)),
    (("machine",), (0,)),
    (("machine", "--domains"), (0,)),
    (("sums",), (0,)),
    (("sums", "--by", "slice"), (0,)),
    (("classes",), (0,)),
    (("doctor",), (0, 8, 9)),
    (("run", "-r", "2", "true"), (0,)),
    (("watch",), (-signal.SIGINT, 130)),
)
_WATCHED_S = 2.0
_CONTROL = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_COUNT = re.compile(r"^(\d+) workloads?\b", re.MULTILINE)


@dataclass
class Site:
    """A daemon on a simulated machine, and a number of workloads that changes by at most one."""

    folder: Path
    count: int
    daemon: int
    environment: dict[str, str]
    # The workload that does not end, and all others.
    name: str = "views-stays"
    sleeper: int = 0
    keys: list[str] = field(default_factory=list)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    begun: int = 0

    @property
    def socket(self) -> str:
        """The daemon's varlink socket."""
        return self.environment["RESCTRLMOND_SOCKET"]

    def begin(self, client: Client) -> None:
        """Begin a workload: a pod, a unit, a container or a command, of which one in eight has a task."""
        number = next(self.numbers)
        attributes = (
            {"pod.namespace": "shop", "pod.name": f"cart-deployment-7f9c6d5b8-x2x4z-with-a-long-name-{number}"},
            {"unit": f"worker@{number}.service"},
            {"container.name": f"web-{number}"},
            {"command": "make -j8"},
        )[number % 4]
        key = (
            f"{number:08x}-ad00-4c0b-9f0e-0123456789ab",
            f"worker@{number}.service",
            f"{number:064x}",
            f"run-{number}",
        )
        client.call(f"{MANAGER}Create", CreateRequest(key=key[number % 4], attributes=attributes, claim=CLAIM))
        self.keys.append(key[number % 4])
        self.begun += 1

    def churn(self, stopped: threading.Event) -> None:
        """End one workload after another, and begin another one each time."""
        draw = random.Random(7)
        with contextlib.closing(Client(self.socket)) as client:
            while not stopped.wait(0.2):
                if self.keys:
                    key = self.keys.pop(draw.randrange(len(self.keys)))
                    client.call(f"{MANAGER}Release", ReleaseRequest(key=key, claim=CLAIM))
                    self.begin(client)

    def ctl(self, words: Sequence[str], width: int) -> subprocess.CompletedProcess[str]:
        """Run resctrlctl in the C locale on a terminal that shows no colours."""
        command = [sys.executable, "-m", "resctrlctl", *(self.name if word == "NAME" else word for word in words)]
        environment = self.environment | {"COLUMNS": str(width)}
        pipe = subprocess.PIPE
        with subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
            if words[0] == "watch":
                time.sleep(_WATCHED_S)
                process.send_signal(signal.SIGINT)
            out, errors = process.communicate(timeout=300)
        return subprocess.CompletedProcess(command, process.returncode, out, errors)


def _answers(socket: str) -> bool:
    """Return whether the daemon answers a call."""
    try:
        with contextlib.closing(Client(socket)) as client:
            client.call(f"{MANAGER}Status")
    except DaemonUnavailable:
        return False
    return True


@contextlib.contextmanager
def site(folder: Path, count: int) -> Iterator[Site]:
    """Run a daemon on a simulated machine with so many workloads, which end and begin while the block runs."""
    socket = folder / "run" / "org.resctrlmon.Manager"
    environment = {
        **{name: text for name, text in os.environ.items() if name not in ("LANG", "LC_CTYPE")},
        "PYTHONPATH": str(ROOT),
        "RESCTRLMOND_SOCKET": str(socket),
        "LC_ALL": "C",
        "TERM": "dumb",
        "TZ": "UTC",
    }
    with contextlib.ExitStack() as started:

        def start(*words: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL)
            started.callback(process.wait, 60)
            started.callback(process.terminate)
            return process

        daemon = start(sys.executable, "-m", "resctrlmond", "--simulate", str(folder))
        # The socket exists a moment before the daemon listens on it.
        wait_until(lambda: _answers(str(socket)))
        found = Site(folder, count, daemon.pid, environment)
        stopped = threading.Event()
        with contextlib.closing(Client(str(socket))) as client:
            if count:
                request = AssignRequest(key=found.name, pid=start("sleep", "3600").pid, claim=CLAIM)
                client.call(f"{MANAGER}Assign", request)
            for _ in range(count - 1):
                found.begin(client)
        thread = threading.Thread(target=found.churn, args=(stopped,))
        thread.start()
        try:
            yield found
        finally:
            stopped.set()
            thread.join()


def faults(words: Sequence[str], allowed: Sequence[int], of: Site, width: int) -> list[str]:
    """Run a verb; return what is wrong with what it prints."""
    begun = of.begun
    done = of.ctl(words, width)
    text = done.stderr if words[0] == "run" else done.stdout
    found = []
    if done.returncode not in allowed:
        found.append(f"exit status {done.returncode}: {done.stderr.strip()}")
    if words[0] not in ("run", "watch") and done.stderr:
        found.append(f"on standard error: {done.stderr.strip()}")
    if not text.isascii() or _CONTROL.search(text):
        found.append("characters that a terminal of the C locale does not show")
    found += [f"too wide: {line}" for line in text.splitlines() if words[0] != "watch" and is_too_wide(line, width)]
    # A workload that ended while others were read is left out, and so may be one that began meanwhile.
    shown = (
        _COUNT.search(text)
        if words[0] in ("list", "top") and "--all" not in words and "--pods" not in words
        else None
    )
    changed = of.begun - begun + 1
    if shown and abs(int(shown[1]) - of.count) > changed:
        found.append(f"{shown[1]} workloads, not {of.count}")
    return [f"{' '.join(words)} with {of.count} workloads at {width} columns: {fault}" for fault in found]


def is_too_wide(line: str, width: int) -> bool:
    """Return whether a line could have been broken: it exceeds the width though none of its words is long."""
    return len(line) > width and max(map(len, line.split())) < width // 3


def verbs_of(of: Site) -> Iterator[tuple[tuple[str, ...], tuple[int, ...]]]:
    """Yield the verbs that the machine can show, with their exit statuses."""
    for words, allowed in VERBS:
        if "NAME" not in words or of.count:
            yield words, allowed


def all_faults(of: Site, widths: Sequence[int], report: Callable[[str], None]) -> list[str]:
    """Run each verb at each width; return what is wrong. ``report`` gets a line for each verb and each fault."""
    found = []
    for words, allowed in verbs_of(of):
        for width in widths:
            began = time.monotonic()
            wrong = faults(words, allowed, of, width)
            report(f"{of.count:4} workloads  {width:4} columns  {time.monotonic() - began:6.2f} s  {' '.join(words)}")
            for fault in wrong:
                report(fault)
            found += wrong
    return found
