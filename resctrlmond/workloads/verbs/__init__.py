# SPDX-License-Identifier: Apache-2.0
"""The verbs, and the steps that they share: functions of a context that create, change, read and end workloads."""
