# SPDX-License-Identifier: Apache-2.0
"""What a Linux kernel's resctrl does, rule by rule, shown on real kernels and on the simulator alike."""
