# SPDX-License-Identifier: Apache-2.0
"""The selection of pods: the meaning of selectors, the syntax of the configuration, and unselected pods."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.nri import nri_pb2, settings
from resctrlmond.nri.messages import Event, Pod
from resctrlmond.nri.selection import Selection
from resctrlmond.workloads.profiles.label_selector import SelectorError, equal_labels, parse_selector
from tests.nri.conftest import UID, Node

ROOT = Path(__file__).parents[2]
OTHER = "11111111-2222-4333-8444-555555555555"


@pytest.mark.parametrize(
    ("text", "selected", "not_selected"),
    [
        ("app=web", {"app": "web"}, {"app": "api"}),
        ("app == web", {"app": "web", "x": "y"}, {}),
        ("app!=web", {}, {"app": "web"}),
        ("app in (web, api)", {"app": "api"}, {"app": "cache"}),
        ("app in (web)", {"app": "web"}, {}),
        ("app notin (web, api)", {}, {"app": "api"}),
        ("app notin (web, api)", {"app": "cache"}, {"app": "web"}),
        ("app", {"app": ""}, {}),
        ("!app", {}, {"app": ""}),
        ("app=", {"app": ""}, {}),
        ("app in (,web)", {"app": ""}, {"app": "api"}),
        ("app=web,tier!=cache, !canary", {"app": "web", "tier": "x"}, {"app": "web", "canary": "1"}),
        ("app.kubernetes.io/name = web", {"app.kubernetes.io/name": "web"}, {"name": "web"}),
        ("in in (in)", {"in": "in"}, {"in": "out"}),
        ("", {}, None),
        ("  ", {"a": "b"}, None),
    ],
)
def test_selector_matches_labels(text: str, selected: dict[str, str], not_selected: dict[str, str] | None) -> None:
    selection = Selection(requirements=parse_selector(text))
    assert selection.why_not(Pod("s", labels=selected)) == ""
    if not_selected is not None:
        assert selection.why_not(Pod("s", labels=not_selected)).startswith("not selected: its labels do not meet")


@pytest.mark.parametrize(
    "text",
    [
        *("=", ",", "app,", "app in", "app in (", "app in (a", "app in a", "app in (a b)", "app = a b", "!", "!=a"),
        *("app > 1", "app < 1", "app in (a))", "-app", "app=-x", "a/b/c", "/a", "A.b/c", "app=" + "x" * 64, "a" * 64),
        *("app==", "app notin ()x", "a=b=c", "x\0y", "app=ä"),
    ],
)
def test_invalid_selector_is_refused(text: str) -> None:
    if text == "app==":
        assert parse_selector(text) == parse_selector("app in ()")
        return
    with pytest.raises(SelectorError):
        parse_selector(text)


@given(st.text(max_size=60))
def test_any_text_is_a_selector_or_is_refused(text: str) -> None:
    try:
        requirements = parse_selector(text)
    except SelectorError:
        return
    # The text of the requirements has the same meaning.
    assert parse_selector(", ".join(map(str, requirements))) == requirements


def test_equality_is_as_in_nri_resctrl_mon() -> None:
    """All must match, and an empty value also matches a missing label."""
    selection = Selection(requirements=equal_labels({"app": "web", "canary": ""}))
    assert not selection.why_not(Pod("s", labels={"app": "web"}))
    assert not selection.why_not(Pod("s", labels={"app": "web", "canary": "", "more": "x"}))
    assert selection.why_not(Pod("s", labels={"app": "web", "canary": "1"}))
    assert selection.why_not(Pod("s", labels={"canary": ""}))


def test_namespaces_match_exactly_and_an_empty_list_matches_all() -> None:
    assert not Selection().why_not(Pod("s", namespace="any"))
    selection = Selection(frozenset({"shop"}))
    assert not selection.why_not(Pod("s", namespace="shop"))
    for other in ("", "shop2", "Shop", "sho"):
        assert "namespace" in selection.why_not(Pod("s", namespace=other))


# -- the file


def test_configuration_of_nri_resctrl_mon_is_accepted() -> None:
    text = b"namespaces:\n- shop\n- web\nlabelSelector:\n  app: web\n  version: 1.10\n  on: yes\n"
    found = settings.parse(text, "f")
    assert found == Selection(
        frozenset({"shop", "web"}), equal_labels({"app": "web", "version": "1.10", "on": "yes"})
    )


@pytest.mark.parametrize(
    "text", ["", "# nothing", "---", "namespaces: []\nlabelSelector: {}\n", "namespaces:\nlabelSelector:\n", "null"]
)
def test_empty_configuration_selects_all(text: str) -> None:
    if text == "null":
        with pytest.raises(ConfigError):
            settings.parse(text.encode(), "f")
    else:
        assert settings.parse(text.encode(), "f") == Selection()


def test_selector_as_text() -> None:
    assert settings.parse(b"labelSelector: app in (web, api), !canary\n", "f").requirements == parse_selector(
        "app in (web,api),!canary"
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("resctrlPath: /sys/fs/resctrl", "f:1: resctrlPath is not a key of this adapter. Remove it"),
        ("\ntelemetry:\n  prometheus:\n    enabled: true\n", "f:2: telemetry is not a key of this adapter"),
        ("namespace: [a]", "f:1: unknown key 'namespace'.*Did you mean namespaces"),
        ("namespaces: shop", "f:1: namespaces is not a list"),
        ('namespaces: ""', "f:1: namespaces is not a list"),
        ("annotations: [a, '']", "f:1: an annotation has no name"),
        ("annotations: {a: b}", "f:1: annotations is not a list"),
        ("namespaces: [[a]]", "f:1: a namespace is a list"),
        ("namespaces: ['']", "f:1: a namespace has no name"),
        ("labelSelector: [a]", "f:1: labelSelector is a list"),
        ("labelSelector: {a: [b]}", "f:1: a value is a list"),
        ("labelSelector: {a: b, a: c}", "f:1: 'a' is set a second time.*Line 1 sets it already"),
        ("labelSelector:\n  a: b\n  a: c", "f:3: 'a' is set a second time.*Line 2 sets it already"),
        ("labelSelector: {-a: b}", "f:1: labelSelector: '-a' is not a valid label name"),
        ("labelSelector: a in", "f:1: labelSelector: it ends too early"),
        ("namespaces: [a]\nnamespaces: [b]", "f:2: 'namespaces' is set a second time"),
        ("namespaces: &a [b]", "f:1: .*anchor"),
        ("namespaces: !!set {b}", "f:1: .*tag"),
        ("a: " + "[" * 500, "f:1: .*nested too deeply"),
        ("namespaces: [", "f:[12]: "),
        ("a: b: c", "f:1: "),
        ("- a", "f:1: this is not a key with a value"),
        ("namespaces: [a]\n---\nnamespaces: [b]", "f:2: "),
        ("a\x01: b", "f:1: .*not allowed"),
        ('\nnamespaces: ["\\UFFFFFFFF"]', "f:2: not valid YAML"),
        ("%YAML " + "9" * 5000 + ".1\n---\n", "f:1: not valid YAML"),
        ("#" * 70_000, "larger than"),
    ],
)
def test_configuration_error_names_the_line(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings.parse(text.encode(), "f")


@given(st.binary(max_size=200))
def test_any_bytes_are_a_configuration_or_are_refused(data: bytes) -> None:
    try:
        settings.parse(data, "f")
    except ConfigError as error:
        assert str(error).startswith("f:")


def test_sample_has_every_key_with_its_default() -> None:
    sample = (ROOT / "systemd" / "nri.yaml").read_text(encoding="utf-8")
    assert settings.parse(sample.encode(), "sample") == Selection()
    uncommented = [
        line.removeprefix("#") for line in sample.splitlines() if line.startswith("#") and ": " in line[:20]
    ]
    keys = {line.partition(":")[0] for line in uncommented if not line.startswith(" ")}
    assert keys == set(settings.KEYS)
    assert settings.parse("\n".join(uncommented).encode(), "sample") == Selection()


def test_named_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--config"):
        settings.load(str(tmp_path / "none"))
    with pytest.raises(ConfigError):
        settings.load(str(tmp_path))
    assert settings.load() == Selection(), "without one of its own, all pods are monitored"


# -- the adapter


def configured(node: Node, text: str) -> None:
    """Restart the adapter with that configuration."""
    if node.adapter is not None:
        node.stop_adapter()
    path = node.machine.top / "nri.yaml"
    path.write_text(text, encoding="utf-8")
    node.start_adapter("--config", str(path))


def reasons(node: Node) -> dict[str, str]:
    """Return the reasons why pods are not monitored, by key."""
    return {pod["key"]: pod.get("reason", "") for pod in node.machine.call("ListPods")["pods"]}


def test_unselected_pod_is_listed_and_not_monitored(node: Node) -> None:
    configured(node, "namespaces: [shop]\nlabelSelector: app in (web, api)\n")
    with node.connected() as plugin:
        plugin.greet()
        pod, other = node.pod(), node.pod(OTHER, namespace="else")
        labelled = node.pod("22222222-2222-4333-8444-555555555555", labels={"app": "cache"})
        container = node.start_container(plugin, pod)
        for unselected in (other, labelled):
            plugin.send_event(Event.RUN_POD_SANDBOX, unselected)
            ended = node.start_container(plugin, unselected)
            plugin.send_event(Event.POST_START_CONTAINER, unselected, ended)
            plugin.send_event(Event.STOP_CONTAINER, unselected, ended)
        assert node.machine.groups() == [UID]
        assert node.machine.tasks(UID) == {container.pid}
        node.until(lambda: len(reasons(node)) == 3, "all pods")
        assert reasons(node)[UID] == ""
        assert "namespace" in reasons(node)[OTHER]
        assert "'app in (api, web)'" in reasons(node)[labelled.uid]
        plugin.send_event(Event.REMOVE_POD_SANDBOX, other)
        node.until(lambda: OTHER not in reasons(node), "the pod to be forgotten")


def test_deselected_pod_ends_and_newly_selected_pod_is_added(node: Node) -> None:
    pod, other = node.pod(), node.pod(OTHER, namespace="else")
    with node.connected() as plugin:
        plugin.greet()
        first = node.start_container(plugin, pod)
    configured(node, "namespaces: [else]\n")
    with node.connected() as plugin:
        first.state = 3
        second = node.container(other, node.process())
        plugin.greet([pod, other], [first, second])
        node.until(lambda: node.group()["state"] == "completed", "the end of the pod")
        node.until(lambda: node.living(OTHER) == {other.id, second.id}, "the other one")


def test_other_owners_member_of_an_unselected_pod_does_not_end(node: Node) -> None:
    configured(node, "namespaces: [none]\n")
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod()
        container = node.container(pod, node.process())
        node.assign_as_hook(container)
        plugin.send_event(Event.START_CONTAINER, pod, container)
        plugin.send_event(Event.STOP_CONTAINER, pod, container)
        plugin.send_event(Event.REMOVE_POD_SANDBOX, pod)
        assert (node.owners(), node.living()) == ({"engine"}, {container.id})


def test_runtime_configuration_replaces_the_file_if_it_is_valid(node: Node) -> None:
    configured(node, "namespaces: [none]\n")
    with node.connected() as plugin:
        plugin.registered()
        for text in ("nonsense: 1", "\0", "namespaces: [shop]"):
            request = nri_pb2.ConfigureRequest(runtime_name="containerd", runtime_version="v2.1.9", config=text)
            assert plugin.call("Configure", request.SerializeToString()).status.code == 0
        plugin.synchronize(nri_pb2.SynchronizeRequest())
        container = node.start_container(plugin, node.pod())
        assert node.machine.tasks(UID) == {container.pid}
        assert node.log_text().count("pods are selected as before") == 2


def test_only_configured_annotations_become_attributes(node: Node) -> None:
    configured(node, "annotations: [example.com/team, example.com/none]\n")
    given = {"example.com/team": "sea\x1b\n", "secret": "s3cret"}
    annotations = [nri_pb2.Annotation(name=name.encode(), value=text.encode()) for name, text in given.items()]
    with node.connected() as plugin:
        plugin.greet()
        pod = node.pod(annotations=annotations)
        for name in ("web", "sidecar", "web"):
            plugin.send_event(Event.START_CONTAINER, pod, node.container(pod, node.process(), name=name))
        attributes = node.group()["attributes"]
        assert {name for name in attributes if "annotation" in name} == {"pod.annotation.example.com/team"}
        assert attributes["pod.annotation.example.com/team"] == "sea"
        assert attributes["pod.containers"] == "sidecar, web"


def test_invalid_configuration_ends_the_adapter_with_status_78_and_names_the_line(node: Node) -> None:
    node.stop_adapter(signal.SIGTERM)
    configured(node, "\nnamespaces: shop\n")
    assert node.adapter is not None
    assert node.adapter.wait(60) == 78
    node.adapter = None
    assert "nri.yaml:2: namespaces is not a list" in node.log_text()


@pytest.mark.parametrize(
    ("configuration", "profiles", "status", "message"),
    [
        ("namespaces: [shop]\n", "", 0, ""),
        ("\nnamespaces: shop\n", "", 78, "nri.yaml:2: namespaces is not a list"),
        ("", "profilse: {}\n", 78, "Did you mean profiles?"),
    ],
)
def test_configuration_is_checked_without_a_start(
    tmp_path: Path, configuration: str, profiles: str, status: int, message: str
) -> None:
    """A running plugin connects to the runtime; the check ends by itself."""
    file, folder = tmp_path / "nri.yaml", tmp_path / "profiles.d"
    folder.mkdir()
    file.write_text(configuration, encoding="utf-8")
    (folder / "site.yaml").write_text(profiles, encoding="utf-8")
    options = ["--check-config", "--config", str(file), "--profiles-dir", str(folder)]
    done = subprocess.run(
        [sys.executable, "-m", "resctrlmond.nri", *options], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == status, done.stderr
    assert message in done.stderr
    assert bool(done.stderr) == bool(message)
