# SPDX-License-Identifier: Apache-2.0
"""The few things about groups that an administrator may set, and that a reload may change."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settings:
    """Times in seconds. ``group_prefix`` begins the directory names of keys that are no pod UIDs.

    ``snapshot_ttl_s``: how long an ended run stays. ``linger_s``: how long a container's group waits after its last
    member. ``pod_linger_s``: the same for a pod that has no control group of its own to tell its end.
    ``checkpoint_interval_s``: how often the values of groups that stand are kept, 0 for never.
    """

    group_prefix: str = ""
    snapshot_ttl_s: float = 300.0
    linger_s: float = 0.0
    pod_linger_s: float = 300.0
    checkpoint_interval_s: float = 60.0
