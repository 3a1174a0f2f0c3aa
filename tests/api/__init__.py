# SPDX-License-Identifier: Apache-2.0
"""Tests of the interfaces: varlink and D-Bus."""
