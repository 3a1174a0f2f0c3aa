# SPDX-License-Identifier: Apache-2.0
"""The end of ownership on this machine: every workload is ended and no group with our mark is left."""

from __future__ import annotations

from resctrlmond.groups.lifecycle import replace
from resctrlmond.groups.manager import Manager
from resctrlmond.resctrl.errors import ResctrlError

REASON = "resctrlmond released all its groups"


def release_all(manager: Manager) -> list[str]:
    """End every workload, with its last values written, and remove every group that bears our mark.

    Tasks lose their group and run on; foreign groups are not touched. No daemon may be running. Returns what could
    not be done, [] if nothing of ours stands any more. Raises NotMounted.
    """
    # As a start does, so that what a crash cut short, or has no record, ends as what it is.
    manager.recover()
    problems = []
    for record in manager.records():
        try:
            with manager.book.writing(record.key):
                ended = record if record.state.is_over else manager.life.finish(record, REASON)
                if ended.is_interrupted:
                    manager.book.put(replace(ended, claims=()))  # or a later start would begin it anew
        except (ResctrlError, OSError) as error:
            problems.append(f"{record.key}: {error}")
    # What no record speaks of even now: groups whose names are no keys.
    for found in manager.tree.scan():
        if found.gid != manager.life.mark.gid:
            continue
        try:
            manager.tree.remove(found.ref)
        except (ResctrlError, OSError) as error:
            problems.append(f"{found.path}: {error}")
    return problems
