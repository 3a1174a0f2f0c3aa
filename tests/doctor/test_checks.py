# SPDX-License-Identifier: Apache-2.0
"""The verb doctor finds each fault of a machine, states its remedy, and finds nothing on a sound machine.

The machine is a directory with its files (machine_tree.py), so that each file can be broken.
"""

from __future__ import annotations

import grp
import json
import os
import pwd
import shlex
import shutil
import socket
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from resctrlctl.arguments.command_line import parse
from resctrlctl.base.defaults import SOCKET as DEFAULT_SOCKET
from resctrlctl.doctor import service, verb
from resctrlctl.doctor.finding import Finding, Severity
from resctrlctl.doctor.host import Host
from resctrlctl.screen.layout import to_text
from resctrlctl.screen.output import Json, Output
from resctrlmond.host.unit_exec import PROGRAM
from resctrlmond.host.unit_exec import SOCKET as UNIT_SOCKET
from tests.ctl.conftest import Ctl
from tests.ctl.fake_manager import FakeManager
from tests.doctor.machine_tree import (
    CONFIGURATION,
    FAILED,
    FLAGS,
    HOOK_PROGRAM,
    HOOKS,
    KERNEL_CONFIG,
    MARK,
    MOUNTS,
    OPTIONS,
    RESCTRL,
    SOCKET,
    UNIT,
    MachineTree,
    answering_machine,
)

CONTAINERD = "/etc/containerd/config.toml"
UUID = "0f0e0d0c-ad00-4c0b-9f0e-0123456789ab"


def faults(machine: MachineTree, check: str = "") -> list[Finding]:
    """Return all findings, or those of one check, that are not ok."""
    findings = verb.examine(machine.host).findings
    return [each for each in findings if each.severity is not Severity.OK and check in ("", each.check)]


def fault(machine: MachineTree, check: str) -> Finding:
    """Return the only fault of the machine, which one check finds."""
    (found,) = faults(machine)
    assert found.check == check
    return found


def test_sound_machine_has_no_fault(machine: MachineTree) -> None:
    report = verb.examine(machine.host)
    assert [finding for finding in report.findings if finding.severity is not Severity.OK] == []
    assert report.worst is Severity.OK
    assert {"resctrl", "mount", "events", "energy", "rmids", "daemon", "socket", "bus", "hooks", "rivals"} <= {
        finding.check for finding in report.findings
    }


# -- why there are no joules


def test_energy_needs_a_processor_of_intel(machine: MachineTree) -> None:
    machine.remove_energy()
    machine.processor("AuthenticAMD", "AMD EPYC 9755", FLAGS)
    found = fault(machine, "energy")
    assert found.severity is Severity.NOTE
    assert "AMD EPYC 9755" in found.what


@pytest.mark.parametrize("by", ["flag", "systemd", "dmi"])
def test_energy_is_not_counted_in_a_virtual_machine(machine: MachineTree, by: str) -> None:
    machine.remove_energy()
    match by:
        case "flag":
            machine.processor("GenuineIntel", "Xeon", f"{FLAGS} hypervisor")
        case "systemd":
            machine.program("/usr/bin/systemd-detect-virt", "echo kvm")
        case _:
            machine.write("/sys/class/dmi/id/sys_vendor", "QEMU\n")
    found = fault(machine, "energy")
    assert found.severity is Severity.NOTE
    assert "virtual machine" in found.what


@pytest.mark.parametrize("option", OPTIONS[:3])
def test_energy_needs_drivers_that_are_built_in(machine: MachineTree, option: str) -> None:
    machine.remove_energy()
    text = machine.path(KERNEL_CONFIG).read_text()
    text = text.replace(f"CONFIG_{option}=y", f"CONFIG_{option}=m").replace(
        "CONFIG_X86_CPU_RESCTRL_INTEL_AET=y\n", ""
    )
    machine.write(KERNEL_CONFIG, text)
    found = fault(machine, "energy")
    assert found.severity is Severity.WARNING, "the hardware has the energy telemetry"
    assert f"{option}=m" in found.what
    assert "X86_CPU_RESCTRL_INTEL_AET=n" in found.what
    assert KERNEL_CONFIG in found.what
    assert all(f"-e {name}" in found.fix[2] for name in OPTIONS)


def test_kernel_without_energy_is_only_a_note_if_the_hardware_is_unknown(machine: MachineTree) -> None:
    machine.remove_energy()
    machine.write(KERNEL_CONFIG, "CONFIG_X86_CPU_RESCTRL=y\n")
    machine.remove("/sys/class/intel_pmt/telem1/guid")
    found = faults(machine, "energy")
    assert [each.severity for each in found] == [Severity.NOTE, Severity.NOTE]
    assert "no telemetry device" in found[0].what
    assert "modprobe" in found[0].fix[0]


def test_energy_telemetry_is_recognized_by_its_guid(machine: MachineTree) -> None:
    machine.remove_energy()
    machine.write("/sys/class/intel_pmt/telem1/guid", "0x1a067102\n")
    assert "no telemetry region" in fault(machine, "energy").what


def test_configuration_of_the_kernel_is_found_in_each_place(machine: MachineTree) -> None:
    machine.remove_energy()
    text = machine.path(KERNEL_CONFIG).read_text()
    machine.remove(KERNEL_CONFIG)
    assert "configuration was not found" in fault(machine, "energy").what
    machine.write("/boot/config-7.3.4-custom", text.replace("TPMI=y", "TPMI=m"))
    assert "INTEL_TPMI=m in /boot/config-7.3.4-custom" in fault(machine, "energy").what


def test_rdt_parameter_that_turns_energy_off_is_named_with_its_file_and_line(machine: MachineTree) -> None:
    machine.remove_energy()
    machine.write("/proc/cmdline", "root=/dev/sda1 rdt=!energy,perf quiet\n")
    machine.write("/etc/default/grub", '# rdt=\nGRUB_CMDLINE_LINUX="rdt=!energy,perf"\n')
    found = fault(machine, "energy")
    assert found.severity is Severity.WARNING
    assert found.fix[0].startswith("/etc/default/grub:2: remove !energy")


def test_insufficient_rmids_in_the_kernel_log_are_reported(machine: MachineTree) -> None:
    machine.remove_energy()
    machine.log(
        "0,0,0,-;Linux", "6,7,9,-;PERF_PKG energy:0x26696143 monitoring not enabled due to insufficient RMIDs"
    )
    found = fault(machine, "energy")
    assert "insufficient RMIDs" in found.what
    assert "rdt=energy" in found.fix[0]


def test_log_without_its_beginning_and_unreadable_log_are_notes(machine: MachineTree) -> None:
    machine.remove_energy()
    machine.log("6,7000,9,-;late")
    assert "has lost the messages of its start" in fault(machine, "energy").what
    machine.remove("/dev/kmsg")
    machine.path("/dev/kmsg").symlink_to("kmsg")
    found = fault(machine, "energy")
    assert "/dev/kmsg: Too many levels of symbolic links" in found.what
    assert found.fix == ("sudo resctrlctl doctor",)


def test_energy_that_was_not_found_at_the_first_mount_needs_a_reboot(machine: MachineTree) -> None:
    machine.remove_energy()
    found = fault(machine, "energy")
    assert "when resctrl was first mounted" in found.what
    assert found.fix[-1] == "reboot"


# -- resctrl


def test_processor_without_monitoring_is_an_error(machine: MachineTree) -> None:
    shutil.rmtree(machine.path(RESCTRL))
    machine.mounts(*MOUNTS[:2])
    machine.processor("GenuineIntel", "Atom", "fpu hypervisor")
    (found,) = (each for each in faults(machine) if each.severity is Severity.ERROR)
    assert found.check == "processor"
    assert "hypervisor hides" in found.why


def test_kernel_without_resctrl_is_an_error(machine: MachineTree) -> None:
    shutil.rmtree(machine.path(RESCTRL))
    machine.mounts(*MOUNTS[:2])
    machine.write(KERNEL_CONFIG, "CONFIG_X86=y\n")
    (found,) = (each for each in faults(machine) if each.severity is Severity.ERROR)
    assert (found.check, "CONFIG_X86_CPU_RESCTRL" in found.what) == ("resctrl", True)


def test_resctrl_that_is_not_mounted_is_an_error(machine: MachineTree) -> None:
    machine.mounts(*MOUNTS[:2])
    shutil.rmtree(machine.path(f"{RESCTRL}/info"))
    (found,) = faults(machine, "mount")
    assert found.severity is Severity.ERROR
    assert found.fix == ("systemctl enable --now sys-fs-resctrl.mount",)


def test_filesystem_over_resctrl_is_an_error(machine: MachineTree) -> None:
    machine.mounts(*MOUNTS, f"50 41 0:40 / {RESCTRL} rw - tmpfs tmpfs rw")
    (found,) = faults(machine, "mount")
    assert "tmpfs is mounted over" in found.what
    assert found.fix == (f"umount {RESCTRL}",)


@pytest.mark.parametrize("point", ["/mnt/resctrl", RESCTRL])
def test_second_mount_takes_nothing_away(machine: MachineTree, point: str) -> None:
    machine.mounts(*MOUNTS, f"50 22 0:38 / {point} rw - resctrl resctrl rw")
    assert faults(machine) == []


def test_mount_at_another_place_is_an_error(machine: MachineTree) -> None:
    machine.mounts(*MOUNTS[:2], "50 22 0:38 / /mnt/resctrl rw - resctrl resctrl rw")
    (found,) = faults(machine, "mount")
    assert "/mnt/resctrl, and the daemon expects it at" in found.what


def test_place_of_the_mount_is_that_of_the_configuration(machine: MachineTree) -> None:
    machine.write(CONFIGURATION, f"resctrl: /mnt/resctrl\ngroup: {MARK}\n")
    (found,) = faults(machine, "mount")
    assert "the daemon expects it at /mnt/resctrl" in found.what


@pytest.mark.parametrize(
    ("value", "severity"), [("!mbmtotal", Severity.WARNING), ("!cmt,!mbmtotal,!mbmlocal", Severity.ERROR)]
)
def test_rdt_parameter_that_turns_monitoring_off_is_found(
    machine: MachineTree, value: str, severity: Severity
) -> None:
    machine.write("/proc/cmdline", f"rdt={value}\n")
    machine.write("/boot/loader/entries/debian.conf", f"title Debian\noptions rdt={value}\n")
    found = fault(machine, "kernel-parameter")
    assert found.severity is severity
    assert "mbm_total_bytes" in found.what
    assert found.fix[0].startswith("/boot/loader/entries/debian.conf:2: remove")
    assert ("does not start" in found.why) == (severity is Severity.ERROR)
    assert found.fix[1].startswith("reboot")
    machine.program("/usr/sbin/update-grub")
    assert fault(machine, "kernel-parameter").fix[1].startswith("update-grub && reboot")


def test_unknown_word_of_the_rdt_parameter_is_found(machine: MachineTree) -> None:
    machine.write("/proc/cmdline", "rdt=!mba,mbm_total,perf:26557651\n")
    assert "does not know: mbm_total" in fault(machine, "kernel-parameter").what


def test_resctrl_without_monitoring_is_an_error(machine: MachineTree) -> None:
    shutil.rmtree(machine.path(f"{RESCTRL}/info/L3_MON"))
    machine.remove_energy()
    assert "counts nothing" in faults(machine, "events")[0].what


def test_reallocated_bandwidth_counters_are_found_with_the_remedy(machine: MachineTree) -> None:
    machine.write(f"{RESCTRL}/info/L3_MON/mbm_assign_mode", "mbm_event\n[default]\n")
    found = fault(machine, "bandwidth")
    assert found.severity is Severity.WARNING
    assert found.fix == (f"echo mbm_event >{RESCTRL}/info/L3_MON/mbm_assign_mode",)
    machine.write(f"{RESCTRL}/info/L3_MON/mbm_assign_mode", "[default]\n")
    machine.write("/sys/devices/system/cpu/modalias", "cpu:type:x86,ven0002fam0019mod0001:feature:\n")
    found = fault(machine, "bandwidth")
    assert (found.severity, found.fix) == (Severity.NOTE, ())
    assert "does not offer the mode mbm_event" in found.why


def test_assignable_bandwidth_counters_are_counted(machine: MachineTree) -> None:
    folder = f"{RESCTRL}/info/L3_MON"
    machine.write(f"{folder}/mbm_assign_mode", "[mbm_event]\ndefault\n")
    machine.write(f"{folder}/num_mbm_cntrs", "0=32;1=32\n")
    machine.write(f"{folder}/available_mbm_cntrs", "0=30;1=2\n")
    machine.write(f"{folder}/mbm_assign_on_mkdir", "1\n")
    assert faults(machine) == []
    machine.write(f"{folder}/available_mbm_cntrs", "0=30;1=0\n")
    found = fault(machine, "bandwidth")
    assert "30 of 32 in mon_L3_00, 0 of 32 in mon_L3_01" in found.what
    assert found.severity is Severity.WARNING
    assert "Unassigned" in found.why
    assert found.fix
    machine.write(f"{folder}/available_mbm_cntrs", "0=30;1=2\n")
    machine.write(f"{folder}/mbm_assign_on_mkdir", "0\n")
    assert fault(machine, "bandwidth").severity is Severity.NOTE


def test_counters_of_a_resource_other_than_l3_are_examined(machine: MachineTree) -> None:
    folder = f"{RESCTRL}/info/MB_MON"
    machine.write(f"{RESCTRL}/info/L3_MON/mon_features", "llc_occupancy\n")
    machine.write(f"{folder}/num_rmids", "94\n")
    machine.write(f"{folder}/mon_features", "mbm_total_bytes\n")
    machine.write(f"{folder}/mbm_assign_mode", "[mbm_event]\ndefault\n")
    machine.write(f"{folder}/num_mbm_cntrs", "0=9\n")
    machine.write(f"{folder}/available_mbm_cntrs", "0=0\n")
    assert "available: 0 of 9 in mon_MB_00" in fault(machine, "bandwidth").what


def test_work_of_the_kernel_that_is_counted_elsewhere_is_found(machine: MachineTree) -> None:
    machine.write(f"{RESCTRL}/info/kernel_mode", "[inherit_ctrl_and_mon]\nglobal_assign_ctrl_assign_mon\n")
    assert faults(machine) == []
    machine.write(f"{RESCTRL}/info/kernel_mode", "inherit_ctrl_and_mon\n[global_assign_ctrl_assign_mon]\n")
    found = fault(machine, "kernel-mode")
    assert (found.severity, found.fix) == (
        Severity.WARNING,
        (f"echo inherit_ctrl_and_mon >{RESCTRL}/info/kernel_mode",),
    )
    assert "info/kernel_mode: global_assign_ctrl_assign_mon" in found.what


# -- RMIDs


def test_users_of_rmids_are_counted_by_owner(machine: MachineTree) -> None:
    for number in range(60):
        machine.group(f"taken{number}")
    machine.group(UUID)
    machine.group("a" * 64)
    found = fault(machine, "rmids")
    assert found.severity is Severity.ERROR
    assert found.what.startswith("0 of 64 RMIDs are free; used: 1 by classes, 1 by groups of resctrlmond, ")
    assert "1 by foreign groups named after containers" in found.what
    assert "1 by foreign groups named after pods" in found.what
    assert "60 by foreign groups of unknown programs" in found.what
    assert found.fix[0].startswith(f"rmdir {RESCTRL}/mon_groups/")
    command, _, _ = found.fix[0].partition("  #")
    assert len(shlex.split(command)) == 1 + 7, "then more than a tenth is free"


def test_names_of_foreign_groups_are_quoted(machine: MachineTree) -> None:
    for number in range(62):
        machine.group(f"a b;{number:02}")
    command, _, _ = fault(machine, "rmids").fix[0].partition("  #")
    assert shlex.split(command)[1] == f"{RESCTRL}/mon_groups/a b;00"


def test_mark_is_that_of_the_configuration_if_the_daemon_never_ran(machine: MachineTree) -> None:
    shutil.rmtree(machine.path("/run/resctrlmond/records"))
    (found,) = (each for each in verb.examine(machine.host).findings if each.check == "rmids")
    assert "1 by groups of resctrlmond" in found.what


def test_few_free_rmids_are_a_warning(machine: MachineTree) -> None:
    for number in range(56):
        machine.group(f"own{number}", MARK)
    found = fault(machine, "rmids")
    assert found.severity is Severity.WARNING
    assert not any("rmdir" in line for line in found.fix), "no foreign group exists"


def test_threshold_with_which_no_rmid_leaves_limbo_is_found(machine: MachineTree) -> None:
    file = f"{RESCTRL}/info/L3_MON/max_threshold_occupancy"
    machine.write(file, "0\n")
    found = fault(machine, "rmids")
    folder = os.path.dirname(file)
    assert found.fix[0].startswith(f"(cd {folder} && n={32768 * 1024 // 64} && while ")
    # A file that reads what was written to it: the kernel may round the number down to 0, as in the guest.
    subprocess.run(["sh", "-c", found.fix[0].replace(folder, str(machine.path(folder)))], check=True, timeout=60)
    assert machine.path(file).read_text() == f"{32768 * 1024 // 64}\n"


# -- the daemon


@pytest.mark.parametrize(
    ("state", "severity", "text"),
    [
        (FAILED, Severity.ERROR, "failed at Sat 2026-11-21 11:13:22 UTC (exit-code, exit status 69)"),
        (UNIT | {"ActiveState": "inactive"}, Severity.ERROR, "is inactive"),
        (
            UNIT | {"ActiveState": "inactive", "InactiveEnterTimestamp": "Sat"},
            Severity.ERROR,
            "is inactive since Sat",
        ),
        (UNIT | {"ActiveState": "activating", "SubState": "auto-restart"}, Severity.WARNING, "auto-restart"),
        (UNIT | {"UnitFileState": "disabled"}, Severity.NOTE, "not started at boot"),
        (UNIT | {"NRestarts": "2", "InactiveEnterTimestamp": "Sat"}, Severity.WARNING, "restarted 2 times"),
        (UNIT | {"LoadState": "not-found", "ActiveState": "inactive"}, Severity.ERROR, "is not installed"),
        (UNIT | {"LoadState": "masked", "ActiveState": "inactive"}, Severity.ERROR, "is masked"),
    ],
    ids=lambda value: "" if isinstance(value, dict) else str(value),
)
def test_state_of_the_unit_is_explained(
    machine: MachineTree, state: dict[str, str], severity: Severity, text: str
) -> None:
    machine.unit(state)
    found = fault(machine, "daemon")
    assert found.severity is severity
    assert text in found.what
    assert found.fix


def test_unit_is_not_examined_without_systemctl(machine: MachineTree) -> None:
    machine.remove("/usr/bin/systemctl")
    assert fault(machine, "daemon").severity is Severity.NOTE


def test_stopped_daemon_is_not_started_by_a_connection(machine: MachineTree, manager: FakeManager) -> None:
    machine.unit(UNIT | {"ActiveState": "inactive"})
    assert faults(machine, "socket") == []
    assert not manager.called("Status")


def test_missing_socket_is_an_error(machine: MachineTree) -> None:
    machine.remove(SOCKET)
    found = fault(machine, "socket")
    assert found.what == f"{SOCKET} does not exist"
    assert found.fix == ("systemctl restart resctrlmond.socket resctrlmond.service",)


def test_file_in_the_place_of_the_socket_is_an_error(machine: MachineTree) -> None:
    machine.remove(SOCKET)
    machine.write(SOCKET, "")
    assert "is not a socket" in fault(machine, "socket").what


def test_socket_without_a_listener_is_an_error(machine: MachineTree) -> None:
    machine.remove(SOCKET)
    machine.bind()
    found = fault(machine, "socket")
    assert "Connection refused" in found.what


@pytest.mark.parametrize("is_mode", [True, False])
def test_socket_that_its_group_cannot_use_is_a_warning(machine: MachineTree, is_mode: bool) -> None:
    if is_mode:
        machine.path(SOCKET).chmod(0o600)
    else:
        os.chown(machine.path(SOCKET), -1, 0)
    found = fault(machine, "socket")
    assert found.severity is Severity.WARNING
    assert "cannot use" in found.what
    assert found.fix == (f"chgrp {MARK} {SOCKET} && chmod 0660 {SOCKET}",)


@pytest.mark.parametrize("kind", ["a file", "nothing", "a socket without a listener"])
def test_remedy_for_another_socket_changes_nothing_of_this_machine(machine: MachineTree, kind: str) -> None:
    path = machine.root / "other"
    if kind == "a file":
        path.write_text("do not remove\n")
    elif kind == "a socket without a listener":
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as opened:
            opened.bind(str(path))
    (found,) = verb.examine(Host(socket=str(path))).findings
    assert found.severity is Severity.ERROR
    assert str(path) in found.what
    assert found.fix == (
        "Start the daemon of that socket, or omit --socket and RESCTRLMOND_SOCKET to examine this machine",
    )


def test_remedy_for_a_user_without_access_is_a_group_that_only_reads(manager: FakeManager) -> None:
    reader = next(group.gr_name for group in grp.getgrall() if group.gr_gid)
    # Another user cannot search the directories of pytest.
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        machine = answering_machine(Path(root) / "m", manager)
        machine.write(CONFIGURATION, f"group: {MARK}\nread_group: {reader}\n")
        machine.path(SOCKET).chmod(0)
        os.seteuid(65534)  # root may use any socket
        try:
            user = pwd.getpwuid(os.geteuid()).pw_name
            own = [found for found in service.check_socket(machine.host) if "may not use" in found.what]
            other = list(service.check_socket(Host(socket=str(machine.path(SOCKET)))))
        finally:
            os.seteuid(0)
    assert [found.fix for found in own] == [(f"usermod -aG {reader} {user}  # as root; then log in again",)]
    assert [found.fix for found in other] == [("Run resctrlctl as one of them",)]


@pytest.mark.parametrize("limit", ["size=512k", "nr_inodes=50"])
def test_full_filesystem_of_the_records_is_an_error(machine: MachineTree, limit: str) -> None:
    path = machine.path("/run/resctrlmond")
    subprocess.run(["mount", "-t", "tmpfs", "-o", limit, "none", str(path)], check=True)
    try:
        found = faults(machine, "space")
    finally:
        subprocess.run(["umount", str(path)], check=True)
    assert [each.severity for each in found] == [Severity.ERROR]
    assert ("space" if limit.startswith("size") else "inodes") in found[0].what
    assert faults(machine, "space") == []


def test_missing_group_is_an_error(machine: MachineTree) -> None:
    machine.write(CONFIGURATION, "group: no-such-group\n")
    (found,) = faults(machine, "socket")
    assert found.fix == ("systemd-sysusers",)


def test_wrong_configuration_is_an_error_with_its_line(machine: MachineTree) -> None:
    machine.write(CONFIGURATION, f"group: {MARK}\nlinger: maybe\n")
    (found,) = faults(machine, "configuration")
    assert found.severity is Severity.ERROR
    assert "line 2" in found.what or ":2" in found.what


def test_problems_of_the_daemon_are_findings(machine: MachineTree, manager: FakeManager) -> None:
    reply = manager.replies["Status"]
    manager.replies["Status"] = msgspec.structs.replace(reply, problems=["another program removes groups"])
    found = fault(machine, "problem")
    assert (found.severity, found.what) == (Severity.WARNING, "another program removes groups")
    # The witness has a unit of its own.
    assert "-u 'resctrlmond*.service'" in found.fix[0]


@pytest.mark.parametrize(
    ("pending", "in_limbo", "text"),
    [(1, False, "1 workload waits for an RMID"), (2, True, "2 workloads wait for an RMID; freed RMIDs are in limbo")],
)
def test_workloads_that_wait_for_an_rmid_are_a_warning(
    machine: MachineTree, manager: FakeManager, pending: int, in_limbo: bool, text: str
) -> None:
    reply = manager.replies["Status"]
    manager.replies["Status"] = msgspec.structs.replace(reply, pending=pending, in_limbo=in_limbo)
    found = fault(machine, "rmids")
    assert (found.severity, found.what) == (Severity.WARNING, text)


def test_missing_and_broken_bus_policies_are_found(machine: MachineTree) -> None:
    policy = "/usr/share/dbus-1/system.d/org.resctrlmon1.conf"
    machine.write(policy, "<busconfig>")
    assert "is not valid XML" in fault(machine, "bus").what
    machine.remove(policy)
    assert "there is no bus policy" in fault(machine, "bus").what
    machine.write(CONFIGURATION, f"group: {MARK}\ndbus: false\n")
    assert faults(machine) == []


# -- container runtimes


def test_hook_file_that_names_a_missing_program_is_an_error(machine: MachineTree) -> None:
    machine.remove(HOOK_PROGRAM)
    found = fault(machine, "hooks")
    assert found.severity is Severity.ERROR
    assert HOOK_PROGRAM in found.what
    assert found.fix[0].startswith(f"rm {HOOKS}/resctrlmon-createRuntime.json  # containers start again")
    assert found.fix[1].endswith("resctrlctl hooks enable")


@pytest.mark.parametrize("text", ['{"hook":', "[]", '{"version": "1.0.0"}', '{"hook": {"path": 7}}'])
@pytest.mark.parametrize("folder", [HOOKS, "/etc/containers/oci/hooks.d"])
def test_invalid_hook_file_is_an_error(machine: MachineTree, text: str, folder: str) -> None:
    machine.write(f"{folder}/other.json", text)
    found = fault(machine, "hooks")
    assert f"{folder}/other.json is not a hook file" in found.what
    assert found.fix[0].startswith(f"rm {folder}/other.json")


def test_fault_in_a_hook_file_is_described(machine: MachineTree) -> None:
    machine.write(f"{HOOKS}/other.json", '{"version": "1.0.0"}')
    assert fault(machine, "hooks").what.endswith("'hook' is missing")
    machine.write(f"{HOOKS}/other.json", '{\n"hook": }')
    assert "line 2" in fault(machine, "hooks").what


def test_link_to_a_missing_hook_file_is_an_error(machine: MachineTree) -> None:
    name = f"{HOOKS}/resctrlmon-createRuntime.json"
    machine.remove(name)
    machine.path(name).symlink_to("/none")
    assert "does not exist" in fault(machine, "hooks").what


def test_hook_that_is_not_enabled_is_a_note_if_a_runtime_would_call_it(machine: MachineTree) -> None:
    machine.remove(f"{HOOKS}/resctrlmon-createRuntime.json")
    assert fault(machine, "hooks").fix == ("resctrlctl hooks enable",)
    machine.remove("/usr/bin/podman")
    assert faults(machine) == []


UNIT_FILE = "/usr/lib/systemd/system/web.service"
DROP_IN = "/etc/systemd/system/web.service.d/zz-resctrlmon-exact.conf"


def exact(machine: MachineTree, original: str = "ExecStart=-/usr/bin/web $A") -> None:
    """Add a service with a drop-in of 'resctrlctl units exact', and a systemctl that shows both files."""
    machine.write(UNIT_FILE, "[Service]\nExecStart=-/usr/bin/web $A\n")
    text = f"[Service]\nExecStart=\nExecStart=-{PROGRAM} /usr/bin/web $A\n\n[X-Resctrlmon]\nOriginal={original}\n"
    machine.write(DROP_IN, text)
    machine.program(PROGRAM)
    machine.listen(SOCKET, UNIT_SOCKET)
    shown = "".join(
        f'[ ! -e {machine.path(path)} ] || {{ echo "# {path}"; cat {machine.path(path)}; echo; }}\n'
        for path in (UNIT_FILE, DROP_IN)
    )
    other = machine.path("/usr/bin/systemctl").read_text().partition("\n")[2]
    machine.program("/usr/bin/systemctl", f'if [ "$1" = cat ]; then\n{shown}exit 0\nfi\n{other}')


def test_exact_service_is_without_fault(machine: MachineTree) -> None:
    exact(machine)
    assert faults(machine) == []


def test_exact_service_whose_commands_have_changed_is_a_warning(machine: MachineTree) -> None:
    exact(machine, original="ExecStart=/usr/bin/old")
    found = fault(machine, "exact-units")
    assert found.severity is Severity.WARNING
    assert found.what.endswith("have changed since 'resctrlctl units exact': ExecStart=-/usr/bin/web $A")
    assert found.fix == ("resctrlctl units exact web.service",)
    machine.write(f"{UNIT_FILE}", "[Service]\nExecStart=/usr/bin/old\nExecReload=/bin/true\n")
    assert fault(machine, "exact-units").what.endswith("ExecReload=/bin/true")
    machine.write(f"{UNIT_FILE}", "[Service]\nExecStart=/usr/bin/old\n")
    assert faults(machine) == []


def test_exact_service_that_is_gone_is_a_warning(machine: MachineTree) -> None:
    exact(machine)
    machine.remove(UNIT_FILE)
    found = fault(machine, "exact-units")
    assert f"web.service is gone, and its drop-in {DROP_IN} is left" in found.what
    assert found.fix == ("resctrlctl units inexact web.service",)


def test_exact_service_without_the_program_or_its_socket_is_a_fault(machine: MachineTree) -> None:
    exact(machine)
    machine.listen(SOCKET)
    assert fault(machine, "exact-units").fix == ("systemctl enable --now resctrlmond-unit.socket",)
    machine.remove(PROGRAM)
    found = fault(machine, "exact-units")
    assert found.severity is Severity.ERROR
    assert "1 service would be started through it" in found.what


def test_docker_is_a_note(machine: MachineTree) -> None:
    machine.write("/run/docker.sock", "")
    assert "Docker does not call" in fault(machine, "hooks").what


@pytest.mark.parametrize(
    ("text", "fix"),
    [
        (
            "",
            (
                f"{CONTAINERD}: add:",
                "version = 2",
                '[plugins."io.containerd.nri.v1.nri"]',
                "  disable = false",
            ),
        ),
        (
            "version = 3\n",
            (f"{CONTAINERD}: add:", "[plugins.'io.containerd.nri.v1.nri']", "  disable = false"),
        ),
        (
            'version = 2\n[plugins."io.containerd.nri.v1.nri"]\n  disable = true\n',
            (
                f'{CONTAINERD}:2: change the lines below [plugins."io.containerd.nri.v1.nri"] to:',
                "  disable = false",
            ),
        ),
    ],
    ids=["missing", "version 3", "disabled"],
)
def test_containerd_without_nri_is_a_warning_with_the_lines_to_write(
    machine: MachineTree, text: str, fix: tuple[str, ...]
) -> None:
    machine.listen("/run/containerd/containerd.sock")
    machine.write(CONTAINERD, text)
    found = fault(machine, "nri")
    assert found.severity is Severity.WARNING
    assert found.fix[: len(fix)] == fix
    assert found.fix[-1] == "systemctl restart containerd"


def test_k3s_without_nri_is_changed_in_its_template(machine: MachineTree) -> None:
    machine.listen("/run/k3s/containerd/containerd.sock")
    machine.write("/var/lib/rancher/k3s/agent/etc/containerd/config.toml", "version = 3\n")
    found = fault(machine, "nri")
    assert found.fix[0] == "/var/lib/rancher/k3s/agent/etc/containerd/config-v3.toml.tmpl:"
    assert found.fix[-1] == "systemctl restart k3s"


def test_nri_without_the_plugin_is_a_warning(machine: MachineTree) -> None:
    machine.listen("/run/containerd/containerd.sock", "/var/run/nri/nri.sock")
    assert faults(machine) == []
    machine.unit(UNIT, nri="inactive")
    assert fault(machine, "nri").fix == ("systemctl enable --now resctrlmon-nri.service",)


def test_files_of_sockets_that_a_stopped_containerd_left_are_ignored(machine: MachineTree) -> None:
    machine.write("/run/containerd/containerd.sock", "")
    machine.write("/run/nri/nri.sock", "")
    machine.unit(UNIT, nri="inactive")
    assert faults(machine) == []
    machine.program("/usr/bin/containerd")
    assert fault(machine, "nri").severity is Severity.NOTE


def test_invalid_configuration_of_containerd_is_an_error(machine: MachineTree) -> None:
    machine.listen("/run/containerd/containerd.sock")
    machine.write(CONTAINERD, "version = \n")
    assert "is not valid TOML" in fault(machine, "nri").what


def test_containers_whose_runtime_creates_groups_are_found(machine: MachineTree) -> None:
    spec = json.dumps({"linux": {"intelRdt": {"enableMonitoring": True}}})
    machine.write("/var/lib/containers/storage/overlay-containers/c0ffee/userdata/config.json", spec)
    found = fault(machine, "runtime-groups")
    assert found.severity is Severity.NOTE
    assert "such as c0ffee" in found.what
    for number in range(60):
        machine.group(f"own{number}", MARK)
    assert [each.severity for each in faults(machine, "runtime-groups")] == [Severity.WARNING]


def test_directory_of_containers_that_cannot_be_listed_is_a_note(machine: MachineTree) -> None:
    folder = machine.path("/var/lib/containers/storage/overlay-containers")
    folder.parent.mkdir(parents=True)
    folder.symlink_to("overlay-containers")
    found = fault(machine, "runtime-groups")
    assert found.severity is Severity.NOTE
    assert "overlay-containers" in found.what


def test_runtime_that_manages_classes_is_a_note(machine: MachineTree) -> None:
    machine.write("/etc/crio/crio.conf.d/10-rdt.conf", '[crio.runtime]\nrdt_config_file = "/etc/rdt.yaml"\n')
    assert "10-rdt.conf:2" in fault(machine, "runtime-classes").what


# -- rivals


def test_running_rival_is_a_warning_with_its_unit(machine: MachineTree) -> None:
    machine.write("/proc/77/comm", "pqos\n")
    machine.write("/proc/77/cgroup", "0::/user.slice/session-1.scope\n")
    assert fault(machine, "rivals").fix == ("kill 77",)
    machine.write("/proc/77/cgroup", "0::/system.slice/rdt.service\n")
    found = fault(machine, "rivals")
    assert "intel-cmt-cat runs as process 77 (pqos)" in found.what
    assert found.fix == ("systemctl stop rdt.service",)


def test_enabled_unit_of_a_rival_is_a_warning(machine: MachineTree) -> None:
    machine.write("/usr/lib/systemd/system/rdt.service", "[Service]\nExecStart=-/usr/sbin/pqos -R\n")
    assert faults(machine) == []
    wants = machine.path("/etc/systemd/system/multi-user.target.wants")
    wants.mkdir(parents=True)
    (wants / "rdt.service").symlink_to("/usr/lib/systemd/system/rdt.service")
    assert fault(machine, "rivals").fix == ("systemctl disable --now rdt.service",)


def test_hidden_processes_are_a_note(machine: MachineTree) -> None:
    machine.remove("/proc/1/comm")
    found = fault(machine, "rivals")
    assert found.severity is Severity.NOTE
    assert "hides" in found.what


def test_nri_plugin_of_a_rival_is_a_warning(machine: MachineTree) -> None:
    machine.write("/opt/nri/plugins/90-resctrl-mon", "")
    assert fault(machine, "rivals").fix[0].startswith("rm /opt/nri/plugins/90-resctrl-mon")


# -- the verb


def test_file_that_cannot_be_read_is_a_note(machine: MachineTree) -> None:
    machine.remove("/proc/cmdline")
    machine.path("/proc/cmdline").symlink_to("cmdline")
    found = fault(machine, "kernel-parameter")
    assert found.severity is Severity.NOTE
    assert "kernel-parameter was not examined" in found.what


def test_finding_without_a_reason_has_no_line_for_it(machine: MachineTree) -> None:
    machine.remove("/usr/bin/systemctl")
    for width in (None, 80):
        text = to_text(verb.blocks(verb.examine(machine.host), width, is_quiet=False), None, legend=True)
        assert "note: the state of resctrlmond.service" in text
        assert "Why" not in text


def test_quiet_output_has_only_warnings_and_errors(machine: MachineTree) -> None:
    machine.write("/run/docker.sock", "")
    machine.unit(FAILED)
    text = to_text(verb.blocks(verb.examine(machine.host), None, is_quiet=True), None, legend=True)
    assert text.startswith("error: resctrlmond.service failed")
    assert "Docker" not in text
    assert " ok" not in text


def test_empty_machine_is_examined(tmp_path: Path) -> None:
    report = verb.examine(Host(str(tmp_path)))
    assert report.worst is Severity.ERROR


@pytest.mark.parametrize(
    ("break_it", "status"),
    [
        (lambda machine: None, 0),
        (lambda machine: machine.write("/run/docker.sock", ""), 0),
        (lambda machine: machine.unit(UNIT | {"NRestarts": "1"}), 8),
        (lambda machine: machine.unit(FAILED), 9),
    ],
    ids=["ok", "note", "warning", "error"],
)
def test_exit_status_is_that_of_the_worst_finding(
    machine: MachineTree,
    break_it: Callable[[MachineTree], None],
    status: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    break_it(machine)
    monkeypatch.setattr(verb, "Host", lambda socket: machine.host)
    assert verb.doctor(parse(["doctor"]), Output(Json.SHORT)) == status
    printed = json.loads(capsys.readouterr().out)
    assert set(printed) == {"worst", "findings"}
    assert set(printed["findings"][0]) == {"severity", "check", "what", "why", "fix"}


def test_doctor_examines_only_the_daemon_of_another_socket(ctl: Ctl) -> None:
    done = ctl("doctor", "--json=short")
    assert (done.returncode, done.stderr) == (8, "")
    assert {finding["check"] for finding in json.loads(done.stdout)["findings"]} == {"socket", "rmids", "problem"}


def test_doctor_examines_a_machine_without_the_daemon(ctl: Ctl) -> None:
    done = ctl("--socket", DEFAULT_SOCKET, "doctor", "--json=short")
    assert done.returncode in (0, 8, 9), done.stderr
    assert done.stderr == ""
    assert {"kernel-parameter", "energy"} <= {finding["check"] for finding in json.loads(done.stdout)["findings"]}


def test_command_of_a_fix_is_not_cut(ctl: Ctl) -> None:
    socket = ("--socket", DEFAULT_SOCKET)
    plain, narrow = ctl(*socket, "doctor"), ctl(*socket, "doctor", COLUMNS="40")
    fixes = [finding["fix"] for finding in json.loads(ctl(*socket, "doctor", "--json=short").stdout)["findings"]]
    assert any(fixes), "no finding has a fix to look for"
    for line in (line for fix in fixes for line in fix):
        assert line in plain.stdout
        assert line in narrow.stdout
