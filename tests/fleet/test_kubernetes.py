# SPDX-License-Identifier: Apache-2.0
"""The exporter runs as in the DaemonSet, and a real Prometheus gives its targets the labels of the examples."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from resctrlmond.exporter.listening import PORT
from tests.daemon.conftest import end
from tests.exporter.conftest import Machine, reserved_port
from tests.exporter.prometheus import Prometheus
from tests.fleet.conftest import FLEET, PAGE
from tests.wait import wait_until

KUBERNETES = FLEET / "kubernetes"
EXPORTER_PAGE = PAGE.with_name("resctrlmon-exporter.8.scd")
POD = {"pod.namespace": "shop", "pod.name": "web-0", "pod.container": "server"}
POD_KEY = "c0ffee00-0000-4000-8000-000000000001"
NODE = "worker-1"
# The labels with which Prometheus discovers a target in Kubernetes.
DISCOVERED = {
    "__meta_kubernetes_pod_node_name": NODE,
    "__meta_kubernetes_node_name": NODE,
    "__meta_kubernetes_namespace": "resctrlmon",
    "__meta_kubernetes_pod_name": "resctrlmon-exporter-x2x4z",
    "__meta_kubernetes_pod_container_name": "exporter",
    "__meta_kubernetes_service_name": "resctrlmon-exporter",
}
# The labels that the Prometheus Operator sets before the relabelings of a ServiceMonitor.
OPERATOR = [
    {"source_labels": [f"__meta_kubernetes_{source}"], "target_label": target}
    for source, target in (
        ("namespace", "namespace"),
        ("service_name", "service"),
        ("pod_name", "pod"),
        ("pod_container_name", "container"),
        ("service_name", "job"),
    )
] + [{"target_label": "endpoint", "replacement": "metrics"}]


def documents(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text(encoding="utf-8")))


def of_kind(kind: str) -> dict[str, Any]:
    [found] = [document for document in documents("exporter.yaml") if document["kind"] == kind]
    return found


def pod() -> dict[str, Any]:
    spec: dict[str, Any] = of_kind("DaemonSet")["spec"]["template"]["spec"]
    return spec


def native(relabelings: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return relabelings of the Prometheus Operator with the names of Prometheus's own keys."""
    return [
        {re.sub("[A-Z]", lambda letter: f"_{letter[0].lower()}", key): value for key, value in one.items()}
        for one in relabelings
    ]


@contextlib.contextmanager
def as_in_the_pod(machine: Machine, port: int, **changes: Any) -> Iterator[None]:
    """Run the exporter with the user, groups, mounts and arguments of the DaemonSet, at another port.

    ``changes`` replace keys of the pod's security context.
    """
    spec = pod()
    [container] = spec["containers"]
    [mount] = container["volumeMounts"]
    [volume] = spec["volumes"]
    assert mount["name"] == volume["name"]
    assert volume["hostPath"] == {"path": "/run/resctrlmond", "type": "Directory"}
    assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
    context = spec["securityContext"] | changes
    groups = ",".join(map(str, context["supplementalGroups"])) or "nogroup"
    inside = shlex.quote(mount["mountPath"])
    # The directory of the daemon is not below /run here.
    mounts = f"mount -t tmpfs none /run && mkdir {inside} && mount --bind {shlex.quote(str(machine.run))} {inside}"
    if mount["readOnly"]:
        mounts += f" && mount -o remount,bind,ro {inside}"
    command = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    command += [
        "setpriv",
        f"--reuid={context['runAsUser']}",
        f"--regid={context['runAsGroup']}",
        f"--groups={groups}",
    ]
    command += ["--no-new-privs", "--inh-caps=-all", "--bounding-set=-all"]
    arguments = [argument.replace(str(PORT), str(port)) for argument in container["args"]]
    command += [sys.executable, "-m", "resctrlmond.exporter", *arguments, "--timeout", "60"]
    with (machine.top / "exporter.log").open("ab") as log:
        process = subprocess.Popen(command, stderr=log, cwd="/")
    try:
        yield
    finally:
        end(process)


@contextlib.contextmanager
def prometheus(folder: Path, job: dict[str, Any]) -> Iterator[Prometheus]:
    """Run a server with one job, which promtool accepts."""
    folder.mkdir()
    configuration = folder / "prometheus.yml"
    configuration.write_text(json.dumps({"scrape_configs": [job]}), encoding="utf-8")
    subprocess.run(["promtool", "check", "config", str(configuration)], check=True, timeout=60, capture_output=True)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port("127.0.0.1"))
        log = stack.enter_context((folder / "log").open("wb"))
        command = ["prometheus", f"--config.file={configuration}", f"--storage.tsdb.path={folder / 'data'}"]
        command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"]
        process = stack.enter_context(subprocess.Popen(command, stdout=log, stderr=log, cwd=folder))
        stack.callback(process.terminate)
        server = Prometheus(port)
        wait_until(lambda: server.is_ready() or process.poll() is not None)
        assert process.poll() is None, (folder / "log").read_text()
        yield server


def now(server: Prometheus, query: str) -> list[tuple[dict[str, str], float]]:
    """Return the result of a query at the present time of the machine, as soon as it has one.

    A series has no value before its first scrape, and after one that took longer than its time-out.
    """
    found: list[tuple[dict[str, str], float]] = []

    def has_result() -> bool:
        found[:] = server.query(query, time.time())
        return bool(found)

    wait_until(has_result, interval_s=0.2, failure=f"{query} has no result")
    return found


def start(machine: Machine) -> None:
    """Start a daemon whose readers are those that the DaemonSet has, with a pod and a unit."""
    [group] = pod()["securityContext"]["supplementalGroups"]
    machine.config.write_text(f"group: 4242\nread_group: {group}\n")
    machine.start()
    machine.call("Create", key=POD_KEY, claim="me", attributes=POD)
    machine.call("Create", key="backup.service", claim="me", attributes={"unit": "backup.service"})


def relabelings_of(job: str) -> list[dict[str, Any]]:
    """Return the relabelings of a job, as Prometheus has them."""
    if job == "servicemonitor.yaml":
        return OPERATOR + native(documents(job)[0]["spec"]["endpoints"][0]["relabelings"])
    if job == "scrapeconfig.yaml":
        return native(documents(job)[0]["spec"]["relabelings"])
    name, number = job.split()
    found: list[dict[str, Any]] = documents(name)[0]["scrape_configs"][int(number)]["relabel_configs"]
    return found


def alerted_job() -> str:
    """Return the name of the job in the alerts."""
    rules = FLEET.with_name("prometheus") / "resctrlmond.rules.yaml"
    [name] = set(re.findall(r'job="(.*?)"', rules.read_text(encoding="utf-8")))
    return str(name)


@pytest.mark.parametrize("job", ["servicemonitor.yaml", "scrapeconfig.yaml", "prometheus.yml 0", "prometheus.yml 1"])
def test_exporter_of_the_daemonset_is_scraped_with_the_labels_of_the_workloads(
    machine: Machine, tmp_path: Path, job: str
) -> None:
    start(machine)
    with contextlib.ExitStack() as stack:
        port = stack.enter_context(reserved_port("127.0.0.1"))
        stack.enter_context(as_in_the_pod(machine, port))
        relabelings = json.loads(json.dumps(relabelings_of(job)).replace(f":{PORT}", f":{port}"))
        # Kubernetes reports the port of kubelet for a node, and that of the container for a pod.
        is_node = "__meta_kubernetes_node_name" in json.dumps(relabelings)
        target = {"targets": [f"127.0.0.1:{10250 if is_node else port}"], "labels": DISCOVERED}
        name, _, number = job.partition(" ")
        configuration = {
            "job_name": documents(name)[0]["scrape_configs"][int(number)]["job_name"] if number else "scrapeConfig/x",
            "scrape_interval": "1s",
            "static_configs": [target],
            "relabel_configs": relabelings,
        }
        server = stack.enter_context(prometheus(tmp_path / "prometheus", configuration))
        own = {"instance": NODE, "job": alerted_job()}
        assert now(server, "resctrlmond_up == 1") == [({"__name__": "resctrlmond_up"} | own, 1.0)]
        [(of_pod, _)] = now(server, f'resctrlmond_workload_info{{key="{POD_KEY}"}}')
        assert own | {"namespace": "shop", "pod": "web-0"} == {
            name: of_pod.get(name) for name in ("instance", "job", "namespace", "pod")
        }
        assert not [name for name in of_pod if name.startswith("exported_")]
        # A unit is in no pod, also not in that of the exporter.
        [(of_unit, _)] = now(server, 'resctrlmond_workload_info{unit="backup.service"}')
        assert not of_unit.keys() & {"namespace", "pod", "container", "service", "endpoint"}
        [query] = re.findall(r"```\n(sum by \(namespace, pod\).*?)```", EXPORTER_PAGE.read_text(), re.DOTALL)
        assert [labels for labels, _ in now(server, query)] == [{"namespace": "shop", "pod": "web-0"}]


def test_exporter_of_the_daemonset_finds_a_restarted_daemon_and_needs_the_group(machine: Machine) -> None:
    """The socket file of the daemon is a new one after its restart."""
    start(machine)

    def is_up(port: int, value: str) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=90) as reply:
                return f"\nresctrlmond_up {value}\n" in reply.read().decode()
        except OSError:
            return False

    with reserved_port("127.0.0.1") as port, as_in_the_pod(machine, port):
        wait_until(lambda: is_up(port, "1.0"), interval_s=0.2)
        before = os.stat(machine.socket).st_ctime_ns
        assert machine.stop() == 0
        wait_until(lambda: is_up(port, "0.0"), interval_s=0.2)
        machine.start()
        assert os.stat(machine.socket).st_ctime_ns != before
        wait_until(lambda: is_up(port, "1.0"), interval_s=0.2)
    with reserved_port("127.0.0.1") as port, as_in_the_pod(machine, port, supplementalGroups=[]):
        wait_until(lambda: is_up(port, "0.0"), interval_s=0.2)


def test_manifest_agrees_with_the_other_examples() -> None:
    """The label of the nodes, the group, the names and the ports."""
    spec = pod()
    [container] = spec["containers"]
    [(label, value)] = spec["nodeSelector"].items()
    texts = [path.read_text(encoding="utf-8") for path in KUBERNETES.iterdir()]
    assert all(f"{label}={value}" in text for text in texts if "NODE " in text or "role: Node" in text)
    [scrape] = documents("scrapeconfig.yaml")
    assert scrape["spec"]["kubernetesSDConfigs"][0]["selectors"][0]["label"] == f"{label}={value}"
    [monitor] = documents("servicemonitor.yaml")
    service = of_kind("Service")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert (
        monitor["metadata"]["namespace"]
        == service["metadata"]["namespace"]
        == of_kind("Namespace")["metadata"]["name"]
    )
    assert service["spec"]["selector"] == of_kind("DaemonSet")["spec"]["template"]["metadata"]["labels"]
    [port] = container["ports"]
    assert (port["containerPort"], service["spec"]["ports"][0]["port"]) == (PORT, PORT)
    names = {port["name"], service["spec"]["ports"][0]["name"], monitor["spec"]["endpoints"][0]["port"]}
    assert names == {"metrics"}
    [first, second] = documents("prometheus.yml")[0]["scrape_configs"]
    assert first["kubernetes_sd_configs"][0]["selectors"][0]["label"] == "=".join(
        *service["spec"]["selector"].items()
    )
    assert second["kubernetes_sd_configs"][0]["selectors"][0]["label"] == f"{label}={value}"


def test_pod_states_its_node_in_the_variable_of_the_exporter() -> None:
    """The host name of a pod is not that of the node. tests/exporter/test_names.py checks its effect."""
    [container] = pod()["containers"]
    assert container["env"] == [{"name": "NODE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}]


def test_command_of_the_page_writes_the_prometheus_rule(tmp_path: Path) -> None:
    """The Prometheus Operator reads no file of rules. The object has the same groups."""
    [command] = re.findall(r"^\$ (\{ printf .*?)\n\$ ", PAGE.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    rules = FLEET.with_name("prometheus") / "resctrlmond.rules.yaml"
    (tmp_path / rules.name).write_bytes(rules.read_bytes())
    subprocess.run(["sh", "-e", "-c", command.replace("\\\\", "\\")], cwd=tmp_path, check=True, timeout=60)
    assert yaml.safe_load((tmp_path / "rule.yaml").read_text(encoding="utf-8")) == {
        "apiVersion": "monitoring.coreos.com/v1",
        "kind": "PrometheusRule",
        "metadata": {"name": "resctrlmond", "namespace": "monitoring"},
        "spec": yaml.safe_load(rules.read_text(encoding="utf-8")),
    }
