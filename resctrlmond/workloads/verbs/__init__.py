# SPDX-License-Identifier: Apache-2.0
"""The verbs: functions of a context that create, change, read and end workloads."""
