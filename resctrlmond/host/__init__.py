# SPDX-License-Identifier: Apache-2.0
"""Systemd units, the program before their commands, and other owners of monitoring groups on the host."""
