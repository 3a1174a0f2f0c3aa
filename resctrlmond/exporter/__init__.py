# SPDX-License-Identifier: Apache-2.0
"""The exporter: figures of resctrlmond for Prometheus, by a process that only reads."""
