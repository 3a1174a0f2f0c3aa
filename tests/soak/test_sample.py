# SPDX-License-Identifier: Apache-2.0
"""A sample of make soak: no hook fails while the daemon runs, and no group and no active workload is left."""

from __future__ import annotations

from tests.soak.__main__ import soak


def test_containers_of_some_seconds_leave_nothing() -> None:
    wrong = soak(0.2, kill_every_s=2.0, sample_every_s=1.0)
    # A run of seconds does not show what grows.
    assert [text for text in wrong if " grew " not in text and " took " not in text] == []
