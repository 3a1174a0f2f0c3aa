# SPDX-License-Identifier: Apache-2.0
"""The second floor: the doors, which translate and decide nothing."""
