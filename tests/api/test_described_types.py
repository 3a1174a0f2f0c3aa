# SPDX-License-Identifier: Apache-2.0
"""Types that several threads decode are described before: msgspec crashes if two threads describe one at once."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import resctrlmond.nri

_HAS = """
import gc
def described(kind):  # the class refers to its description
    return any(type(one).__name__ == "StructInfo" for one in gc.get_referents(kind))
"""
_REPLIES = {
    name
    for path in Path(resctrlmond.nri.__path__[0]).glob("*.py")
    for name in re.findall(r"types\.(\w+Reply)", path.read_text())
}


def run(code: str) -> str:
    """Run code in a process that has decoded nothing."""
    return subprocess.run([sys.executable, "-c", _HAS + code], check=True, capture_output=True, text=True).stdout


def test_description_of_a_type_is_seen() -> None:
    code = "from resctrlmond.api import types\nfrom resctrlmond.api.varlink.messages import prepare\n"
    code += "before = described(types.Total)\nprepare(types.ReadReply)\nprint(before, described(types.Total))"
    assert run(code).split() == ["False", "True"]


def test_replies_to_the_nri_adapter_are_described_by_the_import() -> None:
    assert len(_REPLIES) >= 6
    code = "import resctrlmond.nri.exposure, resctrlmond.nri.updater\nfrom resctrlmond.api import types\n"
    names = ", ".join(f"{name!r}" for name in sorted(_REPLIES))
    assert run(f"{code}print([name for name in ({names}) if not described(getattr(types, name))])") == "[]\n"
