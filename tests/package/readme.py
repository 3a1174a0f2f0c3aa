# SPDX-License-Identifier: Apache-2.0
"""The commands of README.md, word for word."""

from __future__ import annotations

import re

from .source import PROJECT


def commands(heading: str) -> str:
    """The indented lines of a section, as one shell script."""
    text = (PROJECT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)^## ", text, re.DOTALL | re.MULTILINE)
    assert found, f"README.md has no section {heading!r}"
    lines = [line.removeprefix("    ") for line in found[1].splitlines() if line.startswith("    ") or not line]
    return "\n".join(lines).strip() + "\n"
