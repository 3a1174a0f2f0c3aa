# SPDX-License-Identifier: Apache-2.0
"""Hostile bytes for all decoders of the daemon: records, checkpoints, OCI states, D-Bus messages, varlink calls."""
