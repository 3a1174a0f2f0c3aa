# SPDX-License-Identifier: Apache-2.0
"""Select the pods to monitor by namespace and by labels, as Kubernetes does, and the annotations to keep. No I/O."""

from __future__ import annotations

from dataclasses import dataclass

from resctrlmond.nri.messages import Pod
from resctrlmond.workloads.profiles.label_selector import Requirement


@dataclass(frozen=True, slots=True)
class Selection:
    """Selects the pods in these namespaces (all if empty) whose labels match all requirements.

    Annotations with these names become attributes.
    """

    namespaces: frozenset[str] = frozenset()
    requirements: tuple[Requirement, ...] = ()
    annotations: frozenset[str] = frozenset()

    def why_not(self, pod: Pod) -> str:
        """Return the reason why the pod is not selected; "" if it is selected."""
        if self.namespaces and pod.namespace not in self.namespaces:
            return "not selected: its namespace is not among the configured ones"
        for requirement in self.requirements:
            if not requirement.holds(pod.labels):
                return f"not selected: its labels do not meet '{requirement}'"
        return ""
