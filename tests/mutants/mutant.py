# SPDX-License-Identifier: Apache-2.0
"""One planted bug, and how it is put into a copy of the source tree."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from pathlib import Path


class NotApplicable(Exception):
    """The code that a mutant changes is not at the place in the table."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """Replace ``old``, which occurs exactly once in ``file``, by ``new``.

    ``tests`` are the folders or files, separated by spaces, whose fast tests must fail then, the likeliest first.
    ``survives`` is the reason why no test notices the bug, "" if one must.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str
    survives: str = ""
    # The tests of one mutant take a minute or two; a bug that makes one of them wait for ever is detected too.
    timeout_s: float = 900

    @property
    def runs(self) -> list[list[str]]:
        """One after the other: pytest would run a file that is named first in the order of its folder."""
        return [[tests] for tests in self.tests.split()]

    def applied(self, top: Path) -> str:
        """Return the text of the file with the bug in it. Raises NotApplicable."""
        path = top / self.file
        if not path.is_file():
            raise NotApplicable(f"{self.name}: {self.file} does not exist; change the row to where the code is now")
        text = path.read_text()
        number = text.count(self.old)
        if number != 1:
            raise NotApplicable(
                f"{self.name}: the text occurs {number} times in {self.file}, not once; change the row to what the "
                f"code is now:\n{self.old}"
            )
        mutated = text.replace(self.old, self.new)
        try:
            ast.parse(mutated)
        except SyntaxError as error:
            raise NotApplicable(f"{self.name}: {self.file} is not valid Python with the new text: {error}") from error
        return mutated
