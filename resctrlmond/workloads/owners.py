# SPDX-License-Identifier: Apache-2.0
"""The owners of claims that are parts of this daemon. No client can claim a workload under these names."""

from __future__ import annotations

# The OCI hook, the claim on a group whose record was lost, and the watch of systemd's units.
OCI = "oci"
RECOVERED = "recovered"
SYSTEMD = "systemd"
RESERVED_OWNERS = frozenset({OCI, RECOVERED, SYSTEMD})
