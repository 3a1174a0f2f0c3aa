# SPDX-License-Identifier: Apache-2.0
"""Stock Debian kernels, unpacked for QEMU's direct boot, with their modules."""

from __future__ import annotations

import lzma
import re
import shutil
import struct
import subprocess
from pathlib import Path

from . import cache
from .errors import BuildError
from .sources import private_apt
from .tools import tool

# The series of kernels, and the suites that are searched for each. Debian 13's kernel lacks setcpuid= (Linux 6.14);
# those of its backports and of sid have it.
NEWEST, OF_DEBIAN_13 = "newest", "6.12"
SUITES = {NEWEST: ("trixie-backports", "sid"), OF_DEBIAN_13: ("trixie",)}
PACKAGE = "linux-image-cloud-amd64"


def kernel(line: str) -> Path:
    """Return the folder with vmlinux, modules/ and release, fetched on first use. ``line`` is a key of ``SUITES``."""
    return cache.artifact("kernel", kernel_key(line), lambda place: _build(place, line))


def kernel_key(line: str) -> str:
    """Return a hash of this file."""
    return cache.key(Path(__file__), line)


def _build(place: Path, line: str) -> None:
    refused = []
    for suite in SUITES[line]:
        work = place / suite
        try:
            _fetch(place, work, suite, needs_setcpuid=line == NEWEST)
            return
        except BuildError as error:
            cache.progress(f"no kernel from {suite}: {error}")
            refused.append(f"{suite}: {error}")
        finally:
            shutil.rmtree(work, ignore_errors=True)
    raise BuildError("no Debian suite has a suitable kernel:\n" + "\n".join(refused))


def _fetch(place: Path, work: Path, suite: str, *, needs_setcpuid: bool) -> None:
    cache.progress(f"fetching a kernel from {suite}")
    environment = private_apt(work / "apt", suite)
    release = _release(environment)
    known = set(tool(["apt-cache", "pkgnames", "linux-"], env=environment).split())
    # Newer packaging splits the image into binary and modules. A suite without one of them does not need it.
    names = [f"linux-{part}-{release}" for part in ("binary", "modules", "image")]
    debs = work / "debs"
    debs.mkdir()
    wanted = [name for name in names if name in known]
    tool(["apt-get", "-q", "download", *wanted], cwd=debs, env=environment)
    for deb in debs.glob("*.deb"):
        tool(["dpkg-deb", "-x", deb, work / "tree"])
    vmlinux = _unpacked((_only(work / "tree", f"**/vmlinuz*{release}", "**/vmlinuz*")).read_bytes())
    if needs_setcpuid and b"setcpuid" not in vmlinux:
        raise BuildError(f"Linux {release} does not know setcpuid=")
    modules = _only(work / "tree", f"**/modules/{release}")
    (place / "vmlinux").write_bytes(vmlinux)
    (place / "release").write_text(release + "\n")
    modules.rename(place / "modules")


def _release(environment: dict[str, str]) -> str:
    """Return the release that the metapackage depends on now, such as 6.16.3+deb13-cloud-amd64."""
    depends = tool(["apt-cache", "depends", PACKAGE], env=environment)
    if not (match := re.search(r"Depends: linux-(?:image|binary|base)-(\d\S+)", depends)):
        raise BuildError(f"{PACKAGE} names no kernel image among its dependencies:\n{depends}")
    return match[1]


def _unpacked(bzimage: bytes) -> bytes:
    """Return the ELF image inside a bzImage (Documentation/arch/x86/boot.rst: payload_offset, payload_length).

    QEMU boots the ELF image through PVH about 1.5 s faster than the bzImage, and its text shows the known parameters.
    """
    sectors = bzimage[0x1F1] or 4
    offset, length = struct.unpack_from("<II", bzimage, 0x248)
    begin = (sectors + 1) * 512 + offset
    payload = bzimage[begin : begin + length - 4]  # the last 4 bytes are the unpacked size
    if payload.startswith(b"\xfd7zXZ"):
        return lzma.decompress(payload)
    if payload.startswith(b"\x28\xb5\x2f\xfd"):
        return subprocess.run(["zstd", "-dcq"], input=payload, stdout=subprocess.PIPE, check=True).stdout
    raise BuildError(f"the kernel is packed in an unknown way: it begins with {payload[:6].hex(' ')}")


def module(line: str, name: str) -> bytes | None:
    """Return a module as the kernel loads it; None if it is built in or does not exist."""
    found = sorted((kernel(line) / "modules").glob(f"kernel/**/{name}.ko*"))
    if not found:
        return None
    data = found[0].read_bytes()
    return lzma.decompress(data) if found[0].suffix == ".xz" else data


def _only(tree: Path, *patterns: str) -> Path:
    for pattern in patterns:
        for path in sorted(tree.glob(pattern)):
            return path
    raise BuildError(f"the kernel's packages have no {patterns[0]}")
