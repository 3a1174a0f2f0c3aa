# SPDX-License-Identifier: Apache-2.0
"""The verbs about systemd units."""
