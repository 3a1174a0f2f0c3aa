# SPDX-License-Identifier: Apache-2.0
"""The guest's agent: takes commands from a virtio-serial port, runs each in its own session, and answers.

A frame is the lengths of its two parts (two 32-bit big-endian numbers), a JSON header and a body of bytes.
Request: {"id", "command", "timeout"}, body: the command's standard input. Reply: {"id", "returncode",
"timed_out", "stdout"}, body: standard output, whose length "stdout" is, followed by standard error.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import threading
import time
from pathlib import Path
from typing import Any

PORT = "agent"
HEAD = struct.Struct(">II")


class Port:
    """The guest's end of the channel."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR)
        self._writing = threading.Lock()

    def receive(self) -> tuple[dict[str, Any], bytes]:
        """Wait for one frame."""
        header, body = HEAD.unpack(self._read(HEAD.size))
        return json.loads(self._read(header)), self._read(body)

    def send(self, header: dict[str, Any], body: bytes) -> None:
        """Send one frame; threads take turns."""
        text = json.dumps(header).encode()
        data = memoryview(HEAD.pack(len(text), len(body)) + text + body)
        with self._writing:
            while data:
                data = data[os.write(self._fd, data) :]

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size:
            if piece := os.read(self._fd, size - len(data)):
                data += piece
            else:
                time.sleep(0.02)  # nobody has opened the host's end
        return bytes(data)


def find_port(name: str) -> str:
    """The device of the virtio-serial port with this name; waits until the driver has it."""
    while True:
        for file in Path("/sys/class/virtio-ports").glob("*/name"):
            if file.read_text().strip() == name:
                return f"/dev/{file.parent.name}"
        time.sleep(0.05)


def memory_file(name: str, data: bytes = b"") -> int:
    """A file that is nowhere: a command's background children may hold it, and no test sees it."""
    fd = os.memfd_create(name)
    with open(fd, "wb", closefd=False) as file:
        file.write(data)
    os.lseek(fd, 0, os.SEEK_SET)
    return fd


def content(fd: int) -> bytes:
    """All that was written to a memory file, wherever its offset is."""
    return os.pread(fd, os.fstat(fd).st_size, 0)


def run(command: str, stdin: bytes, timeout: float) -> tuple[dict[str, Any], bytes]:
    """Run one shell command to its end, or kill its session when its time is over."""
    files = [memory_file("stdin", stdin), memory_file("stdout"), memory_file("stderr")]
    try:
        process = subprocess.Popen(
            ["/bin/bash", "-c", command],
            stdin=files[0],
            stdout=files[1],
            stderr=files[2],
            cwd="/root",
            start_new_session=True,
        )
        timed_out = False
        try:
            process.wait(timeout)
        except subprocess.TimeoutExpired:
            timed_out = True
            kill_session(process.pid)
            process.wait()
        stdout, stderr = content(files[1]), content(files[2])
    finally:
        for fd in files:
            os.close(fd)
    header = {"returncode": process.returncode, "timed_out": timed_out, "stdout": len(stdout)}
    return header, stdout + stderr


def kill_session(leader: int) -> None:
    """SIGKILL for all processes of a session, whichever process groups a shell made in it."""
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if os.getsid(int(entry.name)) == leader:
                    os.kill(int(entry.name), signal.SIGKILL)
            except ProcessLookupError:
                pass


def serve(port: Port, request: dict[str, Any], body: bytes) -> None:
    """One request, in its own thread, so that a long command holds up nobody."""
    header, output = run(request["command"], body, request["timeout"])
    port.send({"id": request["id"], **header}, output)


def main() -> None:
    """Serve for ever."""
    port = Port(find_port(PORT))
    while True:
        request, body = port.receive()
        threading.Thread(target=serve, args=(port, request, body)).start()


if __name__ == "__main__":
    main()
