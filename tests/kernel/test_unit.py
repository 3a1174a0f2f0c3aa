# SPDX-License-Identifier: Apache-2.0
"""The units as systemd sees them: valid, closed, and open where they must be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .host import RUN, Host
from .machine import Guest

UNITS = "resctrlmond.service resctrlmond.socket sys-fs-resctrl.mount"
EXAMPLE = Path(__file__).parents[2] / "packaging" / "examples" / "nri-resctrl-mon.conf"
ELSEWHERE = "/run/nri-resctrl-mon"


@pytest.fixture(scope="module")
def host(installed_guest: Guest) -> Host:
    return Host(installed_guest)


def test_systemd_has_nothing_against_the_units(host: Host) -> None:
    done = host.run(f"cd /usr/lib/systemd/system && systemd-analyze verify --man=no {UNITS}", timeout=100)
    assert done.output == ""


def test_the_service_can_do_little_beside_its_job(host: Host) -> None:
    # The scale is from 0 (closed) to 10; tenths are given as whole numbers here.
    exposure = "systemd-analyze security --offline=yes --threshold=15 resctrlmond.service"
    assert host.run(exposure, check=False, timeout=100).returncode == 0
    report = json.loads(host.out(f"{exposure} --json=short", timeout=100))
    # Each has its reason in the unit.
    assert {row["json_field"] for row in report if row["exposure"]} <= {
        *("CapabilityBoundingSet_CAP_DAC_FOWNER_IPC_OWNER", "DeviceAllow", "PrivateNetwork", "PrivateUsers"),
        *("ProtectProc", "RestrictAddressFamilies_AF_UNIX", "RootDirectoryOrRootImage", "UMask", "UserOrDynamicUser"),
    }


def test_begin_and_end_values_can_stand_where_nri_resctrl_mon_has_them(host: Host) -> None:
    host.guest.put(EXAMPLE, "/etc/systemd/system/resctrlmond.service.d/nri-resctrl-mon.conf")
    host.guest.write("/etc/resctrlmond/resctrlmond.yaml", f"groups_dir: {ELSEWHERE}\n")
    host.run("systemctl daemon-reload && systemctl restart resctrlmond")
    for generation in (1, 2):
        assert host.call("Create", key="web", claim="me")["group"]["generation"] == generation
        assert host.run(f"cat {ELSEWHERE}/web/mon_data/mon_L3_00/*.begin").stdout
        host.call("Release", key="web", claim="me")
        assert host.run(f"cat {ELSEWHERE}/web/mon_data/mon_L3_00/*.end").stdout
    assert host.out(f"ls {RUN}/completed/web") == "1"
