# SPDX-License-Identifier: Apache-2.0
"""Hostile bytes for whatever the daemon decodes: records, checkpoints, OCI states, D-Bus messages, varlink calls."""
