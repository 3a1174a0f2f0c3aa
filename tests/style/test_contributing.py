# SPDX-License-Identifier: Apache-2.0
"""The files that CONTRIBUTING.md names exist."""

from __future__ import annotations

import re

from .english import ROOT

# Paths there begin at the top, or in one of these folders.
_FOLDERS = ("", "resctrlmond/", "resctrlmond/workloads/")


def test_named_files_and_folders_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+/[\w./-]*)`", text))
    assert len(named) > 60
    assert sorted(path for path in named if not any((ROOT / folder / path).exists() for folder in _FOLDERS)) == []
