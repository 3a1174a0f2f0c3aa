# SPDX-License-Identifier: Apache-2.0
"""A synchronous varlink client that encodes and decodes msgspec structs."""

from __future__ import annotations

from typing import Any

import msgspec

from resctrlmond.api.varlink import messages as wire
from resctrlmond.api.varlink.base_client import Answer, BaseClient, DaemonUnavailable
from resctrlmond.api.varlink.frames import ProtocolError, UnexpectedReply, VarlinkError
from resctrlmond.api.varlink.messages import Call, Parameters, Reply

__all__ = ["Client", "DaemonUnavailable", "ProtocolError", "UnexpectedReply", "VarlinkError"]


class Client(BaseClient):
    """A client whose parameters are structs or dicts, and whose replies are of any type that msgspec decodes."""

    def _encode(self, method: str, parameters: Parameters | None, *, more: bool) -> bytes:
        return wire.encode(Call(method, wire.encode_parameters(parameters), more=more or None))

    def _decode(self, message: bytes) -> Answer:
        reply = wire.decode(message, Reply)
        parameters = reply.parameters if bytes(reply.parameters) else None
        return Answer(reply.error, parameters, continues=bool(reply.continues))

    def _decode_parameters(self, method: str, parameters: msgspec.Raw | None, kind: Any) -> Any:
        try:
            return wire.decode_parameters(parameters or msgspec.Raw(), kind)
        except msgspec.ValidationError as error:
            raise UnexpectedReply(f"the reply to {method} is not valid: {error}") from error
