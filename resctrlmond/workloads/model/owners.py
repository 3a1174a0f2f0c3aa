# SPDX-License-Identifier: Apache-2.0
"""The owners of claims that are parts of this daemon. No client can claim a workload under these names."""

from __future__ import annotations

# The OCI hook, the claim on a group whose record was lost, the watch of systemd's units, and the groups that units
# without an RMID of their own share.
OCI = "oci"
RECOVERED = "recovered"
SYSTEMD = "systemd"
OVERFLOW = "overflow"
RESERVED_OWNERS = frozenset({OCI, RECOVERED, SYSTEMD, OVERFLOW})
# Those of workloads that count the tasks of units.
OF_UNITS = frozenset({SYSTEMD, OVERFLOW})
