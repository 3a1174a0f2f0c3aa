# SPDX-License-Identifier: Apache-2.0
"""Tests of the verb doctor of resctrlctl. They require root, because groups are recognized by their owner."""
