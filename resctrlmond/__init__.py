# SPDX-License-Identifier: Apache-2.0
"""resctrlmond: the owner of Linux resctrl monitoring groups on a host."""

__version__ = "0.1.0"
