# SPDX-License-Identifier: Apache-2.0
"""Selectors: the short texts by which users name a workload, in place of its key."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from typing import TypeVar

from resctrlctl.base.errors import CommandError
from resctrlmond.api.exit_codes import FAILURE
from resctrlmond.api.types import Workload
from resctrlmond.resctrl.errors import printable

_T = TypeVar("_T")

# Ids of containers and pods are shown up to here, as runtimes do, and longer if that is not unique.
_ID_LENGTH = 12
_IDS = frozenset("0123456789abcdef-")
# How many workloads the error about an ambiguous selector lists.
_MAX_SHOWN = 5


def selectors_of(workloads: Sequence[Workload]) -> dict[str, str]:
    """Return, for each key, the text to show and to type: a name if it is unique, else the key or its beginning."""
    names = Counter(name for workload in workloads for name in _names(workload))
    keys = sorted(workload.key for workload in workloads)
    found = {}
    for workload in workloads:
        name, key = name_of(workload.attributes), workload.key
        is_unique = bool(name) and names[name] == 1 and not _is_in(name, keys)
        found[key] = name if is_unique else _short(key, keys, names)
    return found


def _names(workload: Workload) -> set[str]:
    """Return the names that select the workload."""
    return {name_of(workload.attributes), workload.attributes.get("container.name", "")} - {""}


def name_of(attributes: Mapping[str, str]) -> str:
    """Return the name by which people know the workload: namespace/pod, the unit or the container; "" for none."""
    pod, namespace = attributes.get("pod.name"), attributes.get("pod.namespace")
    if pod:
        return f"{namespace}/{pod}" if namespace else pod
    return attributes.get("unit") or attributes.get("container.name") or ""


def call_for(
    text: str,
    call: Callable[[str], _T],
    workloads: Callable[[], Iterable[Workload]],
    *,
    is_change: bool = True,
) -> _T:
    """Call with the key that the user typed or, if there is no such workload, with the key of the one it selects.

    ``workloads`` lists all workloads. ``is_change``: the call changes the workload, so the beginning of its key
    selects it only if the key is an id: the beginning of a name may be a typing error. Raises CommandError: that of
    ``call`` if nothing is selected, or a list of the workloads if several are.
    """
    try:
        return call(text)
    except CommandError as error:
        if error.name not in ("NoSuchWorkload", "InvalidKey") or not text:
            raise
        found = matching(text, workloads(), is_change=is_change)
        if not found:
            raise
        if len(found) > 1:
            keys = ", ".join(printable(workload.key) for workload in found[:_MAX_SHOWN])
            more = f" and {len(found) - _MAX_SHOWN} more" if len(found) > _MAX_SHOWN else ""
            raise CommandError(
                f"{text!r} selects {len(found)} workloads: {keys}{more}. Give more of the key", FAILURE
            ) from error
    return call(found[0].key)


def matching(text: str, workloads: Iterable[Workload], *, is_change: bool = True) -> list[Workload]:
    """Return the workloads that a text selects: by the key, a name, or the beginning of the key.

    Of several, those that have not ended. ``is_change`` is that of ``call_for``.
    """
    known = list(workloads)
    tests: tuple[Callable[[Workload], bool], ...] = (
        lambda workload: workload.key == text,
        lambda workload: text in _names(workload),
        lambda workload: (
            (_is_id(workload.key) and workload.key.startswith(text.lower()))
            or (not is_change and workload.key.startswith(text))
        ),
    )
    for test in tests:
        found = [workload for workload in known if test(workload)]
        if len(found) > 1:
            found = [workload for workload in found if not workload.state.is_over] or found
        if found:
            return found
    return []


def _is_id(key: str) -> bool:
    return len(key) > _ID_LENGTH and _IDS.issuperset(key)


def _is_in(text: str, ordered: Sequence[str]) -> bool:
    index = bisect_left(ordered, text)
    return index < len(ordered) and ordered[index] == text


def _short(key: str, ordered: Sequence[str], names: Container[str]) -> str:
    """Return the shortest beginning of an id that selects only it; any other key as it is."""
    if not _is_id(key):
        return key
    index = bisect_left(ordered, key)
    neighbors = [ordered[at] for at in (index - 1, index + 1) if 0 <= at < len(ordered)]
    for length in range(_ID_LENGTH, len(key)):
        short = key[:length]
        if short not in names and not any(other.startswith(short) for other in neighbors):
            return short
    return key
