# SPDX-License-Identifier: Apache-2.0
"""A minimal initramfs: busybox, the disk's driver, and a script that mounts the root and executes its init."""

from __future__ import annotations

import stat

INIT = """\
#!/bin/busybox sh
/bin/busybox --install -s /bin
mount -t proc proc /proc; mount -t sysfs sysfs /sys; mount -t devtmpfs dev /dev
[ -e /virtio_blk.ko ] && insmod /virtio_blk.ko
for try in 1 2 3 4 5 6 7 8 9; do [ -b /dev/vda ] && break; usleep 50000; done
mount -t ext4 /dev/vda /new || { echo "no root disk"; ls /dev; poweroff -f; }
umount /proc /sys; mount --move /dev /new/dev
exec switch_root /new /sbin/init
"""


# With rdinit=/symbols, the kernel runs this, which prints the addresses of the symbols in symbols=NAME|NAME.
# Parameters that the kernel does not know are in the environment of init.
SYMBOLS = """\
#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
/bin/busybox grep -wE "$symbols" /proc/kallsyms
/bin/busybox poweroff -f
"""


def initramfs(busybox: bytes, virtio_blk: bytes | None) -> bytes:
    """Return a cpio archive in the "newc" format (kernel: Documentation/driver-api/early-userspace)."""
    entries = [(name, stat.S_IFDIR | 0o755, b"") for name in ("bin", "dev", "new", "proc", "sys")]
    entries += [
        ("bin/busybox", stat.S_IFREG | 0o755, busybox),
        ("init", stat.S_IFREG | 0o755, INIT.encode()),
        ("symbols", stat.S_IFREG | 0o755, SYMBOLS.encode()),
    ]
    if virtio_blk is not None:  # None: built into the kernel
        entries.append(("virtio_blk.ko", stat.S_IFREG | 0o644, virtio_blk))
    records = [_record(number, *entry) for number, entry in enumerate(entries, start=1)]
    return b"".join(records) + _record(0, "TRAILER!!!", 0, b"")


def _record(inode: int, name: str, mode: int, data: bytes) -> bytes:
    fields = (inode, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08x" % field for field in fields) + name.encode() + b"\0"
    return _padded(head) + _padded(data)


def _padded(data: bytes) -> bytes:
    return data + b"\0" * (-len(data) % 4)
