# SPDX-License-Identifier: Apache-2.0
"""The pictures in README.md, which ``make pictures`` takes of resctrlctl on the simulator."""
