# SPDX-License-Identifier: Apache-2.0
"""``make check`` runs each test once, with at most two guests at a time."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
KERNEL = "tests/kernel/test_"
LAST = f"{KERNEL}units.py"
# Writes its last argument, the name of a test. The first test of the first guest waits for the other guest.
PROGRAM = """\
#!/bin/sh
for last; do :; done
echo "begin $last" >>"$LOG"
if test "$last" = tests/kernel/test_conformance.py && test "$OTHER"; then
  i=0
  until grep -q "begin $OTHER" "$LOG"; do
    i=$((i+1))
    test $i -lt 1500 || exit 1
    sleep 0.02
  done
fi
echo "end $last" >>"$LOG"
test "$last" != "$FAILS"
"""


def check(place: Path, target: str, fails: str = "none", other: str = "") -> tuple[int, list[str]]:
    """Run make with PROGRAM in the place of all programs. Return its status, and what they wrote.

    ``other``: the test that a second guest runs first, "" if there is one guest.
    """
    for name in ("python", "ruff", "mypy"):
        (place / name).write_text(PROGRAM)
        (place / name).chmod(0o755)
    (place / ".ready").touch()
    log = place / "log"
    command = ["make", f"VENV={place}", f"BIN={place}", target]
    environment = os.environ | {"LOG": str(log), "FAILS": fails, "OTHER": other}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    return done.returncode, log.read_text().splitlines()


def begun(lines: Iterable[str]) -> list[str]:
    return sorted(line.split()[1] for line in lines if line.startswith("begin tests/"))


def guests(lines: Iterable[str]) -> list[int]:
    """Return how many tests of the kernel ran after each line."""
    count, counts = 0, []
    for line in lines:
        if KERNEL in line:
            count += 1 if line.startswith("begin ") else -1
            counts.append(count)
    return counts


def expected() -> list[str]:
    folders = {f"tests/{path.parent.name}" for path in ROOT.glob("tests/*/__init__.py")}
    files = [*ROOT.glob("tests/test_*.py"), *ROOT.glob("tests/kernel/test_*.py")]
    # It runs beside the rest of its folder.
    apart = {"tests/exporter/test_churn.py"}
    tests = folders - {"tests/kernel", "tests/package"} | {str(path.relative_to(ROOT)) for path in files} | apart
    return sorted(name for name in tests if not name.startswith(f"{KERNEL}package"))


def test_each_test_runs_once_and_a_second_guest_runs_after_the_fast_tests(tmp_path: Path) -> None:
    for _ in range(2):  # The second run does not depend on what the first one left.
        (tmp_path / "log").unlink(missing_ok=True)
        status, lines = check(tmp_path, "check", other=LAST)
        assert status == 0
        assert begun(lines) == expected()
        last_fast = max(number for number, line in enumerate(lines) if "end tests/" in line and KERNEL not in line)
        # On a slow machine, none may have begun by then.
        assert max(guests(lines[:last_fast]), default=0) <= 1
        assert max(guests(lines)) == 2


def test_check_fails_and_runs_all_tests_if_one_of_them_fails(tmp_path: Path) -> None:
    for fails in (f"{KERNEL}conformance.py", LAST, "tests/style"):
        (tmp_path / "log").unlink(missing_ok=True)
        status, lines = check(tmp_path, "check", fails, LAST)
        assert (status != 0, begun(lines)) == (True, expected()), fails


def test_check_kernel_runs_one_guest_at_a_time(tmp_path: Path) -> None:
    status, lines = check(tmp_path, "check-kernel")
    assert (status, max(guests(lines))) == (0, 1)
    assert begun(lines) == [name for name in expected() if name.startswith(KERNEL)]
