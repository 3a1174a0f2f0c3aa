# SPDX-License-Identifier: Apache-2.0
"""The journal entries of ended workloads: with systemd's journal, in the sandbox of the unit."""

from __future__ import annotations

import json

import pytest

from resctrlmond.service.message_ids import MessageId

from .host import RUN, Host
from .machine import Guest


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    return Host(installed_guest)


def test_journal_and_report_have_each_ended_workload_once(host: Host) -> None:
    host.start()
    host.run("systemd-run --unit=web sleep 600")
    host.call("Assign", key="shop", claim="me", cgroup="/sys/fs/cgroup/system.slice/web.service")
    host.call("Release", key="shop", claim="me")
    host.run("journalctl --sync")
    shown = host.out("journalctl --no-pager -o cat -u web.service")
    assert "shop: Used " in shown
    assert "shop: Used " in host.out("systemctl status --no-pager --lines=20 web.service")
    query = f"journalctl --no-pager -o json -u resctrlmond MESSAGE_ID={MessageId.ENDED} RESCTRLMON_KEY=shop"
    (entry,) = map(json.loads, host.out(query).splitlines())
    assert (entry["_UID"], entry["_SYSTEMD_UNIT"]) == ("0", "resctrlmond.service")
    # Another user sends a copy.
    copy = "".join(
        f"{name}={value}\\n" for name, value in entry.items() if name.startswith(("RESCTRLMON_", "MESSAGE"))
    )
    sender = "import socket; s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)"
    data = copy.replace(entry["RESCTRLMON_RUN"], "0" * 32).replace("'", "")
    host.guest.write("/tmp/forge", f"{sender}\ns.sendto(b'{data}', '/run/systemd/journal/socket')\n")
    host.run("setpriv --reuid 1000 --clear-groups python3 /tmp/forge && journalctl --sync")
    found = json.loads(host.out("resctrlctl report --since today --by unit --json"))
    assert [(group["name"], group["runs"]) for group in found["groups"]] == [("web.service", 1)]
    # As after a kill between the entry and the close of the record: the service asks the journal.
    sent = {name: value for name, value in entry.items() if not name.startswith("_")}
    waiting = f"{RUN}/ledger/{entry['RESCTRLMON_RUN']}"
    host.run(f"systemctl stop resctrlmond && mkdir -p {RUN}/ledger")
    host.guest.write(waiting, json.dumps(sent))
    host.start()
    host.until(lambda: host.run(f"test -e {waiting}", check=False).returncode != 0, "the answer of the journal")
    host.run("journalctl --sync")
    assert len(host.out(query).splitlines()) == 1
    host.run("systemctl stop web")
