# SPDX-License-Identifier: Apache-2.0
"""The event loop is woken for the events of inotify, but not for those of the daemon's own changes."""

from __future__ import annotations

import contextlib
import select
from pathlib import Path

from resctrlmond.resctrl.inotify import IN_CREATE, IN_MODIFY, Inotify, Readiness


def is_readable(readiness: Readiness) -> bool:
    poll = select.poll()
    poll.register(readiness.fd, select.POLLIN)
    return bool(poll.poll(0))


def test_events_in_an_unreported_block_are_reported_at_its_end_if_nobody_has_read_them(tmp_path: Path) -> None:
    """Each write of the daemon woke the event loop, which competed with the thread that wrote."""
    file = tmp_path / "tasks"
    file.write_text("")
    with (
        contextlib.closing(Inotify()) as inotify,
        contextlib.closing(Readiness(inotify.fd)) as readiness,
    ):
        inotify.add(str(tmp_path), IN_MODIFY)
        with readiness.unreported():
            file.write_text("1")
            assert not is_readable(readiness)
            assert inotify.read()
        assert not is_readable(readiness)
        with readiness.unreported():
            file.write_text("2")
            # The block of another thread ends later.
            with readiness.unreported():
                pass
            assert not is_readable(readiness)
        assert is_readable(readiness)
        assert inotify.read()
        assert not is_readable(readiness)
        file.write_text("3")
        assert is_readable(readiness)


def test_descriptor_can_be_closed_in_and_before_an_unreported_block() -> None:
    with contextlib.closing(Inotify()) as inotify:
        readiness = Readiness(inotify.fd)
        with readiness.unreported():
            readiness.close()
        with readiness.unreported():
            pass


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
