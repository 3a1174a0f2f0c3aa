# SPDX-License-Identifier: Apache-2.0
"""The verb run: a command as a workload."""
