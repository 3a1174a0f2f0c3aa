# SPDX-License-Identifier: Apache-2.0
"""The files under /run: records, snapshots, qualities and sums. It touches no group."""
