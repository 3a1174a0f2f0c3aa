# SPDX-License-Identifier: Apache-2.0
"""The file with the changes of units' memory settings: it is written before each change, and has what was before."""

from __future__ import annotations

import contextlib
import os

import msgspec

from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.workloads.profiles.unit_memory import Changes
from resctrlmond.workloads.records.atomic_files import read_file, write_file, writing

NAME = "unit-memory.json"
_MODE = 0o600


class UnitMemoryFile:
    """The file in the folder of the daemon. It exists only while a unit is changed."""

    def __init__(self, runtime_dir: str) -> None:
        self.path = f"{runtime_dir}/{NAME}"

    @property
    def exists(self) -> bool:
        """Whether a unit is, or may be, changed."""
        return os.path.lexists(self.path)

    def read(self) -> dict[str, Changes]:
        """Return the changes by unit. Raises ResctrlError."""
        try:
            return msgspec.json.decode(read_file(self.path), type=dict[str, Changes])
        except FileNotFoundError:
            return {}
        except (OSError, msgspec.DecodeError) as error:
            raise ResctrlError(
                f"cannot read which units have changed memory settings: {error}",
                path=self.path,
                remedy="Remove it, and check the units: systemctl show -p MemoryHigh -p MemorySwapMax UNIT",
            ) from error

    def write(self, changes: dict[str, Changes]) -> None:
        """Replace the file in one step; without changes, remove it. Raises NotWritten."""
        with writing(self.path):
            if changes:
                write_file(self.path, msgspec.json.encode(changes), _MODE)
            else:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(self.path)
