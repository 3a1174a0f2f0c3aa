# SPDX-License-Identifier: Apache-2.0
"""Lists of groups and pods: whole in one reply while they are short, in pages however long they are."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from resctrlmond.api import types
from resctrlmond.workloads.errors import LimitExceeded

# As JSON: some thousand pods. The D-Bus libraries encode a reply in the event loop, which must not stop for long.
MAX_LIST_BYTES = 2 * 1024 * 1024
PAGE_BYTES = 256 * 1024
# A page that the largest record fills, and the one that is held back until it is known whether it is the last.
MAX_PAGES_BYTES = 4 * 1024 * 1024

_T = TypeVar("_T", bound=types.Reply)
_R = TypeVar("_R", bound=types.Reply)


def bounded(items: Iterable[_T]) -> list[_T]:
    """All items, if they fit one reply. Raises LimitExceeded."""
    found: list[_T] = []
    size = 0
    for item in items:
        size += len(msgspec.json.encode(item))
        if size > MAX_LIST_BYTES:
            raise LimitExceeded(
                f"the list takes more than {MAX_LIST_BYTES} bytes, which is more than one reply may take",
                remedy="Call List with 'more' over varlink, as resctrlctl does, or Get for one workload",
            )
        found.append(item)
    return found


def pages(items: Iterable[_T], reply: Callable[[list[_T], bool], _R]) -> Iterator[_R]:
    """Replies with at most 256 KiB of items each, or with one larger item.

    ``reply`` makes one, and learns whether it is the first. There is one at least.
    """
    page: list[_T] = []
    size = 0
    is_first = True
    for item in items:
        item_size = len(msgspec.json.encode(item))
        if page and size + item_size > PAGE_BYTES:
            yield reply(page, is_first)
            page, size, is_first = [], 0, False
        page.append(item)
        size += item_size
    if page or is_first:
        yield reply(page, is_first)
