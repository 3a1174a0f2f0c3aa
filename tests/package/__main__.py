# SPDX-License-Identifier: Apache-2.0
"""make deb: the Debian packages of this tree, into a folder."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from tests.kernel.machine import MachineError

from .build import packages


def main() -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(prog="tests.package", description=__doc__)
    parser.add_argument("--output", type=Path, default=Path("build/deb"), help="default: build/deb")
    output: Path = parser.parse_args().output
    try:
        built = packages()
    except MachineError as error:
        print(f"packages: {error}", file=sys.stderr)
        return 1
    shutil.rmtree(output, ignore_errors=True)
    shutil.copytree(built, output)
    for file in sorted(output.iterdir()):
        print(file)
    return 0


sys.exit(main())
