# SPDX-License-Identifier: Apache-2.0
"""The verb machine: the table of pools."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from resctrlctl.host.machine import bar, blocks, line, shares, shares_since
from resctrlctl.screen.layout import to_text
from resctrlmond.api.types import MachineReply, PoolUse
from resctrlmond.resctrl.kinds import Kind
from resctrlmond.workloads.model.states import Pool, Quality
from tests.ctl.conftest import Ctl
from tests.ctl.fake_manager import FakeManager, error

TEXT = """\
Use of the machine from 2026-11-22 09:00:00 to 2026-11-22 10:00:00

POOL                                 ENERGY  SHARE  TRAFFIC  SHARE      LLC  SHARE  QUALITY
tracked    workloads                  600kJ   60 %  1.00GiB   25 %  8.00MiB  100 %  exact
foreign    groups of other programs      0J    0 %        -      -        -      -  exact
untracked  tasks in no group          100kJ   10 %  3.00GiB   75 %       0B    0 %  estimated
uncore     packages without cores     300kJ   30 %        -      -        -      -  exact

Not exact
  untracked: class gold was removed between two readings
"""
DOMAINS = """\
POOL                                 DOMAIN           ENERGY  SHARE  TRAFFIC  SHARE      LLC  SHARE  QUALITY
tracked    workloads                 mon_L3_00             -      -  1.00GiB   25 %  8.00MiB  100 %  exact
                                     mon_PERF_PKG_00   600kJ   60 %        -      -        -      -  exact
"""


def use(pool: Pool, event: str, value: str | None, reason: str = "") -> PoolUse:
    units = {"core_energy": "joules", "mbm_total_bytes": "bytes", "llc_occupancy": "bytes"}
    return PoolUse(
        pool=pool,
        domain="mon_PERF_PKG_00" if event == "core_energy" else "mon_L3_00",
        event=event,
        kind=Kind.GAUGE if event == "llc_occupancy" else Kind.CUMULATIVE,
        unit=units[event],
        value=value,
        skew="0",
        quality=Quality.ESTIMATED if reason else Quality.EXACT,
        reason=reason or None,
    )


REPLY = MachineReply(
    since="2026-11-22T09:00:00Z",
    read_at="2026-11-22T10:00:00Z",
    pools=[
        use(Pool.TRACKED, "llc_occupancy", str(8 << 20)),
        use(Pool.UNTRACKED, "llc_occupancy", "0"),
        use(Pool.TRACKED, "mbm_total_bytes", str(1 << 30)),
        use(Pool.UNTRACKED, "mbm_total_bytes", str(3 << 30), "class gold was removed between two readings"),
        use(Pool.TRACKED, "core_energy", "600000.000000"),
        use(Pool.FOREIGN, "core_energy", "0.000000"),
        use(Pool.UNTRACKED, "core_energy", "100000.5", "class gold was removed between two readings"),
        use(Pool.UNCORE, "core_energy", "300000.000000"),
    ],
)


def test_domains_have_lines_of_their_own() -> None:
    text = to_text(blocks(REPLY, None, by_domain=True)[1:2], None, True)
    assert text.startswith(DOMAINS)


def test_unknown_figure_has_no_share() -> None:
    pools = [use(Pool.TRACKED, "core_energy", "1"), use(Pool.UNTRACKED, "core_energy", None, "no number")]
    assert shares(pools, "core_energy") == {}
    reply = replace(REPLY, pools=pools)
    assert "untracked  tasks in no group       -      -  estimated" in to_text(blocks(reply, None), None, True)


def test_verb_prints_the_reply(manager: FakeManager, ctl: Ctl) -> None:
    manager.replies = {"Machine": REPLY}
    assert ctl("machine").stdout == TEXT
    assert ctl("machine", "-q").stdout == "tracked\nforeign\nuntracked\nuncore\n"
    assert "mon_PERF_PKG_00" in ctl("machine", "--domains").stdout
    assert msgspec.json.decode(ctl("machine", "--json").stdout, type=MachineReply) == REPLY


def test_line_has_the_shares_since_the_reading_before() -> None:
    def line_of(pools: list[PoolUse], before: list[PoolUse] | None = None) -> str:
        return line(*shares_since(pools, before or ()))

    assert line_of(REPLY.pools) == "Energy of the machine: tracked 60 %, untracked 10 %, uncore 30 %."
    more = [use(Pool.TRACKED, "core_energy", "600100"), *REPLY.pools[5:]]
    assert line_of(more, REPLY.pools) == "Energy of the machine: tracked 100 %, untracked 0 %, uncore 0 %."
    assert line_of(REPLY.pools[:4]) == "Traffic of the machine: tracked 25 %, untracked 75 %."
    assert line_of(REPLY.pools, REPLY.pools) == ""
    # After a restart of the daemon, the figures are lower than before.
    assert line_of([use(Pool.TRACKED, "core_energy", "1")], REPLY.pools) == ""


def test_top_has_the_line(manager: FakeManager, ctl: Ctl) -> None:
    manager.replies = {"Machine": REPLY}
    shown = ctl("top", "-b", "-n", "1", "-d", "0.5").stdout
    assert "of the machine" not in shown  # nothing was used between the two readings
    manager.refuse = {"Machine": error("NotRead", "the kernel has not answered")}
    assert ctl("top", "-b", "-n", "1", "-d", "0.5").returncode == 0


BAR = "█" * 29 + "▒" * 5 + "░" * 14


def test_status_has_the_shares_of_the_pools(manager: FakeManager, ctl: Ctl) -> None:
    manager.replies = {"Machine": REPLY}
    shown = ctl("status", LC_ALL="C.UTF-8").stdout
    assert f"       Used: energy: █ tracked 60 %, ▒ untracked 10 %, ░ uncore 30 %\n{' ' * 13}{BAR}\n" in shown
    plain = ctl("status", LC_ALL="C").stdout
    assert "energy: # tracked 60 %, - untracked 10 %, . uncore 30 %\n" in plain
    assert plain.isascii()


def test_status_is_shown_though_the_counters_cannot_be_read(manager: FakeManager, ctl: Ctl) -> None:
    manager.refuse["Machine"] = error("NotRead", "the kernel has not answered since 12:00")
    done = ctl("status")
    assert done.returncode == 0
    assert (
        "Used: not known: cannot read what the machine used: the kernel has not answered since 12:00" in done.stdout
    )


@pytest.mark.parametrize("values", [("1", "1", "1"), ("0.4", "99", "0.6"), ("7", "0", "0"), ("33", "33", "34")])
def test_bar_has_its_whole_length(values: tuple[str, ...]) -> None:
    pools = (Pool.TRACKED, Pool.FOREIGN, Pool.UNTRACKED)
    used = [use(pool, "core_energy", value) for pool, value in zip(pools, values, strict=True)]
    _, drawn = bar(used, has_blocks=True)
    assert len(drawn) == 48


def test_machine_that_used_nothing_has_no_bar() -> None:
    assert bar([use(Pool.TRACKED, "core_energy", "0")], has_blocks=True) == ()
