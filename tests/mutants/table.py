# SPDX-License-Identifier: Apache-2.0
"""The table of planted bugs, of the kind that a refactoring makes. ``make mutants`` runs them.

A new row: a bug that the code does not have, in the smallest text that occurs once in its file, and the tests that
must notice it. A row whose text is not found any more is an error: move the bug to where the code is now.
"""

from __future__ import annotations

from tests.mutants.mutant import Mutant

_GROUPS = "resctrlmond/groups/"

MUTANTS = (
    Mutant(
        "ENDING is noted after the further groups end",
        _GROUPS + "lifecycle.py",
        """\
        if record.state is not State.ENDING:
            record = self.book.put(replace(record, state=State.ENDING, reason=reason))
        # The first one last: its seal says that all ends of the workload are written.
        record = self._further_finished(record, reason)
""",
        """\
        record = self._further_finished(record, reason)
        if record.state is not State.ENDING:
            record = self.book.put(replace(record, state=State.ENDING, reason=reason))
""",
        "tests/groups",
    ),
    Mutant(
        "completed_at is written before the links are gone",
        _GROUPS + "snapshot.py",
        """\
            for directory, _, names in os.walk(os.path.join(top, "mon_data"), onerror=_refused):
                for name in names:
                    # os.path.islink() would take an error for "not a link", and the link would stay for ever.
                    if _is_link(os.path.join(directory, name)):
                        os.unlink(os.path.join(directory, name))
            self._make_folder(top)
            write_file(os.path.join(top, "completed_at"), completed_at.encode() + b"\\n")
""",
        """\
            self._make_folder(top)
            write_file(os.path.join(top, "completed_at"), completed_at.encode() + b"\\n")
            for directory, _, names in os.walk(os.path.join(top, "mon_data"), onerror=_refused):
                for name in names:
                    if _is_link(os.path.join(directory, name)):
                        os.unlink(os.path.join(directory, name))
""",
        "tests/groups/test_cut.py",
    ),
)
