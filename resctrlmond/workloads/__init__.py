# SPDX-License-Identifier: Apache-2.0
"""Workloads: the ownership, the lifetime and the totals of monitoring groups, on top of ``resctrlmond.resctrl``."""
