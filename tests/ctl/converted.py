# SPDX-License-Identifier: Apache-2.0
"""Convert replies between the declaration of the interface, which servers use, and the classes of resctrlctl."""

from __future__ import annotations

from typing import Any

import msgspec

from resctrlctl.base.structs import Struct, from_json, to_json
from resctrlctl.connection import host_replies, replies
from resctrlmond.api import types


def received(reply: msgspec.Struct) -> Any:
    """Return a reply as resctrlctl receives it."""
    name = type(reply).__name__
    kind = getattr(replies, name, None) or getattr(host_replies, name)
    return kind.from_json(from_json(msgspec.json.encode(reply)))


def sent(reply: Struct) -> Any:
    """Return a reply of resctrlctl as the daemon sends it."""
    return msgspec.json.decode(to_json(reply), type=getattr(types, type(reply).__name__))
