# SPDX-License-Identifier: Apache-2.0
"""The queue for RMIDs, and how units and bandwidth counters share them. It changes groups with the rooms below."""
