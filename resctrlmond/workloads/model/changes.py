# SPDX-License-Identifier: Apache-2.0
"""Kinds of changes, and states of containers. Clients import this module, so it imports little."""

from __future__ import annotations

import enum


class ChangeKind(enum.StrEnum):
    """The kind of a change of a workload."""

    PRESENT = "present"
    """It existed when the call began."""
    ADDED = "added"
    """It is new, or its key is used for a new run."""
    PENDING = "pending"
    """It waits for an RMID, as a new workload or again."""
    CHANGED = "changed"
    """A field of it changed."""
    ENDED = "ended"
    """The run ended. Its totals are final."""
    LOST = "lost"
    """Its group was removed by another program or with the mount, and an owner still claims it: it may continue."""
    REMOVED = "removed"
    """It is no longer listed: _snapshot_ttl_ has passed since its end, the files of ended runs took too much memory,
    or its start failed, so that no run ended.
    """


class ContainerState(enum.StrEnum):
    """The state of a container, in the words of CRI and NRI."""

    CREATED = "created"
    """The container does not execute its program yet."""
    RUNNING = "running"
    """The container executes its program."""
    PAUSED = "paused"
    """The container runtime has paused the container."""
    STOPPED = "stopped"
    """The container has ended."""
    UNKNOWN = "unknown"
    """The container runtime does not know the state."""
