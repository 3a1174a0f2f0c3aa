# SPDX-License-Identifier: Apache-2.0
"""Totals from readings, and how good they are. It reads and writes nothing."""
