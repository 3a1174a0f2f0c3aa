# SPDX-License-Identifier: Apache-2.0
"""A connection plugin of Ansible that runs commands in a guest: test_package_role.py serves its socket."""

from __future__ import annotations

import base64
import json
import shlex
import socket
from pathlib import Path

from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.connection import ConnectionBase

DOCUMENTATION = """
name: guest
short_description: run commands in a guest
description: Run commands in a guest as root.
options: {}
"""
SOCKET = "\0@SOCKET@"


class Connection(ConnectionBase):  # type: ignore[misc]
    """One connection to the socket for each command."""

    transport = "guest"
    has_pipelining = True

    def _connect(self) -> Connection:
        self._connected = True
        return self

    def exec_command(self, cmd: str, in_data: bytes | None = None, sudoable: bool = True) -> tuple[int, bytes, bytes]:
        """Run a shell command. Return its status, its output and its errors."""
        super().exec_command(cmd, in_data=in_data, sudoable=sudoable)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
            connection.connect(SOCKET)
            with connection.makefile("rwb") as stream:
                request = {"command": cmd, "stdin": base64.b64encode(in_data or b"").decode()}
                stream.write(json.dumps(request).encode() + b"\n")
                stream.flush()
                line = stream.readline()
        if not line:
            raise AnsibleConnectionFailure("the guest has ended")
        reply = json.loads(line)
        return reply["status"], base64.b64decode(reply["stdout"]), base64.b64decode(reply["stderr"])

    def put_file(self, in_path: str, out_path: str) -> None:
        """Copy a file to the guest."""
        super().put_file(in_path, out_path)
        self.exec_command(f"cat >{shlex.quote(out_path)}", Path(in_path).read_bytes())

    def fetch_file(self, in_path: str, out_path: str) -> None:
        """Copy a file from the guest."""
        super().fetch_file(in_path, out_path)
        Path(out_path).write_bytes(self.exec_command(f"cat {shlex.quote(in_path)}")[1])

    def close(self) -> None:
        """Do nothing: each command has its own connection."""
        self._connected = False
