# SPDX-License-Identifier: Apache-2.0
"""Pods with the annotations of memtierd's NRI plugin, and the example profiles for the classes of its sample."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
import yaml

from resctrlmond.configuration.profile_syntax import parse
from resctrlmond.nri import nri_pb2
from resctrlmond.nri.messages import Event
from resctrlmond.workloads.profiles.companion_settings import VARIABLES, Companion, render
from resctrlmond.workloads.profiles.companions import unit_of
from resctrlmond.workloads.profiles.memory_settings import Swap
from tests.daemon.test_companions import systemd
from tests.nri.conftest import UID, Node
from tests.nri.test_memory import files, loaded, top
from tests.workloads.fake_systemd import FakeSystemd

__all__ = ["systemd", "top"]  # fixtures

EXAMPLES = Path(__file__).parents[2] / "packaging" / "examples"
PROFILES = EXAMPLES / "memtierd.yaml"
POD = EXAMPLES / "pods" / "memtierd-pod.yaml"
# The SHA-256 of each memtierdconfig in sample-configs/nri-memtierd.yaml of nri-plugins 0705acc8, and its allowswap.
SAMPLES = {
    "swap-idle-data": ("15a70014d968a602a92ec30e9f086e2fa56e0b1be6bf9b4526f871a38b04d2e2", Swap.ALLOW),
    "track-working-set-size": ("77999f3c27e4746712e9e6c1c64c990969bfec46eae44cb7ce0edd3b7504020b", Swap.DENY),
}
# As in test/e2e/files/nri-memtierd-test-pod.yaml there, beside the annotations of the class.
LIMITS = {"memory.swap.max.memtierd.nri.io": "max", "memory.high.memtierd.nri.io": "max"}


def companions() -> dict[str, Companion]:
    """Return the companions of the example profiles."""
    found = parse(PROFILES.read_bytes(), PROFILES.name).by_name
    return {name: profile.companion for name, profile in found.items() if profile.companion}


def given_annotations() -> dict[str, str]:
    """Return the annotations of the example pod, and those of its memory."""
    found: dict[str, str] = yaml.safe_load(POD.read_text(encoding="utf-8"))["metadata"]["annotations"]
    return found | LIMITS


def as_the_plugin_writes(companion: Companion, cgroup: str, stats: str) -> str:
    """Return the configuration of memtierd, in which its plugin replaces two texts."""
    assert companion.template is not None
    return companion.template.replace("$CGROUP2_ABS_PATH", cgroup).replace("$MEMTIERD_SWAP_STATS_PATH", stats)


def test_examples_have_the_templates_of_the_plugins_sample_configuration() -> None:
    profiles = parse(PROFILES.read_bytes(), PROFILES.name).by_name
    found = {
        name: (hashlib.sha256((companion.template or "").encode()).hexdigest(), profiles[name].memory.swap)
        for name, companion in companions().items()
    }
    assert found == SAMPLES


@pytest.mark.parametrize("name", SAMPLES)
def test_memtierd_gets_the_text_that_its_plugin_writes(name: str) -> None:
    path = "/sys/fs/cgroup/kubepods.slice/kubepods-pod1_2.slice/cri-containerd-5e.scope"
    values = {variable: f"{path}/{variable.lower()}" for variable in VARIABLES}
    cgroup, stats = values["CGROUP2_ABS_PATH"], values["MEMTIERD_SWAP_STATS_PATH"]
    one = companions()[name]
    assert render(one, values).text == as_the_plugin_writes(one, cgroup, stats)


def test_memory_of_each_container_is_as_the_plugin_sets_it_except_without_a_class(tmp_path: Path, top: Path) -> None:
    made = loaded(tmp_path, top, PROFILES.read_text(encoding="utf-8"))
    both = {"memory.swap.max": "max", "memory.high": "max"}
    assert files(made, pod_annotations=given_annotations(), name="swapped") == both
    assert files(made, pod_annotations=given_annotations(), name="tracked") == both
    # The plugin sets both files.
    assert files(made, pod_annotations=given_annotations(), name="untouched") == {}
    of_class = {name: value for name, value in given_annotations().items() if name not in LIMITS}
    found = {name: files(made, pod_annotations=of_class, name=name) for name in ("swapped", "tracked", "untouched")}
    assert found == {"swapped": {"memory.swap.max": "max"}, "tracked": {"memory.swap.max": "0"}, "untouched": {}}


def test_each_container_with_a_class_gets_a_memtierd_of_its_own(node: Node, systemd: FakeSystemd) -> None:
    directory = node.machine.top / "profiles.d"
    directory.mkdir()
    (directory / "memtierd.yaml").write_bytes(PROFILES.read_bytes())
    node.machine.options = ("--profiles-dir", str(directory))
    node.machine.stop()
    node.machine.start(DBUS_SESSION_BUS_ADDRESS=systemd.address)
    node.stop_adapter()
    node.start_adapter("--profiles-dir", str(directory))
    given = [
        nri_pb2.Annotation(name=name.encode(), value=value.encode()) for name, value in given_annotations().items()
    ]
    with node.connected() as plugin:
        pod = node.pod(annotations=given)
        plugin.greet()
        plugin.send_event(Event.RUN_POD_SANDBOX, pod)
        swapped, tracked, untouched = (
            node.start_container(plugin, pod, name=name) for name in ("swapped", "tracked", "untouched")
        )
        for container, class_ in ((swapped, "swap-idle-data"), (tracked, "track-working-set-size")):
            node.until(
                lambda id_=container.id: node.group(id_).get("companion", {}).get("state") == "running",  # type: ignore[misc]
                "the companion",
            )
            group = node.group(container.id)
            source = "annotation class.memtierd.nri.io" + ("/tracked" if container is tracked else "")
            assert (group["profile"], group["profileSource"], group["baseline"]) == (class_, source, "exact")
            folder = f"{node.machine.run}/companions/{container.id}"
            cgroup = f"{node._containers()}/{container.id}"
            text = Path(folder, "config.yaml").read_text()
            assert text == as_the_plugin_writes(companions()[class_], cgroup, f"{folder}/memtierd.stats")
            command = dict(systemd.transient)[unit_of(container.id)]["ExecStartEx"][0][1]
            assert command == ["/usr/local/bin/memtierd", "-c", "", "-config", f"{folder}/config.yaml"]
        assert len(systemd.transient) == 2
        assert node.group().get("companion", {}) == {}, "the group of the pod has the container without a class"
        assert untouched.id in node.living()
        assert {swapped.id, tracked.id}.isdisjoint(node.living())
        node.end(swapped.pid)
        plugin.send_event(Event.STOP_CONTAINER, pod, swapped)
        node.until(lambda: unit_of(swapped.id) not in systemd.units, "the end of the companion")
        assert unit_of(tracked.id) in systemd.units
        assert node.group(UID)["state"] == "active"
