# SPDX-License-Identifier: Apache-2.0
"""python -m tests.interfaces: write the descriptions of the interfaces ("make interfaces"); --check only compares."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from resctrlmond.api.verbs import INTERFACES
from tests.interfaces import completions, dbus, pages, varlink

ROOT = Path(__file__).parents[2]
_API = "resctrlmond/api"
_COMPLETIONS = "resctrlctl/completions"
_PAGE = "man/org.resctrlmon.Manager.5.scd"
_BUS_PAGE = "man/org.resctrlmon1.5.scd"
_OVERVIEW = "man/resctrlmond.7.scd"


def generated() -> dict[str, str]:
    """The text of each generated file, by its path in the source tree."""
    return {
        **{f"{_API}/{name}.varlink": varlink.interface(name) for name in INTERFACES},
        f"{_API}/org.resctrlmon1.xml": dbus.introspection(),
        _PAGE: pages.with_blocks(_text(_PAGE), pages.blocks()),
        _BUS_PAGE: pages.with_blocks(_text(_BUS_PAGE), pages.bus_blocks()),
        f"{_COMPLETIONS}/_resctrlctl": completions.zsh(),
        f"{_COMPLETIONS}/resctrlctl.fish": completions.fish(),
        _OVERVIEW: pages.with_blocks(_text(_OVERVIEW), pages.reason_blocks()),
    }


def outdated() -> list[str]:
    """The generated files that are not as the declaration wants them."""
    return [path for path, text in generated().items() if _text(path) != text]


def _text(path: str) -> str:
    file = ROOT / path
    return file.read_text(encoding="utf-8") if file.exists() else ""


def _write(files: dict[str, str]) -> None:
    """Write the files that differ, and print their paths."""
    for path, text in files.items():
        if _text(path) != text:
            print(path)
            (ROOT / path).write_text(text, encoding="utf-8")


def main() -> int:
    """Write the files, or compare them."""
    parser = argparse.ArgumentParser(prog="python -m tests.interfaces", description=__doc__)
    parser.add_argument("--check", action="store_true", help="name the files that are out of date, and write nothing")
    is_check = parser.parse_args().check
    old = outdated()
    for path in old:
        if is_check:
            print(f"{path} is out of date: run 'make interfaces'")
    if not is_check:
        _write(generated())
    return 1 if is_check and old else 0


if __name__ == "__main__":
    sys.exit(main())
