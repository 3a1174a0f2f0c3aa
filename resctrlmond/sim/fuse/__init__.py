# SPDX-License-Identifier: Apache-2.0
"""The simulated filesystem as a FUSE mount."""
