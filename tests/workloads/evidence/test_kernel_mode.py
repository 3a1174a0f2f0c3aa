# SPDX-License-Identifier: Apache-2.0
"""The kernel counts its work for a task in another group than the task's (info/kernel_mode of PLZA)."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import msgspec
import pytest

from resctrlmond.resctrl.tree import Tree
from resctrlmond.resctrl.witness import Write
from resctrlmond.workloads.groups import counters
from resctrlmond.workloads.model.states import Quality
from resctrlmond.workloads.verbs.assign import assign
from resctrlmond.workloads.verbs.read import read
from resctrlmond.workloads.verbs.release import release
from tests.workloads.conftest import Host, assignment
from tests.workloads.evidence.test_interference import react
from tests.workloads.known_reasons import check_reasons

Start = Callable[[], "subprocess.Popen[bytes]"]
WORK = "the kernel may have counted its work for the tasks in another group"
WHY = f"{WORK}: info/kernel_mode is global_assign_ctrl_assign_mon"


@pytest.fixture
def mode(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return a function that sets the text of info/kernel_mode; there is no such file at first."""
    texts, read_text = {"info/kernel_mode": ""}, Tree._read_text_if_there
    monkeypatch.setattr(Tree, "_read_text_if_there", lambda tree, file: texts.get(file) or read_text(tree, file))

    def set_text(text: str) -> None:
        texts["info/kernel_mode"] = text

    return set_text


def test_total_is_estimated_while_the_kernel_counts_its_work_elsewhere(
    host: Host, process: Start, mode: Callable[[str], None]
) -> None:
    """It was exact."""
    inherit, elsewhere = ("[inherit_ctrl_and_mon]\n", "[global_assign_ctrl_assign_mon]\n")
    mode(inherit)
    assign(host.ctx, assignment("before", process().pid, late=False))
    assert {total.quality for total in read(host.ctx, "before")[2]} == {Quality.EXACT}
    mode(elsewhere)
    assign(host.ctx, assignment("k", process().pid, late=False))
    for key in ("before", "k"):
        totals = read(host.ctx, key)[2]
        assert {(total.quality, total.reason) for total in totals} == {(Quality.ESTIMATED, WHY)}
    assert all(WHY in use.reason for use in host.ctx.machine.read().pools if use.event.name == "mbm_total_bytes")
    with host.ctx.store.transaction("k") as txn:
        counters.checkpoint(host.ctx, txn)
    mode(inherit)
    for total in release(host.ctx, "k", owner="test").totals:
        assert (total.quality, total.reason) == (Quality.ESTIMATED, WHY)
        check_reasons(total)


def test_change_between_two_readings(host: Host, process: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may have been undone before the next reading."""
    assign(host.ctx, assignment("k", process().pid, late=False))
    moves = host.ctx.proofs._witness.moves
    written = Write(1, 1 << 63, 1, 2, is_refused=False, file="kernel_mode", parent="info", program="sh")
    monkeypatch.setattr(
        host.ctx.proofs._witness, "moves", lambda: msgspec.structs.replace(moves(), others=(written,))
    )
    react(host)
    for total in read(host.ctx, "k")[2]:
        assert total.quality is Quality.ESTIMATED
        assert f"{WORK}: another program wrote to info/kernel_mode" in total.reason
        check_reasons(total)
