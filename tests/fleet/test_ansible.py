# SPDX-License-Identifier: Apache-2.0
"""Ansible accepts the role, and the daemon and the NRI plugin accept the files that it writes.

The role runs on this host, in a mount namespace with an overlay over /etc. Its tasks for packages and services need a
host of its own, and are left out. Those that copy packages install other ones, in an overlay over /.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from resctrlmond.configuration import profile_files
from resctrlmond.configuration.config import merge
from resctrlmond.nri import settings
from resctrlmond.nri.selection import Selection
from tests.fleet.conftest import FLEET, PAGE, ROOT
from tests.fleet.test_kubernetes import pod

ANSIBLE = FLEET / "ansible"
ROLE = ANSIBLE / "roles" / "resctrlmond"

# The upper layer is a tmpfs, because it cannot be in another overlay, such as the root directory of a container.
_SCRIPT = """\
set -e
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work"
mount -t overlay -o "lowerdir=/etc,upperdir=$1/upper,workdir=$1/work" overlay /etc
copy=$2
shift 2
trap 'cp -r /etc/group /etc/resctrlmond /etc/systemd/system/resctrlmon-exporter.socket.d "$copy"' EXIT
# The daemon accepts its configuration only if its directory there is on a tmpfs.
mount -t tmpfs none /run
# As the package does.
groupadd --system resctrlmon
"$@"
echo --- again
"$@"
"""

# Debian packages of two versions, of which one needs the other of its version.
_PACKAGES = """\
set -e
cd "$1"
for version in 1 2; do
    for name in resctrlmond-test-modules resctrlmond-test; do
        mkdir -p tree/DEBIAN
        printf '%s\\n' "Package: $name" "Version: $version" 'Architecture: all' 'Maintainer: m <m@example.com>' \\
            'Description: test' >tree/DEBIAN/control
        [ $name != resctrlmond-test ] || echo "Depends: resctrlmond-test-modules (= $version)" >>tree/DEBIAN/control
        dpkg-deb --root-owner-group --build tree "${name}_${version}_all.deb"
        rm -r tree
    done
done
"""
# As above, with an overlay over /. $1 is a directory for it, $2 that of the packages and of the playbook.
_UPGRADE = """\
set -e
mount -t tmpfs none "$1"
mkdir "$1/upper" "$1/work" "$1/root"
mount -t overlay -o "lowerdir=/,upperdir=$1/upper,workdir=$1/work" overlay "$1/root"
for folder in /dev /proc "$2"; do
    mkdir -p "$1/root$folder"
    mount --rbind "$folder" "$1/root$folder"
done
for version in 1 2 2; do
    chroot "$1/root" ansible-playbook --inventory localhost, --connection local --extra-vars "@$2/$version.json" \\
        "$2/site.yml"
done
chroot "$1/root" dpkg-query --show --showformat='${Package} ${Version}\\n' resctrlmond-test resctrlmond-test-modules
"""


def loaded(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def defaults() -> dict[str, Any]:
    found: dict[str, Any] = loaded(ROLE / "defaults" / "main.yml")
    return found


def playbook(*options: str) -> list[str]:
    return [
        "ansible-playbook",
        "--inventory",
        "localhost,",
        "--connection",
        "local",
        *options,
        str(ANSIBLE / "site.yml"),
    ]


def in_namespace(top: Path, script: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a mount namespace of its own, with the commands of this tree."""
    return subprocess.run(
        ["unshare", "--mount", "--propagation", "private", "sh", "-c", script, "sh", *arguments],
        env={
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(top / "home"),
            "ANSIBLE_NOCOLOR": "1",
            "LC_ALL": "C.UTF-8",
        },
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )


def run(top: Path, variables: dict[str, Any]) -> tuple[Path, subprocess.CompletedProcess[str]]:
    """Run the role twice, unless the first time fails; return the directory with its files, and the result."""
    copy, overlay, home = top / "copy", top / "overlay", top / "home"
    for folder in (copy, overlay, home):
        folder.mkdir()
    command = playbook("--skip-tags", "packages,services", "--extra-vars", json.dumps(variables))
    return copy, in_namespace(top, _SCRIPT, str(overlay), str(copy), *command)


def applied(top: Path, variables: dict[str, Any]) -> tuple[Path, str]:
    """Run the role twice; return the directory with the files that it has written, and the output."""
    copy, done = run(top, variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return copy, done.stdout


def test_ansible_accepts_the_playbook() -> None:
    done = subprocess.run(playbook("--syntax-check"), capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_packages_that_need_each_other_are_upgraded(tmp_path: Path) -> None:
    packages, overlay = tmp_path / "packages", tmp_path / "overlay"
    packages.mkdir()
    overlay.mkdir()
    subprocess.run(["sh", "-c", _PACKAGES, "sh", str(packages)], check=True, capture_output=True, timeout=60)
    for version in (1, 2):
        debs = sorted(map(str, packages.glob(f"*_{version}_all.deb")))
        (packages / f"{version}.json").write_text(json.dumps({"resctrlmond_debs": debs}))
    names = ("Copy the packages", "Install the copied packages")
    tasks = [task for task in loaded(ROLE / "tasks" / "main.yml") if task["name"] in names]
    play = {"hosts": "all", "gather_facts": False, "tasks": tasks}
    (packages / "site.yml").write_text(yaml.safe_dump([play]))
    output = in_namespace(tmp_path, _UPGRADE, str(overlay), str(packages))
    assert output.returncode == 0, output.stdout + output.stderr
    runs = re.findall(r"changed=(\d+) .*failed=(\d+)", output.stdout)
    assert runs == [("2", "0"), ("2", "0"), ("0", "0")], output.stdout
    assert output.stdout.splitlines()[-2:] == ["resctrlmond-test 2", "resctrlmond-test-modules 2"]


def of_the_page() -> dict[str, Any]:
    """Return the variables in the example of the page."""
    text = PAGE.read_text(encoding="utf-8").partition("# ANSIBLE")[2]
    found: dict[str, Any] = yaml.safe_load(text.split("```")[1])
    return found


def test_example_of_the_page_has_the_packages_in_the_order_of_installation() -> None:
    names = [Path(file).name.partition("_")[0] for file in of_the_page()["resctrlmond_debs"]]
    assert names == ["python3-resctrlmond", *defaults()["resctrlmond_packages"]]


def test_daemon_and_plugin_accept_the_example_of_the_page(tmp_path: Path) -> None:
    variables = of_the_page()
    assert variables.keys() <= defaults().keys()
    copy, output = applied(tmp_path, variables)
    assert re.search(r"changed=0 .*failed=0", output.partition("--- again")[2]), output
    selection = settings.parse((copy / "resctrlmond" / "nri.yaml").read_bytes(), "nri.yaml")
    assert selection.namespaces == {"shop", "web"}


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {
            "resctrlmond_config": {"units": ["*.service", "!getty@*.service"], "snapshot_ttl": "1h", "dbus": False},
            "resctrlmond_nri_config": {"namespaces": ["shop"], "labelSelector": {"version": "1.10"}},
            "resctrlmond_profiles": {"profiles": {"batch": {"priority": -10}}, "default_profile": "batch"},
            "resctrlmond_exporter_listen": 10133,
            "resctrlmond_read_gid": 911,
        },
    ],
    ids=["defaults", "all"],
)
def test_daemon_and_plugin_accept_the_files_of_the_role(tmp_path: Path, variables: dict[str, Any]) -> None:
    copy, output = applied(tmp_path, variables)
    assert re.search(r"changed=0 .*failed=0", output.partition("--- again")[2]), output
    daemon, nri = copy / "resctrlmond" / "resctrlmond.d" / "fleet.yaml", copy / "resctrlmond" / "nri.yaml"
    config = merge([(str(daemon), daemon.read_bytes())])
    profiles = profile_files.load([str(copy / "resctrlmond" / "profiles.d")])
    selection = settings.parse(nri.read_bytes(), str(nri))
    socket = (copy / "resctrlmon-exporter.socket.d" / "fleet.conf").read_text(encoding="utf-8")
    number = variables.get("resctrlmond_read_gid", defaults()["resctrlmond_read_gid"])
    assert f"\nresctrlmon-read:x:{number}:" in (copy / "group").read_text(encoding="utf-8")
    if variables:
        assert (config.snapshot_ttl, config.dbus, len(config.units)) == (3600, False, 2)
        assert selection.namespaces == {"shop"}
        assert [str(requirement) for requirement in selection.requirements] == ["version: 1.10"]
        assert sorted(profiles.by_name) == ["batch"]
        assert socket.endswith("[Socket]\nListenStream=\nListenStream=10133\n")
    else:
        assert config == merge([])
        assert selection == Selection()
        assert "ListenStream" not in socket


@pytest.mark.parametrize(
    ("variables", "message", "missing"),
    [
        (
            {"resctrlmond_config": {"snapshot_tll": "1h"}},
            "unknown key 'snapshot_tll'. Did you mean snapshot_ttl?",
            "resctrlmond.d/fleet.yaml",
        ),
        ({"resctrlmond_nri_config": {"namespaces": "shop"}}, "namespaces is not a list", "nri.yaml"),
        (
            {"resctrlmond_profiles": {"profiles": {"batch": {"snapshot_tll": "1h"}}}},
            "Did you mean snapshot_ttl?",
            "profiles.d/fleet.yaml",
        ),
    ],
    ids=["daemon", "plugin", "profiles"],
)
def test_wrong_configuration_is_not_written_and_stops_the_role(
    tmp_path: Path, variables: dict[str, Any], message: str, missing: str
) -> None:
    """It was written, and the daemon or the plugin did not start again, or ran without profiles."""
    copy, done = run(tmp_path, variables)
    assert done.returncode == 2, done.stdout + done.stderr
    assert message in done.stdout
    assert "--- again" not in done.stdout
    assert (copy / "resctrlmond").is_dir()
    assert not (copy / "resctrlmond" / missing).exists()


@pytest.mark.parametrize(("status", "accepted"), [(0, True), (8, True), (1, False)])
def test_role_accepts_profiles_that_name_a_class_of_later(tmp_path: Path, status: int, accepted: bool) -> None:
    program, file = tmp_path / "resctrlctl", tmp_path / "profiles"
    program.write_text(f'#!/bin/sh\n[ -s "$3" ] && exit {status}\n')
    program.chmod(0o755)
    file.write_text("profiles: {batch: {class: batch}}\n")
    tasks = {task["name"]: task for task in loaded(ROLE / "tasks" / "main.yml")}
    command = shlex.split(tasks["Write the profiles"]["ansible.builtin.copy"]["validate"] % file)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "TMPDIR": str(tmp_path)}
    assert (subprocess.run(command, env=environment, check=False).returncode == 0) == accepted


def test_role_agrees_with_the_packages_the_daemonset_and_the_page() -> None:
    values = defaults()
    assert pod()["securityContext"]["supplementalGroups"] == [values["resctrlmond_read_gid"]]
    control = (ROOT / "packaging" / "debian" / "control").read_text(encoding="utf-8")
    assert set(values["resctrlmond_packages"]) < set(re.findall(r"^Package: (.*)$", control, re.MULTILINE))
    units = {path.name for path in (ROOT / "systemd").iterdir()}
    tasks = loaded(ROLE / "tasks" / "main.yml")
    [mount] = [task["ansible.builtin.systemd"]["name"] for task in tasks if task["name"] == "Mount resctrl"]
    assert {mount, *values["resctrlmond_services"]} <= units
    text = PAGE.read_text(encoding="utf-8")
    assert (
        set(re.findall(r"^\*(resctrlmond_\w+)\*:? ?", text.partition("# ANSIBLE")[2], re.MULTILINE)) <= values.keys()
    )
    notified = {task["notify"] for task in tasks if "notify" in task}
    assert notified == {handler["name"] for handler in loaded(ROLE / "handlers" / "main.yml")}
