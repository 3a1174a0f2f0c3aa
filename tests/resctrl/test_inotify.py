# SPDX-License-Identifier: Apache-2.0
"""Reading the events of inotify."""

from __future__ import annotations

import contextlib
from pathlib import Path

from resctrlmond.resctrl.inotify import IN_CREATE, Inotify


def test_a_read_that_returned_all_events_is_known_to_be_the_last(tmp_path: Path) -> None:
    """Each reading of the events was followed by one more system call, which returned none."""
    names = [f"{number:0250}" for number in range(600)]
    with contextlib.closing(Inotify()) as inotify:
        inotify.add(str(tmp_path), IN_CREATE)
        for name in names:
            (tmp_path / name).touch()
        found: list[str] = []
        for _ in names:
            found += [event.name for event in inotify.read()]
            if inotify.is_drained:
                break
            # The buffer does not have room for all of them.
            assert len(found) < len(names)
        assert found == names
        assert inotify.read() == []
        assert inotify.is_drained
