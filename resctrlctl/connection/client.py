# SPDX-License-Identifier: Apache-2.0
"""The varlink client of resctrlctl, for the classes of ``resctrlctl.connection.replies``."""

from __future__ import annotations

from resctrlctl.base.structs import from_json, to_json
from resctrlctl.connection.base_client import Answer, BaseClient
from resctrlctl.connection.decoding import InvalidReply, Reply, decode_boolean, decode_object, decode_text, optional
from resctrlmond.api.varlink.frames import ProtocolError

TYPE_CHECKING = False  # importing typing takes longer than this module
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from typing import Any, ClassVar

    from resctrlctl.base.structs import Struct


class _Message(Reply):
    error: str | None = None
    parameters: dict[str, object] | None = None
    continues: bool | None = None

    decoders: ClassVar[Mapping[str, tuple[str, Callable[[object], object]]]] = {
        "error": ("error", optional(decode_text)),
        "parameters": ("parameters", optional(decode_object)),
        "continues": ("continues", optional(decode_boolean)),
    }


class Client(BaseClient):
    """A client whose parameters are structs, and whose replies are classes with ``from_json``, or dicts."""

    def _encode(self, method: str, parameters: Struct | None, *, more: bool) -> bytes:
        call: dict[str, object] = {"method": method}
        # A call without parameters and one with {} are the same.
        if parameters is not None:
            call["parameters"] = parameters
        if more:
            call["more"] = True
        # JSON escapes U+0000.
        return to_json(call).encode() + b"\0"

    def _decode(self, message: bytes) -> Answer:
        try:
            reply = _Message.from_json(from_json(message))
        except ValueError as error:
            raise ProtocolError(f"a message is not a varlink reply: {error}") from error
        return Answer(reply.error, reply.parameters, continues=bool(reply.continues))

    def _decode_parameters(self, method: str, parameters: dict[str, object] | None, kind: Any) -> Any:
        if kind is dict:
            return parameters or {}
        try:
            return kind.from_json(parameters or {})
        except InvalidReply as error:
            raise ProtocolError(f"the reply to {method} is not valid: {error}") from error
