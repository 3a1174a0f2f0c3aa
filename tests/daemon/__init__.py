# SPDX-License-Identifier: Apache-2.0
"""Tests of the daemon: its configuration, messages to the service manager, and its process from start to stop."""
