# SPDX-License-Identifier: Apache-2.0
"""The third layer: the interfaces over varlink and D-Bus. They translate calls and decide nothing."""
