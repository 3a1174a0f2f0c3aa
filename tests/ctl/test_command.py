# SPDX-License-Identifier: Apache-2.0
"""The exit of resctrlctl after Ctrl-C, and if its output cannot be written."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ctl.conftest import command
from tests.ctl.fake_manager import FakeManager


def test_interrupt_during_imports_prints_no_traceback(environment: dict[str, str], tmp_path: Path) -> None:
    path = str(tmp_path / "silent")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()  # accepts no connection
        arguments = [sys.executable, "-X", "importtime", "-m", "resctrlctl", "--socket", path, "status"]
        with subprocess.Popen(arguments, env=environment, stderr=subprocess.PIPE, text=True) as process:
            assert process.stderr is not None
            while not process.stderr.readline().endswith(" argparse\n"):
                assert process.poll() is None
            process.send_signal(signal.SIGINT)
            rest = process.stderr.read()
    assert process.returncode == -signal.SIGINT
    assert "Traceback" not in rest


def test_interrupt_that_the_shell_ignores_stays_ignored(manager: FakeManager, environment: dict[str, str]) -> None:
    words = command(manager.socket, "run", "-q", "--", "sh", "-c", "kill -INT $$; kill -INT $PPID; exit 3")
    done = subprocess.run(["sh", "-c", 'trap "" INT; exec "$@"', "sh", *words], env=environment, check=False)
    assert done.returncode == 3


@pytest.mark.parametrize(
    "arguments", [["list"], ["status"], ["show", "web"], ["--help"], ["list", "--json"]], ids=" ".join
)
@pytest.mark.parametrize(
    ("redirection", "reason"),
    [(">&-", "Bad file descriptor"), (">/dev/full", "No space left on device")],
    ids=["closed", "full"],
)
def test_failed_write_of_the_output_prints_one_line_and_exits_with_1(
    manager: FakeManager, environment: dict[str, str], arguments: list[str], redirection: str, reason: str
) -> None:
    manager.add("web")
    words = command(manager.socket, *arguments)
    done = subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *words],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (1, f"resctrlctl: cannot write the output: {reason}\n")


def test_exit_status_does_not_depend_on_standard_error(manager: FakeManager, environment: dict[str, str]) -> None:
    for arguments, status in ((["show", "missing"], 4), (["bogus"], 2), (["run", "--", "sh", "-c", "exit 6"], 6)):
        words = command(manager.socket, *arguments)
        for closed in ("2>&-", ">&- 2>&-"):
            done = subprocess.run(
                ["sh", "-c", f'exec "$@" {closed}', "sh", *words], env=environment, capture_output=True, check=False
            )
            assert (done.returncode, done.stdout, done.stderr) == (status, b"", b"")


def test_run_keeps_a_closed_output_closed_for_the_command(manager: FakeManager, environment: dict[str, str]) -> None:
    words = command(manager.socket, "run", "-q", "--", "sh", "-c", "test ! -e /proc/self/fd/1")
    done = subprocess.run(["sh", "-c", 'exec "$@" >&-', "sh", *words], env=environment, check=False)
    assert done.returncode == 0
