# SPDX-License-Identifier: Apache-2.0
"""The daemon with a time of day that a test can set: the machine's own belongs to everybody who runs on it.

``$STEPPED_CLOCK`` is a file with the seconds that it is ahead. The product takes the time of day from one module.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

from resctrlmond.groups import times

_AHEAD = Path(os.environ["STEPPED_CLOCK"])


class _Stepped(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Stepped:
        return super().now(tz) + datetime.timedelta(seconds=float(_AHEAD.read_text()))


if __name__ == "__main__":
    times.datetime = _Stepped  # type: ignore[misc]
    from resctrlmond.__main__ import main

    sys.exit(main())
