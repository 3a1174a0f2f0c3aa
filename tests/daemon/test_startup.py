# SPDX-License-Identifier: Apache-2.0
"""Why the daemon does not start: each reason has an exit code of its own, and keeps its words."""

from __future__ import annotations

import pytest

from resctrlmond.config import ConfigError
from resctrlmond.resctrl.errors import (
    KernelRefused,
    MonitoringUnavailable,
    NotMounted,
    PermissionDenied,
    ResctrlError,
)
from resctrlmond.startup import startup_error


@pytest.mark.parametrize(
    ("kind", "code"),
    [(ConfigError, 78), (NotMounted, 69), (MonitoringUnavailable, 71), (PermissionDenied, 77), (KernelRefused, 1)],
)
def test_each_reason_not_to_start_has_its_exit_code(kind: type[ResctrlError], code: int) -> None:
    cause = kind("offers nothing", path="/sys/fs/resctrl/info", errno=13, remedy="Look at the kernel's command line")
    failed = startup_error(cause)
    assert failed.exit == code
    assert str(failed) == str(cause)
    assert startup_error(failed) is failed
