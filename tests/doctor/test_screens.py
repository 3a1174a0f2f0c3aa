# SPDX-License-Identifier: Apache-2.0
"""Screens of doctor on a sound and on a broken machine, at 80 and 200 columns, as files in ``screens``.

``python -m tests.doctor.test_screens`` writes the files again. Look at each before you commit it.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from resctrlctl.doctor import verb
from resctrlctl.screen.layout import to_text
from tests.ctl.fake_manager import serving
from tests.doctor.machine_tree import FAILED, KERNEL_CONFIG, MOUNTS, OPTIONS, MachineTree, answering_machine

SCREENS = Path(__file__).parent / "screens"
NAMES = ("sound", "broken")
WIDTHS = (80, 200)


def break_machine(machine: MachineTree) -> None:
    """Break many parts of a machine."""
    machine.remove_energy()
    machine.write(KERNEL_CONFIG, "".join(f"CONFIG_{name}=m\n" for name in OPTIONS[:3]) + "CONFIG_X86_CPU_RESCTRL=y\n")
    machine.mounts(*MOUNTS, "50 22 0:38 / /mnt/resctrl rw - resctrl resctrl rw")
    for number in range(62):
        machine.group(f"taken{number:02}")
    machine.unit(FAILED)
    machine.hook("other.json", "/usr/libexec/missing")
    machine.listen("/run/containerd/containerd.sock")
    machine.write("/run/docker.sock", "")


def screen(folder: Path, name: str, width: int) -> str:
    """Return the text of ``doctor`` on a terminal of this width."""
    with serving(folder) as manager:
        machine = answering_machine(folder / "m", manager)
        if name == "broken":
            break_machine(machine)
        report = verb.examine(machine.host)
    return to_text(verb.blocks(report, width), None, legend=True)


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", NAMES)
def test_screen_is_as_it_was_looked_at(tmp_path: Path, name: str, width: int) -> None:
    text = screen(tmp_path, name, width)
    assert text == (SCREENS / f"{name}-{width}.txt").read_text(encoding="utf-8")


def main() -> None:
    """Write the files again."""
    for name in NAMES:
        for width in WIDTHS:
            with tempfile.TemporaryDirectory() as folder:
                text = screen(Path(folder), name, width)
            (SCREENS / f"{name}-{width}.txt").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
