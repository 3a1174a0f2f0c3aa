# SPDX-License-Identifier: Apache-2.0
"""Random sequences of operations, done on a real kernel and on the simulator; what both show must be the same."""
