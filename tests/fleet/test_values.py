# SPDX-License-Identifier: Apache-2.0
"""The NRI plugin accepts the converted configuration of nri-resctrl-mon, and no other value is lost silently."""

from __future__ import annotations

import itertools
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from resctrlmond.nri import settings
from tests.fleet.conftest import FLEET, PAGE

CONVERTER = FLEET / "convert-values"
KNOWN = runpy.run_path(str(CONVERTER))["REPLACEMENTS"]
VALUES = """\
resctrlPath: /mnt/resctrl
telemetry:
  prometheus: {enabled: true, listenAddress: ":9100", scrapeInterval: 15s, namespace: ""}
  otlp: {enabled: false, endpoint: "", protocol: grpc, interval: 15s, insecure: true}
  perfCounters: {enabled: true, include: ["stalls_*"], exclude: []}
  resourceAttributes: {}
image: {name: example.com/nri-resctrl-mon, pullPolicy: Always}
resources: {cpu: 10m, memory: 50Mi}
nri: {plugin: {index: 90}, runtime: {patchConfig: true}}
tolerations: []
affinity: []
nodeSelector: []
podPriorityClassNodeCritical: true
"""
MAP = """\
apiVersion: v1
kind: ConfigMap
metadata: {name: nri-resctrl-mon-config.default}
data:
  config.yaml: |
    resctrlPath: /sys/fs/resctrl
    namespaces: [shop, 2026]
    labelSelector: {version: 1.10, active: true}
"""


def converted(top: Path, *texts: str) -> subprocess.CompletedProcess[str]:
    paths = [top / str(number) for number, _ in enumerate(texts)]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text, encoding="utf-8")
    command = [sys.executable, str(CONVERTER), *map(str, paths)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def named(errors: str) -> set[str]:
    """Return the names of the values for which there is a line."""
    return set(re.findall(r"^[^:]*: ([\w.]+)(?: is |:)", errors, re.MULTILINE))


def test_plugin_accepts_the_selection_of_a_config_map(tmp_path: Path) -> None:
    done = converted(tmp_path, VALUES, MAP)
    assert done.returncode == 0, done.stderr
    selection = settings.parse(done.stdout.encode(), "nri.yaml")
    assert selection.namespaces == {"shop", "2026"}
    assert sorted(map(str, selection.requirements)) == ["active: true", "version: 1.10"]


def test_each_value_that_is_not_the_default_has_a_line(tmp_path: Path) -> None:
    done = converted(tmp_path, VALUES)
    assert done.returncode == 0
    assert named(done.stderr) == {
        *("resctrlPath", "image", "resources", "nri.runtime.patchConfig", "podPriorityClassNodeCritical"),
        *(f"telemetry.prometheus.{name}" for name in ("enabled", "listenAddress", "scrapeInterval")),
        *("telemetry.perfCounters.enabled", "telemetry.perfCounters.include"),
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("telemetry: {otlp: {enabled: true, compression: gzip}}", "telemetry.otlp.compression is unknown"),
        ("podMonitor: {enabled: true}\nnovelty: 1", "novelty is unknown"),
    ],
)
def test_unknown_values_are_errors(tmp_path: Path, text: str, expected: str) -> None:
    done = converted(tmp_path, text)
    assert done.returncode == 1
    assert expected in done.stderr


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("- a list", "it does not consist of keys with values"),
        ("kind: ConfigMap\ndata: {}", "the ConfigMap has no data with the key config.yaml"),
        ("kind: ConfigMap", "the ConfigMap has no data with the key config.yaml"),
        ("a:\n\tb: 1", ": line 2: found character"),
        ("namespaces: shop", "namespaces is not a list. Write it as [shop, web]"),
    ],
)
def test_other_files_are_errors(tmp_path: Path, text: str, expected: str) -> None:
    done = converted(tmp_path, text)
    assert done.returncode == 1
    assert expected in done.stderr
    assert (done.stderr.count("\n"), done.stdout.count("namespaces")) == (1, 0)


def test_missing_file_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, str(CONVERTER), str(tmp_path / "none")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.endswith("nri-resctrl-mon: No such file or directory\n")


@pytest.mark.parametrize("text", ["", "null\n", "USER-SUPPLIED VALUES:\nnull\n"])
def test_no_values_give_an_empty_selection(tmp_path: Path, text: str) -> None:
    done = converted(tmp_path, text)
    assert (done.returncode, done.stderr) == (0, "")
    assert not settings.parse(done.stdout.encode(), "nri.yaml").namespaces


def test_heading_of_helm_is_not_a_value(tmp_path: Path) -> None:
    done = converted(tmp_path, "USER-SUPPLIED VALUES:\nnri:\n  plugin:\n    index: 80\n")
    assert done.returncode == 0
    assert named(done.stderr) == {"nri.plugin.index"}


def test_page_names_every_value() -> None:
    text = PAGE.read_text(encoding="utf-8").partition("# MOVING FROM")[2]
    on_page = set(re.findall(r"\*([a-zA-Z.]+)\*", text))
    for name in KNOWN.keys() - settings.FOREIGN_KEYS.keys() | {"resctrlPath"}:
        parts = name.split(".")
        assert {".".join(parts[:length]) for length in range(1, len(parts) + 1)} & on_page, name


BOMB = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{after}: &{after} {{x: *{before}, y: *{before}}}\n"
    for before, after in itertools.pairwise("abcdefghijklmnopqrstuvwxyz")
)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (BOMB, "an alias is not supported: use the output of 'helm get values'"),
        ("nri: &a {runtime: *a}", "an alias is not supported"),
        ("nri: " + "{a: " * 5000 + "1" + "}" * 5000, "nested too deeply"),
        ("nri: " + "[" * 5000 + "]" * 5000, "nested too deeply"),
        ("kind: ConfigMap\ndata: {config.yaml: 'namespaces: &a [*a]'}", "an alias is not supported"),
        ("? [a]\n: 1", "cannot read"),
        ("- 1", "it does not consist of keys with values"),
        ("a: \x00", "cannot read"),
    ],
    ids=range(8),
)
def test_hostile_file_is_refused_in_one_line(tmp_path: Path, text: str, reason: str) -> None:
    done = converted(tmp_path, text)
    assert (done.returncode, done.stdout) == (1, "")
    assert reason in done.stderr
    assert "Traceback" not in done.stderr


def test_names_in_the_file_do_not_control_the_terminal(tmp_path: Path) -> None:
    done = converted(tmp_path, '"a\\e[2J\\u202e": 1\n!!python/object/apply:os.system "b": !!python/name:os.system x')
    assert done.returncode == 1
    assert "'a\\x1b[2J\\u202e' is unknown" in done.stderr
    assert "\x1b" not in done.stderr
    assert "\u202e" not in done.stderr
