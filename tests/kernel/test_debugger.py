# SPDX-License-Identifier: Apache-2.0
"""The commands to QEMU's debugger stub for a kernel without setcpuid=; make conformance-all shows their use."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator

import pytest

from .machine import BuildError, GuestDiedError
from .machine.debugger import FORCED, STOP_AT, Stub, framed, parsed, words

KALLSYMS = """\
ffffffff83a16c90 T early_cpu_init\r
ffffffff83e4b0c0 B cpu_caps_set\r
ffffffff83a16aa0 t early_cpu_init_other\r
"""
ADDRESSES = {STOP_AT: 0xFFFFFFFF83A16C90, FORCED: 0xFFFFFFFF83E4B0C0}


def test_features_are_bits_of_the_kernels_words() -> None:
    assert words(["cqm", "rdt_a"]) == {9: 0x9000}
    assert words(["cat_l3", "cqm_llc", "cqm_occup_llc", "cqm_mbm_total", "cqm_mbm_local"]) == {7: 0x10, 11: 0xF}
    with pytest.raises(KeyError, match="no_such_feature"):
        words(["no_such_feature"])


def test_addresses_are_read_from_the_kernel() -> None:
    assert parsed("a line of QEMU's\n" + KALLSYMS) == ADDRESSES


@pytest.mark.parametrize(
    "text", ["", KALLSYMS.partition("\n")[2], KALLSYMS.replace("ffffffff83e4b0c0", "0000000000000000")]
)
def test_kernel_without_addresses_is_refused(text: str) -> None:
    with pytest.raises(BuildError, match="has no addresses of early_cpu_init and cpu_caps_set"):
        parsed(text)


@contextlib.contextmanager
def conversation(*replies: str) -> Iterator[tuple[Stub, socket.socket]]:
    """Yield a stub whose replies are already written, and its end of the connection."""
    own_end, other_end = socket.socketpair()
    with own_end, other_end:
        other_end.sendall(b"".join(b"+" + framed(reply) for reply in replies))
        yield Stub(own_end), other_end


def test_bits_are_set_between_stop_and_detach() -> None:
    with conversation("OK", "T05thread:01;", "01000040", "OK", "OK", "OK") as (stub, other_end):
        stub.force(["cqm"], ADDRESSES)
        packets = ["Z1,ffffffff83a16c90,1", "c", "mffffffff83e4b0e4,4", "Mffffffff83e4b0e4,4:01100040"]
        packets += ["z1,ffffffff83a16c90,1", "D"]
        assert other_end.recv(4096) == b"".join(framed(packet) + b"+" for packet in packets)


def test_a_packet_has_its_sum() -> None:
    assert framed("c") == b"$c#63"
    assert framed("Z1,10,1") == b"$Z1,10,1#" + b"%02x" % (sum(b"Z1,10,1") % 256)


def test_refusal_of_the_stub_is_reported() -> None:
    with (
        conversation("E22") as (stub, _),
        pytest.raises(GuestDiedError, match="refused 'Z1,ffffffff83a16c90,1': E22"),
    ):
        stub.force(["cqm"], ADDRESSES)


def test_end_of_the_stub_is_reported() -> None:
    with conversation() as (stub, other_end):
        other_end.close()
        with pytest.raises(GuestDiedError, match="debugger stub, asked 'D'"):
            stub.ask("D")
