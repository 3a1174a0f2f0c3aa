# SPDX-License-Identifier: Apache-2.0
"""The rules of a Linux kernel's resctrl, each tested on real kernels and on the simulator."""
