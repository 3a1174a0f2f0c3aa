# SPDX-License-Identifier: Apache-2.0
"""When a lost run is begun anew."""

from __future__ import annotations

from resctrlmond.workloads.model.workload import Workload

# A lost run is begun anew after this time, doubled with each loss in a row, up to the longest one. A run that
# lasted longer than STEADY_S ends the row.
RESUME_S = 0.5
MAX_RESUME_S = 300.0
STEADY_S = 600.0


def resumes_after_s(losses: int) -> float:
    """Return the seconds between the loss of a run and the next run, after that many ``losses`` in a row.

    The time doubles with each loss, because another program may remove the groups over and over.
    """
    return min(RESUME_S * 2.0 ** min(losses, 16), MAX_RESUME_S)


def losses_in_a_row(workload: Workload) -> int:
    """Return the number of runs in a row that were lost; the run of ``workload`` is the last of them."""
    first, prior_runs = workload.first, workload.prior_runs
    if prior_runs is None or first.completed_ns - first.created_ns > STEADY_S * 1e9:
        return 1
    return prior_runs.losses + 1
