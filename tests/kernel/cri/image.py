# SPDX-License-Identifier: Apache-2.0
"""Create a docker-archive with an image of busybox, inside the guest: python3 image.py BUSYBOX ARCHIVE."""

from __future__ import annotations

import hashlib
import io
import json
import sys
import tarfile
from pathlib import Path

# The second one holds the namespaces of a pod.
COMMANDS = {"localhost/busybox:1": ["/bin/sh"], "localhost/pause:1": ["/bin/sleep", "1000000"]}
APPLETS = ("sh", "sleep", "cat", "true")


def entry(name: str, mode: int, kind: bytes, content: bytes = b"", target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    """Add one member to an archive."""
    made = tarfile.TarInfo(name)
    made.mode, made.type, made.linkname, made.size = mode, kind, target, len(content)
    return made, content


def archive(entries: list[tuple[tarfile.TarInfo, bytes]]) -> bytes:
    """Return a tar archive as bytes."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as made:
        for member, content in entries:
            made.addfile(member, io.BytesIO(content) if content else None)
    return buffer.getvalue()


def image(busybox: bytes) -> bytes:
    """Return the docker-archive: one layer, and an image for each command."""
    layer = archive(
        [
            *(entry(name, 0o755, tarfile.DIRTYPE) for name in ("bin", "proc", "sys", "dev", "etc", "tmp")),
            entry("bin/busybox", 0o755, tarfile.REGTYPE, busybox),
            *(entry(f"bin/{applet}", 0o777, tarfile.SYMTYPE, target="busybox") for applet in APPLETS),
        ]
    )
    digest = hashlib.sha256(layer).hexdigest()
    files = {f"{digest}.tar": layer}
    manifest = []
    for tag, command in COMMANDS.items():
        config = {
            "architecture": "amd64",
            "os": "linux",
            "config": {"Env": ["PATH=/bin"], "Cmd": command},
            "rootfs": {"type": "layers", "diff_ids": [f"sha256:{digest}"]},
        }
        text = json.dumps(config).encode()
        name = f"{hashlib.sha256(text).hexdigest()}.json"
        files[name] = text
        manifest.append({"Config": name, "RepoTags": [tag], "Layers": [f"{digest}.tar"]})
    files["manifest.json"] = json.dumps(manifest).encode()
    return archive([entry(name, 0o644, tarfile.REGTYPE, content) for name, content in files.items()])


if __name__ == "__main__":
    Path(sys.argv[2]).write_bytes(image(Path(sys.argv[1]).read_bytes()))
