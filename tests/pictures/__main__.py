# SPDX-License-Identifier: Apache-2.0
"""make pictures: take the pictures in README.md of resctrlctl on the simulator. Root only; look at them afterwards.

The page of ``plot`` is shown by Chromium (Debian's chromium, with fonts-dejavu-core), which nothing else needs.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from resctrlmond.api.types import AssignRequest
from resctrlmond.client import Client
from tests.ctl.live.test_top import Terminal
from tests.pictures.svg import drawn
from tests.wait import wait_until_served

ROOT = Path(__file__).resolve().parents[2]
IMAGES = ROOT / "man" / "images"
COLUMNS, ROWS = 92, 11
READINGS = 60
# Each workload: its key, its attributes, the share of a CPU that it uses, how far that share goes up and down, and in
# which time.
WORKLOADS = (
    ("3f9a1c20-5b7e-4c1d-8a66-0e5d2f7b9c11", {"pod.namespace": "shop", "pod.name": "cart-0"}, 0.20, 0.15, 20),
    ("a8d20b6f-91c4-4f0e-b1d3-6c7e85f40a22", {"pod.namespace": "shop", "pod.name": "search-0"}, 0.12, 0.03, 7),
    ("c41e77d9-0a3b-4d52-9f18-2b6a90de5c33", {"pod.namespace": "batch", "pod.name": "train-0"}, 0.30, 0.25, 50),
    ("postgresql.service", {"unit": "postgresql.service"}, 0.07, 0.05, 11),
    ("sshd.service", {"unit": "sshd.service"}, 0.005, 0.0, 10),
)
# Uses a share of a CPU that rises and falls; its arguments are the share, its change, and the seconds of a period.
LOAD = """
import math, sys, time
share, change, period = map(float, sys.argv[1:])
while True:
    begin = time.monotonic()
    end = time.process_time() + (share + change * math.sin(begin * 2 * math.pi / period)) / 10
    while time.process_time() < end: pass
    time.sleep(max(0.1 - (time.monotonic() - begin), 0.0))
"""


@contextlib.contextmanager
def simulation(folder: Path) -> Iterator[dict[str, str]]:
    """Run the daemon on a simulated resctrl with the workloads; return the environment for its clients."""
    with contextlib.ExitStack() as started:

        def start(*words: str) -> subprocess.Popen[bytes]:
            process = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL)
            started.callback(process.wait, 60)
            started.callback(process.send_signal, signal.SIGTERM)
            return process

        socket = folder / "run" / "org.resctrlmon.Manager"
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "RESCTRLMOND_SOCKET": str(socket), "TZ": "UTC"}
        start(sys.executable, "-m", "resctrlmond", "--simulate", str(folder))
        wait_until_served(socket)
        with contextlib.closing(Client(str(socket))) as client:
            for key, attributes, *load in WORKLOADS:
                # The process waits for its input as a container waits for its runtime.
                held = start("sh", "-c", 'read go; exec "$@"', "sh", sys.executable, "-c", LOAD, *map(str, load))
                late = None if key == "sshd.service" else False
                request = AssignRequest(key=key, pid=held.pid, late=late, attributes=attributes, claim="oci-demo")
                client.call("org.resctrlmon.Manager.Assign", request)
                assert held.stdin
                held.stdin.write(b"go\n")
                held.stdin.close()
        yield environment


def ctl(*words: str) -> list[str]:
    """Return the command line of resctrlctl."""
    return [sys.executable, "-m", "resctrlctl", *words]


def screenshot(page: Path, image: Path) -> None:
    """Have Chromium draw a page."""
    subprocess.run(
        [
            *("chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"),
            *(f"--screenshot={image}", "--window-size=1024,870", f"file://{page}"),
        ],
        stderr=subprocess.DEVNULL,
        check=True,
    )


def main() -> None:
    """Take the pictures."""
    if not shutil.which("chromium"):
        sys.exit("pictures: chromium is missing. Install it: apt install chromium fonts-dejavu-core")
    IMAGES.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as name, simulation(Path(name)) as environment:
        recording, page = Path(name) / "use.jsonl", Path(name) / "use.html"
        # Not the name of the machine that the pictures are taken on.
        named = ["unshare", "--uts", "sh", "-c", 'hostname node-7 && exec "$@"', "sh"]
        subprocess.run(
            [*named, *ctl("record", "-q", "-o", str(recording), "-n", str(READINGS))], env=environment, check=True
        )
        for verb, ready in ((["list", "--rate", "--sort", "power"], "workloads."), (["top"], "Together:")):
            terminal = Terminal(ctl(*verb), environment, COLUMNS, ROWS)
            while ready not in terminal.text:
                time.sleep(0.1)
            time.sleep(1)
            alternative = f"A terminal with the output of resctrlctl {' '.join(verb)}:\n{terminal.text.rstrip()}"
            (IMAGES / f"{verb[0]}.svg").write_text(drawn(terminal.screen, alternative), encoding="utf-8")
            terminal.close()
        subprocess.run(ctl("plot", "-q", str(recording), "--html", str(page)), env=environment, check=True)
        screenshot(page, IMAGES / "plot.png")
    for image in sorted(IMAGES.iterdir()):
        print(f"{image.relative_to(ROOT)}: {image.stat().st_size} bytes")


if __name__ == "__main__":
    main()
