# SPDX-License-Identifier: Apache-2.0
"""Lists of workloads and pods: in one reply of limited length, or in pages without a limit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import msgspec

from resctrlmond.api import types
from resctrlmond.workloads.model.errors import LimitExceeded

# As JSON, for some thousand pods. The D-Bus libraries encode a reply in the event loop, which must not block for
# long.
MAX_LIST_BYTES = 2 * 1024 * 1024
PAGE_BYTES = 256 * 1024
# The most bytes of a reply that names the next one.
REPLY_BYTES = 512 * 1024
# A page with the largest record, and the page before, which is sent when the next one exists.
MAX_PAGES_BYTES = 4 * 1024 * 1024

_T = TypeVar("_T", bound=types.Reply)
_R = TypeVar("_R", bound=types.Reply)


def bounded(items: Iterable[_T]) -> list[_T]:
    """Return all items if they fit into one reply. Raises LimitExceeded."""
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


def first_page(items: Iterable[_T], size: int) -> tuple[list[_T], bool]:
    """Return the first items, of at most ``size`` bytes together but at least one, and whether more follow."""
    found: list[_T] = []
    for item in items:
        size -= len(msgspec.json.encode(item))
        if found and size < 0:
            return found, True
        found.append(item)
    return found, False


def pages(items: Iterable[_T], reply: Callable[[list[_T], bool], _R]) -> Iterator[_R]:
    """Yield replies with at most 256 KiB of items each, or with one larger item; at least one reply.

    ``reply`` builds a reply from its items and from whether it is the first one.
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
