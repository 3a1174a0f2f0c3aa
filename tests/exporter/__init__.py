# SPDX-License-Identifier: Apache-2.0
"""Tests of the exporter: its figures, HTTP, and a real Prometheus server."""
