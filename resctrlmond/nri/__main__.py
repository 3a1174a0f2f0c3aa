# SPDX-License-Identifier: Apache-2.0
"""Start of the command resctrlmon-nri: load the rest, or name the library that is not installed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

# As for a wrong command line: the service is not restarted.
_EXIT = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the adapter until a signal stops it. Return the exit status."""
    try:
        # Not at the top: an installation with pip does not have the libraries of the extras.
        from resctrlmond.nri import command  # noqa: PLC0415
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "google":
            raise
        print(
            f"resctrlmon-nri: the protobuf library cannot be imported: {error}. Install the Debian package"
            " python3-protobuf, or run: pip install 'resctrlmond[nri]'",
            file=sys.stderr,
        )
        return _EXIT
    return command.main(arguments)


if __name__ == "__main__":
    sys.exit(main())
