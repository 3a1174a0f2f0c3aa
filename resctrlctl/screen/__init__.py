# SPDX-License-Identifier: Apache-2.0
"""Blocks of text for a terminal, and JSON. It knows nothing of workloads."""
