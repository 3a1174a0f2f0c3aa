# SPDX-License-Identifier: Apache-2.0
"""The words of the project: workloads, members, claims, states, keys and errors. It does nothing."""
