# SPDX-License-Identifier: Apache-2.0
"""The verb machine: the table of pools."""

from __future__ import annotations

import json
import subprocess
from decimal import Decimal

import msgspec
import pytest
from msgspec.structs import replace

from resctrlctl.host.machine import bar, blocks, line, rates_since, shares
from resctrlctl.screen.layout import to_text
from resctrlmond.api.types import MachineReply, PoolUse
from resctrlmond.resctrl.kinds import Kind
from resctrlmond.workloads.model.states import Pool, Quality
from tests.ctl.conftest import Ctl, command
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
AT = "2026-11-22T10:00:00.5Z"
# Half a second later: 75 J and 0.5 GiB more in tracked, 25 J and 1.5 GiB more in untracked.
LATER = replace(
    REPLY,
    read_at=AT,
    pools=[
        *REPLY.pools[:2],
        replace(REPLY.pools[2], value=str((1 << 30) + (1 << 29))),
        replace(REPLY.pools[3], value=str((3 << 30) + (3 << 29))),
        replace(REPLY.pools[4], value="600075.000000"),
        REPLY.pools[5],
        replace(REPLY.pools[6], value="100025.5"),
        REPLY.pools[7],
    ],
)
RATES = """\
Use per second, in 0.5 s: 200W, 4.00GiB/s

POOL                                 POWER  SHARE  BANDWIDTH  SHARE  QUALITY
tracked    workloads                  150W   75 %  1.00GiB/s   25 %  exact
foreign    groups of other programs     0W    0 %          -      -  exact
untracked  tasks in no group           50W   25 %  3.00GiB/s   75 %  estimated
uncore     packages without cores       0W    0 %          -      -  exact

Use of the machine from 2026-11-22 09:00:00 to 2026-11-22 10:00:00
"""


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
    assert ctl("machine").stdout == TEXT, "no time has passed between the two readings"
    calls = len(manager.called("Machine"))
    assert ctl("machine", "-q").stdout == "tracked\nforeign\nuntracked\nuncore\n"
    assert msgspec.json.decode(ctl("machine", "--json").stdout, type=MachineReply) == REPLY
    assert len(manager.called("Machine")) == calls + 2, "neither waits for a second reading"
    assert "mon_PERF_PKG_00" in ctl("machine", "--domains").stdout


def test_verb_prints_power_and_bandwidth_between_two_readings(manager: FakeManager, ctl: Ctl) -> None:
    manager.next_replies = {"Machine": [REPLY, LATER]}
    done = ctl("machine")
    assert done.stdout.startswith(RATES)
    manager.next_replies = {"Machine": [REPLY, LATER]}
    reply = json.loads(ctl("machine", "--json", "--rate").stdout)
    assert reply["intervalS"] == 0.5
    assert msgspec.convert(reply, MachineReply) == LATER
    tracked = {"pool": "tracked", "watts": "150.000000", "wattsShare": "0.750000"}
    traffic = {"bytesPerSecond": "1073741824.000000", "bytesPerSecondShare": "0.250000"}
    nothing = dict.fromkeys(["watts", "wattsShare"])
    assert reply["rates"][:3] == [
        tracked | traffic | {"domain": None},
        nothing | traffic | {"pool": "tracked", "domain": "mon_L3_00"},
        tracked | dict.fromkeys(traffic) | {"domain": "mon_PERF_PKG_00"},
    ]
    assert [each["pool"] for each in reply["rates"] if each["domain"] is None] == [*Pool]


def test_watch_prints_each_interval(manager: FakeManager, environment: dict[str, str]) -> None:
    manager.next_replies = {"Machine": [REPLY, LATER, replace(LATER, read_at="2026-11-22T10:00:02.5Z")]}
    words = command(manager.socket, "machine", "--watch=0.5", "--json")
    with subprocess.Popen(words, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        replies = [json.loads(process.stdout.readline()) for _ in range(2)]
        process.kill()
    assert [reply["intervalS"] for reply in replies] == [0.5, 2.0]
    assert [reply["rates"][0]["watts"] for reply in replies] == ["150.000000", "0.000000"]


def test_rate_of_a_figure_that_was_unknown_is_unknown() -> None:
    pools = [use(Pool.TRACKED, "core_energy", None, "no number"), *REPLY.pools[5:]]
    later = replace(LATER, pools=LATER.pools[4:])
    seconds, rates = rates_since(later, replace(REPLY, pools=pools))
    assert (seconds, rates[0].value, Decimal(rates[1].value or 1)) == (0.5, None, Decimal(0))
    assert line(rates) == ""


def test_line_has_the_rates_since_the_reading_before() -> None:
    def line_of(reply: MachineReply, before: MachineReply | None = None) -> str:
        return line(rates_since(reply, before)[1])

    assert line_of(LATER, REPLY) == "200W (tracked 75 %, untracked 25 %, uncore 0 %), 4.00GiB/s"
    assert line_of(replace(LATER, pools=LATER.pools[:4]), REPLY) == "4.00GiB/s (tracked 25 %, untracked 75 %)"
    assert line_of(REPLY, REPLY) == ""
    # On average since counting began, for the first reading, and if resctrl was mounted again.
    average = "278W (tracked 60 %, untracked 10 %, uncore 30 %), 1.14MiB/s"
    assert line_of(REPLY) == line_of(REPLY, replace(REPLY, since=AT)) == average
    # After a restart of the daemon, the figures may be lower than before.
    assert line_of(replace(LATER, pools=[use(Pool.TRACKED, "core_energy", "1")]), REPLY) == "0W"


def test_top_has_the_line(manager: FakeManager, ctl: Ctl) -> None:
    manager.next_replies = {"Machine": [REPLY, LATER]}
    shown = ctl("top", "-b", "-n", "1", "-d", "0.5").stdout
    assert "\nMachine: 200W (tracked 75 %, untracked 25 %, uncore 0 %), 4.00GiB/s.\n" in shown
    manager.refuse = {"Machine": error("NotRead", "the kernel has not answered")}
    done = ctl("top", "-b", "-n", "1", "-d", "0.5")
    assert (done.returncode, "Machine" in done.stdout) == (0, False)


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
