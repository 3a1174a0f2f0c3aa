# SPDX-License-Identifier: Apache-2.0
"""Speed and memory, always as ratios to the barest thing that does the same work in the same place."""
