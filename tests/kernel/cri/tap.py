# SPDX-License-Identifier: Apache-2.0
"""Relay between a runtime and its plugins in the guest, and record every frame: tap.py LISTEN CONNECT FILE.

One JSON array for each frame: connection, sender ("runtime" or "plugin"), the frame in base64.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import struct
import sys
from typing import TextIO

_SERIAL = itertools.count()


async def pass_on(
    number: int, sender: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, out: TextIO
) -> None:
    """Relay the frames of one direction until its end, which also ends the other direction."""
    with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
        while True:
            header = await reader.readexactly(8)
            frame = header + await reader.readexactly(struct.unpack(">II", header)[1])
            print(json.dumps([number, sender, base64.b64encode(frame).decode()]), file=out, flush=True)
            writer.write(frame)
            await writer.drain()
    writer.close()


async def main(listen: str, connect: str, file: str) -> None:
    """Relay until the process is killed."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(listen)
    with open(file, "a", encoding="ascii") as out:

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                from_them, to_them = await asyncio.open_unix_connection(connect)
            except OSError:
                writer.close()
                return
            number = next(_SERIAL)
            await asyncio.gather(
                pass_on(number, "plugin", reader, to_them, out), pass_on(number, "runtime", from_them, writer, out)
            )

        async with await asyncio.start_unix_server(serve, listen) as server:
            await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
