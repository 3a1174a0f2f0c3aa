# SPDX-License-Identifier: Apache-2.0
"""``python -m tests.style [RANGE]``: check the subjects of the commits in a range of git, such as main..HEAD."""

from __future__ import annotations

import subprocess
import sys

from .english import ROOT, check_subject


def main() -> int:
    """Print the wrong subjects; return 1 if there are any."""
    commits = sys.argv[1] if len(sys.argv) > 1 else "main..HEAD"
    command = ["git", "-C", str(ROOT), "log", "--format=%s", "--no-merges", commits]
    subjects = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    wrong = [problem for problem in map(check_subject, subjects) if problem]
    print("\n".join(wrong), end="\n" if wrong else "")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
