# SPDX-License-Identifier: Apache-2.0
"""Tests of the ground floor, the same on the simulator and on the real kernel."""
