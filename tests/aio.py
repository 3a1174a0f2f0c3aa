# SPDX-License-Identifier: Apache-2.0
"""Write a text to a file with io_submit(2), which raises no event of inotify(7): python3 aio.py FILE TEXT."""

from __future__ import annotations

import ctypes
import os
import platform
import struct
import sys

# The system calls io_setup, io_submit and io_getevents.
_SETUP, _SUBMIT, _GETEVENTS = {"x86_64": (206, 209, 208), "aarch64": (0, 2, 4)}[platform.machine()]
_PWRITE = 1


def write(path: str, text: str) -> None:
    """Write a text to a file. Raises OSError."""
    libc, data = ctypes.CDLL(None, use_errno=True), text.encode()

    def call(number: int, *arguments: object) -> None:
        if libc.syscall(number, *arguments) < 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    context = ctypes.c_ulong(0)
    call(_SETUP, 8, ctypes.byref(context))
    fd = os.open(path, os.O_WRONLY)
    try:
        buffer = ctypes.create_string_buffer(data)
        # struct iocb and struct io_event of linux/aio_abi.h.
        address, length = ctypes.addressof(buffer), len(data)
        block = ctypes.create_string_buffer(
            struct.pack("<QIIHhIQQqQII", 0, 0, 0, _PWRITE, 0, fd, address, length, 0, 0, 0, 0)
        )
        blocks = (ctypes.c_void_p * 1)(ctypes.addressof(block))
        call(_SUBMIT, context, 1, blocks)
        event = ctypes.create_string_buffer(32)
        call(_GETEVENTS, context, 1, 1, event, None)
    finally:
        os.close(fd)
    result = struct.unpack("<QQqq", event.raw)[2]
    if result < 0:
        raise OSError(-result, os.strerror(-result))


if __name__ == "__main__":
    for path, text in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        write(path, text)
