# SPDX-License-Identifier: Apache-2.0
"""schemata, size, mode and bit_usage: which parts of a cache a class may fill, and by which words it is refused."""

from __future__ import annotations

import os

import pytest

from .actors import outcome
from .target import Resctrl

NO_NUMBER = "Missing '=' or non-numeric domain\n"
NO_NUMBERS = ["0", "x=1", "=1", " 0=1", "0 =1", "0x0=1", "-0=1", ";0=1", "0=1;;", "18446744073709551616=1"]
NO_MASKS = ["", "zz", "-1", "1 1", "1=1", "0x", "10000000000000000"]
REFUSED = {
    "\n": "Missing ':'\n",
    "L3\n": "Missing ':'\n",
    "L3:0=1\n\n": "Missing ':'\n",
    "L3:\n": "Missing 'L3' value\n",
    " a :\n": "Missing 'a' value\n",
    "l3:0=1\n": "Unknown or unsupported resource name 'l3'\n",
    "L2:0=1\n": "Unknown or unsupported resource name 'L2'\n",
    "MB:0=10\n": "Unknown or unsupported resource name 'MB'\n",
    ":0=1\n": "Unknown or unsupported resource name ''\n",
    "L3:0=1\nfoo:0=1\n": "Unknown or unsupported resource name 'foo'\n",
    # Nothing is status of a domain that is not there.
    "L3:9=1\n": "ok\n",
    "L3:4294967296=1\n": "ok\n",
    "L3:0=1;0=1\n": "Duplicate domain 0\n",
    "L3:0=1\nL3:0=1\n": "Duplicate domain 0\n",
    "L3:0=0\n": "Mask out of range\n",
    "L3:0=100000000\n": "Mask out of range\n",
    **{f"L3:{text}\n": NO_NUMBER for text in NO_NUMBERS},
    **{f"L3:0={text}\n": f"Non-hex character in the mask {text}\n" for text in NO_MASKS},
}


@pytest.fixture
def x(fs: Resctrl) -> str:
    return fs.create("x") if fs.can_allocate else ""


def masks(fs: Resctrl, group: str) -> list[str]:
    """Return the masks of a group, by domain."""
    line = fs.read(group, "schemata")
    assert line.startswith("L3:")
    pairs = [pair.split("=") for pair in line.removeprefix("L3:").strip().split(";")]
    assert [int(domain) for domain, _ in pairs] == list(range(len(fs.domains)))
    return [mask for _, mask in pairs]


def full(fs: Resctrl) -> str:
    return fs.read("info/L3/cbm_mask").strip()


def invalid(fs: Resctrl, name: str, status: str) -> str:
    """Return the status after a command without a newline: since 6.16 a message, in Linux 6.12 the previous one."""
    return f"{name}: Invalid input\n" if fs.is_6_16 else status


# schemata


@pytest.mark.allocation
def test_classes_begin_with_all_of_the_cache(fs: Resctrl, x: str) -> None:
    """Root and a new class, where no class is exclusive, have the full mask in each domain."""
    assert masks(fs, "") == masks(fs, x) == [full(fs)] * len(fs.domains)


@pytest.mark.allocation
def test_a_mask_is_taken(fs: Resctrl, x: str) -> None:
    """Masks are hexadecimal, domains decimal; white space is allowed around the resource and the mask."""
    for text in ("0=1", "0=1;", "0= 1 ", "0=0x1", "0=01", "0=+1", "00=1", "+0=1", "0=1\0;0=zz", "0=1\r"):
        fs.write(f"{x}/schemata", "L3:0=2\n")
        assert fs.try_write(f"{x}/schemata", f" L3\t:{text}\n") == ("OK", "ok\n"), text
        assert masks(fs, x) == ["1"] + [full(fs)] * (len(fs.domains) - 1), text
    assert masks(fs, "") == [full(fs)] * len(fs.domains)


@pytest.mark.allocation
def test_a_command_with_an_error_changes_nothing(fs: Resctrl, x: str) -> None:
    """Any error in a command is EINVAL, and nothing of the command is applied."""
    fs.write(f"{x}/schemata", "L3:0=2\n")
    before = fs.read(x, "schemata")
    assert {text: fs.try_write(f"{x}/schemata", text) for text in REFUSED} == {
        text: ("EINVAL", status) for text, status in REFUSED.items()
    }
    assert fs.read(x, "schemata") == before


@pytest.mark.allocation
def test_a_mask_above_cbm_mask_is_refused(fs: Resctrl, x: str) -> None:
    """A mask above cbm_mask is out of range."""
    assert fs.try_write(f"{x}/schemata", f"L3:0={int(full(fs), 16) + 1:x}\n") == ("EINVAL", "Mask out of range\n")


@pytest.mark.allocation
def test_a_mask_may_have_gaps_if_sparse_masks_is_1(fs: Resctrl, x: str) -> None:
    """A mask with gaps is accepted if sparse_masks is 1."""
    found = fs.try_write(f"{x}/schemata", "L3:0=5\n")
    if fs.read("info/L3/sparse_masks") == "1\n":
        assert found == ("OK", "ok\n")
    else:
        assert found == ("EINVAL", "The mask 5 has non-consecutive 1-bits\n")


@pytest.mark.two_domains
def test_each_domain_has_its_own_mask(fs: Resctrl, x: str) -> None:
    """Each domain has its mask; those that are not named keep theirs, in any order."""
    fs.write(f"{x}/schemata", "L3:1=2\n")
    assert masks(fs, x) == [full(fs), "2"]
    fs.write(f"{x}/schemata", "L3:1=1;0=2\n")
    assert masks(fs, x) == ["2", "1"]
    assert fs.try_write(f"{x}/schemata", "L3:0=1\nL3:9=1\n")[0] == "EINVAL"
    assert masks(fs, x) == ["2", "1"]


@pytest.mark.allocation
def test_roots_masks(fs: Resctrl) -> None:
    """Root's masks can be written, as those of any class."""
    fs.write("schemata", "L3:0=2\n")
    assert masks(fs, "")[0] == "2"


@pytest.mark.allocation
def test_a_class_created_again_has_the_full_mask(fs: Resctrl, x: str) -> None:
    """A class created again does not have the masks of the removed one."""
    fs.write(f"{x}/schemata", "L3:0=1\n")
    fs.rmdir(x)
    assert masks(fs, fs.create("again")) == [full(fs)] * len(fs.domains)


@pytest.mark.allocation
def test_an_unmount_resets_masks(fs: Resctrl) -> None:
    """After unmount and mount, root has the whole cache."""
    fs.write("schemata", "L3:0=1\n")
    assert fs.unmount() == "OK"
    fs.mount()
    assert masks(fs, "") == [full(fs)] * len(fs.domains)


@pytest.mark.monitoring_only
def test_root_has_no_schemata_without_allocation(fs: Resctrl) -> None:
    """Without allocation, root's schemata and size are empty, and no resource is known."""
    assert (fs.read("schemata"), fs.read("size"), fs.read("mode")) == ("", "", "shareable\n")
    assert fs.try_write("schemata", "L3:0=1\n") == ("EINVAL", "Unknown or unsupported resource name 'L3'\n")
    assert fs.try_write("schemata", "L3\n") == ("EINVAL", "Missing ':'\n")
    assert fs.try_write("mode", "exclusive\n") == ("EINVAL", "Cannot be exclusive without CAT/CDP\n")


def test_a_command_ends_with_a_newline(fs: Resctrl, x: str) -> None:
    """schemata and mode accept only text that ends with a newline: EINVAL."""
    for name, text in (("schemata", "L3:0=1"), ("mode", "shareable"), ("schemata", "L3:0=1\n\0")):
        status = fs.set_status()
        assert fs.try_write(f"./{x}/{name}", text) == ("EINVAL", invalid(fs, name, status))


# size and bit_usage


@pytest.mark.allocation
def test_size_is_proportional_to_the_bits_of_the_mask(fs: Resctrl, x: str) -> None:
    """size has the bytes of each mask, in proportion to its bits."""

    def size() -> int:
        return int(fs.read(x, "size").removeprefix("L3:").split(";")[0].removeprefix("0="))

    whole, bits = size(), int(full(fs), 16).bit_count()
    assert whole % bits == 0
    fs.write(f"{x}/schemata", "L3:0=2\n")
    assert size() == whole // bits
    fs.write(f"{x}/schemata", "L3:0=3\n")
    assert size() == whole // bits * 2


@pytest.mark.allocation
def test_size_cannot_be_written(fs: Resctrl, x: str) -> None:
    """size has no write permission: EACCES; with one, EINVAL."""
    assert outcome(lambda: fs.write(f"{x}/size", "1\n")) == "EACCES"
    os.chmod(fs.path(x, "size"), 0o644)
    assert outcome(lambda: fs.write(f"{x}/size", "1\n")) == "EINVAL"


@pytest.mark.allocation
def test_bit_usage(fs: Resctrl) -> None:
    """A letter for each bit, the highest first: X or S for bits that a class may fill, H or 0 for others."""
    hardware = int(fs.read("info/L3/shareable_bits"), 16)
    bits = [1 << number for number in reversed(range(int(full(fs), 16).bit_length()))]

    def letters(mask: int) -> str:
        return "".join("0SHX"[bool(mask & bit) + 2 * bool(hardware & bit)] for bit in bits)

    usage = [f"{number}={letters(int(full(fs), 16))}" for number in range(len(fs.domains))]
    assert fs.read("info/L3/bit_usage") == ";".join(usage) + "\n"
    fs.write("schemata", "L3:0=2\n")
    usage[0] = f"0={letters(2)}"
    assert fs.read("info/L3/bit_usage") == ";".join(usage) + "\n"
    fs.create("x")
    fs.write("x/schemata", "L3:0=1\n")
    usage[0] = f"0={letters(3)}"
    assert fs.read("info/L3/bit_usage") == ";".join(usage) + "\n"


def test_bit_usage_leaves_the_status(fs: Resctrl) -> None:
    """Reading a file of info does not clear last_cmd_status; reading a group's does since 6.16."""
    status = fs.set_status()
    for path in ("info/L3/bit_usage", "info/L3/cbm_mask") if fs.can_allocate else ("info/L3_MON/num_rmids",):
        fs.read(path)
    assert fs.status == status
    fs.read("cpus_list")
    assert fs.status == ("ok\n" if fs.is_6_16 else status)


# mode


def test_an_invalid_mode_is_refused(fs: Resctrl, x: str) -> None:
    """An invalid mode, or one that cannot be set, is EINVAL."""
    for text in ("foo\n", "\n", "Shareable\n", "shareable \n", "shareable\n\n", "pseudo-locked\n"):
        assert fs.try_write(f"./{x}/mode", text) == ("EINVAL", "Unknown or unsupported mode\n"), text
    assert fs.read(x, "mode") == "shareable\n"


def test_groups_are_shareable(fs: Resctrl, x: str) -> None:
    """A group is shareable; a write of the current mode is accepted, and clears last_cmd_status."""
    fs.set_status()
    assert fs.try_write(f"./{x}/mode", "shareable\n") == ("OK", "ok\n")
    assert fs.try_write(f"./{x}/mode", "shareable\0zz\n") == ("OK", "ok\n")
    assert fs.read(x, "mode") == "shareable\n"


@pytest.mark.allocation
def test_shared_mask_cannot_be_exclusive(fs: Resctrl, x: str) -> None:
    """A group whose masks overlap with another's, or with the hardware's, cannot become exclusive."""
    assert fs.try_write(f"{x}/mode", "exclusive\n") == ("EINVAL", "Schemata overlaps\n")
    assert fs.try_write("mode", "exclusive\0zz\n") == ("EINVAL", "Schemata overlaps\n")
    assert fs.read(x, "mode") == fs.read("mode") == "shareable\n"


@pytest.mark.allocation
def test_mask_of_the_hardware_cannot_be_exclusive(fs: Resctrl, x: str) -> None:
    """If shareable_bits has all bits, no group can become exclusive, even if no other has its bits."""
    if fs.read("info/L3/shareable_bits") != fs.read("info/L3/cbm_mask"):
        return
    everywhere = range(len(fs.domains))
    fs.write("schemata", "L3:" + ";".join(f"{number}=6" for number in everywhere) + "\n")
    fs.write(f"{x}/schemata", "L3:" + ";".join(f"{number}=1" for number in everywhere) + "\n")
    assert fs.try_write(f"{x}/mode", "exclusive\n") == ("EINVAL", "Schemata overlaps\n")


def test_root_cannot_be_locked(fs: Resctrl) -> None:
    """Root is never pseudo-locked."""
    assert fs.try_write("mode", "pseudo-locksetup\n") == ("EINVAL", "Cannot pseudo-lock default group\n")


@pytest.mark.allocation
def test_pseudo_locking_is_not_supported(fs: Resctrl, x: str) -> None:
    """The kernel pseudo-locks no group on processors whose prefetcher it cannot disable."""
    fs.create(f"{x}/mon_groups/m")
    assert fs.try_write(f"{x}/mode", "pseudo-locksetup\n") == ("EINVAL", "Pseudo-locking not supported\n")
    assert fs.read(x, "mode") == "shareable\n"
