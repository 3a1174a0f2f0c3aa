# SPDX-License-Identifier: Apache-2.0
"""Tests of the daemon: its configuration, what it tells the service manager, and its life as a process."""
