# SPDX-License-Identifier: Apache-2.0
"""Settings for all tests: neither a slow machine nor a shell's background is a failure."""

from __future__ import annotations

import os
import signal

from hypothesis import HealthCheck, settings

settings.register_profile("any machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("any machine")

# A shell has the commands of its background ignore these, and they hand that down to all that they start.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
# nohup(1) ignores this one, and resctrlctl then rightly does not forward it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)
# The developer's own bus and daemon are not the tests'.
# Nor are the options of the make that runs them a test's: --keep-going would make a failing make go on.
for name in ("DBUS_SESSION_BUS_ADDRESS", "RESCTRLMOND_SOCKET", "MAKEFLAGS", "MFLAGS", "MAKELEVEL"):
    os.environ.pop(name, None)
