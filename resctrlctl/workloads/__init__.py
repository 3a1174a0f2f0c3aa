# SPDX-License-Identifier: Apache-2.0
"""The verbs about workloads, groups and classes, and their tables."""
