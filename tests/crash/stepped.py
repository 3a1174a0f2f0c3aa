# SPDX-License-Identifier: Apache-2.0
"""The daemon with a system time that a test can set: the machine's own time belongs to all of its users.

``$STEPPED_CLOCK`` is a file with the offset in seconds. The product takes the system time from one module.
"""

from __future__ import annotations

import datetime
import os
import sys
from pathlib import Path

from resctrlmond.workloads.model import clock

_AHEAD = Path(os.environ["STEPPED_CLOCK"])


class _Stepped(datetime.datetime):
    @classmethod
    def now(cls, tz: datetime.tzinfo | None = None) -> _Stepped:
        return super().now(tz) + datetime.timedelta(seconds=float(_AHEAD.read_text()))


if __name__ == "__main__":
    vars(clock)["datetime"] = _Stepped
    from resctrlmond.__main__ import main

    sys.exit(main())
