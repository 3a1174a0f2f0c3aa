# SPDX-License-Identifier: Apache-2.0
"""The behaviour of the kernel's resctrl, without files or processes."""
