# SPDX-License-Identifier: Apache-2.0
"""Settings of workloads and groups. A reload of the daemon's configuration can change them."""

from __future__ import annotations

import msgspec


class Settings(msgspec.Struct, frozen=True):
    """The settings. All times are in seconds.

    ``group_prefix``: the beginning of a group's directory name, unless the workload's key is a pod UID.
    ``snapshot_ttl_s``: the time for which the files of an ended run are kept. ``linger_s``: the time for which a
    container's group is kept after the last member of its workload ended. ``pod_linger_s``: the same for a pod whose
    control group is not known, so that its end cannot be seen. ``checkpoint_interval_s``: the time between two
    checkpoints of a group, 0 for none. ``hook_queue_timeout_s``: the maximum duration of a hook whose call is queued.
    ``expose_interval_s``: how often the files of exposed workloads are written for their containers.
    ``reserve``: the number of free RMIDs that workloads of a priority below 0, such as units, leave to others.
    ``overflow``: the number of groups that units without an RMID of their own may share; 0 for none.
    """

    group_prefix: str = ""
    snapshot_ttl_s: float = 300.0
    linger_s: float = 0.0
    pod_linger_s: float = 300.0
    checkpoint_interval_s: float = 60.0
    hook_queue_timeout_s: float = 30.0
    expose_interval_s: float = 10.0
    reserve: int = 16
    overflow: int = 4
