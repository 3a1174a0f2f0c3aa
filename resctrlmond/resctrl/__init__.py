# SPDX-License-Identifier: Apache-2.0
"""The ground floor: the kernel's resctrl filesystem and /proc, synchronous and without policy."""
