# SPDX-License-Identifier: Apache-2.0
"""Debian's node_exporter, which serves the files of a directory and nothing else but metrics of itself."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.exporter.conftest import reserved_port
from tests.wait import wait_until


def write_file(folder: Path, manager: str, log: Path, interval_s: float = 0.05) -> subprocess.Popen[bytes]:
    """Start an exporter that writes the file in a folder."""
    options = [
        "--textfile",
        str(folder),
        "--interval",
        str(interval_s),
        "--timeout",
        "60",
        "--manager-socket",
        manager,
    ]
    with log.open("ab") as output:
        return subprocess.Popen([sys.executable, "-m", "resctrlmond.exporter", *options], stderr=output, umask=0o077)


@dataclass(frozen=True, slots=True)
class NodeExporter:
    """A running node_exporter: its port at 127.0.0.1, and its log."""

    port: int
    log: Path


@contextlib.contextmanager
def node_exporter(top: Path, textfiles: Path) -> Iterator[NodeExporter]:
    """Run node_exporter with its textfile collector while the block runs."""
    with contextlib.ExitStack() as stack:
        found = NodeExporter(stack.enter_context(reserved_port("127.0.0.1")), top / "node_exporter.log")
        command = ["prometheus-node-exporter", "--collector.disable-defaults", "--collector.textfile"]
        command += [f"--collector.textfile.directory={textfiles}", f"--web.listen-address=127.0.0.1:{found.port}"]
        output = stack.enter_context(found.log.open("wb"))
        process = stack.enter_context(subprocess.Popen(command, stderr=output))
        stack.callback(process.terminate)
        wait_until(lambda: "Listening on" in found.log.read_text() or process.poll() is not None)
        assert process.poll() is None, found.log.read_text()
        yield found
