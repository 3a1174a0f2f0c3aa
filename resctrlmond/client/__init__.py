# SPDX-License-Identifier: Apache-2.0
"""The typed client of the varlink interface, for everything outside the daemon. That for asyncio is beside it."""

from resctrlmond.api.varlink.frames import ProtocolError, UnexpectedReply, VarlinkError
from resctrlmond.client.protocol import DaemonUnavailable
from resctrlmond.client.synchronous import Client

__all__ = ["Client", "DaemonUnavailable", "ProtocolError", "UnexpectedReply", "VarlinkError"]
