# SPDX-License-Identifier: Apache-2.0
"""The manual pages build without a warning, and have the options and exit codes of the programs."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

from resctrlctl.screen.layout import Table, to_text
from resctrlctl.workloads import render
from resctrlmond.api.types import Proof as ShownProof
from resctrlmond.daemon import command as daemon
from resctrlmond.daemon.startup import Exit
from resctrlmond.exporter import command as exporter
from resctrlmond.exporter import listening, metrics
from resctrlmond.nri import command as nri
from resctrlmond.nri import settings as nri_settings
from resctrlmond.nri.messages import MAX_MEMBERS, MAX_SANDBOXES
from resctrlmond.nri.selection import Selection
from resctrlmond.resctrl.counters import EVENTS, Status, event
from resctrlmond.resctrl.witness import Moves, Seen, Watch
from resctrlmond.service.message_ids import MessageId
from resctrlmond.service.rate_limit import BURST, INTERVAL_S
from resctrlmond.sim import __main__ as simulator
from resctrlmond.sim.control.client import Control
from resctrlmond.sim.fuse.filesystem import INEXACT_ATTRIBUTE, MODALIAS_ATTRIBUTE, RMIDS_ATTRIBUTE, TASK_ATTRIBUTE
from resctrlmond.sim.messages import ACT, FAULT, TRUTH, VIRTUAL
from resctrlmond.sim.profiles import PROFILES
from resctrlmond.workloads.figures.accounting import Total
from resctrlmond.workloads.figures.statements import statements
from resctrlmond.workloads.figures.verdict import SLACK_NS, weighed
from resctrlmond.workloads.model.states import ProofKind, Quality
from resctrlmond.workloads.model.workload import State, replace
from tests.hook.builds import BUILDS, SOURCE, compile_hook
from tests.workloads.figures.test_verdict import CLASS_DEFAULT, HERE, OWN, running, used

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "man").glob("*.scd"))
DAEMON = ROOT / "man" / "resctrlmond.8.scd"
EXPORTER = ROOT / "man" / "resctrlmon-exporter.8.scd"
NRI = ROOT / "man" / "resctrlmon-nri.8.scd"
OVERVIEW = ROOT / "man" / "resctrlmond.7.scd"
HOOK = ROOT / "man" / "resctrlmon-oci-hook.8.scd"
SIMULATOR = ROOT / "man" / "resctrlmond-sim.1.scd"


def section(page: Path, heading: str) -> str:
    """The text below a heading of the page, up to the next one. A line in a literal block is not a heading."""
    line = r"```\n(?s:.*?)\n```\n|(?!# ).*\n"
    found = re.search(rf"^# {heading}\n((?:{line})*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    assert found, f"{page.name} has no section {heading}"
    return found[1]


def options(page: Path, heading: str = "OPTIONS") -> set[str]:
    """The options that begin a paragraph there; in the synopsis, all."""
    text = section(page, heading)
    if heading == "OPTIONS":
        text = "\n".join(line for line in text.splitlines() if line.startswith("*"))
    return set(re.findall(r"\*(--?[a-z-]+)\*", text))


def test_cost_of_a_scrape_is_the_one_that_the_benchmark_measured() -> None:
    """The page had rounded figures of an older measurement."""
    rows = (ROOT / "tests" / "bench" / "README.md").read_text(encoding="utf-8")
    measured = re.search(r"^\| a scrape of the exporter with 500 groups \| ([^|]+) \|", rows, re.MULTILINE)
    size = re.search(r"^\| the reply of that scrape, and compressed \| (\d+ KB), (\d+ KB) \|", rows, re.MULTILINE)
    assert measured and size, "tests/bench/README.md has no row for a scrape of 500 groups"
    cost = " ".join(section(EXPORTER, "COST").split())
    time, _, cpu = measured[1].partition(", ")
    assert f"A scrape of 500 workloads takes {time} on a simulated resctrl, {cpu}." in cost
    assert f"Its reply has {size[1]}, or {size[2]} compressed." in cost


def test_pages_and_catalogue_agree_on_a_removed_group() -> None:
    """One page had no new group for it, and the catalogue required a new Assign."""
    catalogue = {
        entry.split("\n", 1)[0]: " ".join(entry.split())
        for entry in (ROOT / "systemd" / "resctrlmond.catalog").read_text(encoding="utf-8").split("\n-- ")
    }
    texts = [
        catalogue[MessageId.GROUP_LOST],
        catalogue[MessageId.UNMOUNTED],
        *(
            " ".join(section(page, "WHEN THINGS FAIL").partition(f"\n{event}\n")[2].partition("\n\n")[0].split())
            for page in (OVERVIEW, DAEMON)
            for event in ("A group is removed by another program", "resctrl is unmounted")
        ),
    ]
    for text in texts:
        assert re.search("again after a delay", text), text


def test_no_text_claims_that_a_container_starts_unmonitored() -> None:
    """resctrlmond may process a request after the hook or the NRI plugin has stopped waiting for the reply."""
    for path in (*PAGES, ROOT / "systemd" / "resctrlmond.catalog"):
        text = " ".join(path.read_text(encoding="utf-8").split())
        assert not re.search(r"(?i)containers? .{0,20}starts? unmonitored|it starts? unmonitored", text), path.name


def exit_codes(page: Path) -> set[int]:
    """The exit codes that have a paragraph."""
    return {int(code) for code in re.findall(r"^\*([0-9]+)\*$", section(page, "EXIT STATUS"), re.MULTILINE)}


def test_page_of_the_simulator_names_modules_and_a_class_that_exist() -> None:
    orders = " ".join(section(SIMULATOR, "ORDERS").split())
    names = re.search(r"_([\w.]+)_ describes\. The class _(\w+)_ in _([\w.]+)_ ", orders)
    assert names, orders
    described, control, client = names.groups()
    assert importlib.import_module(described).FAULT == FAULT
    assert getattr(importlib.import_module(client), control) is Control


def warnings(roff: bytes) -> str:
    """Return the warnings of man and groff for a page."""
    environment = os.environ | {"LC_ALL": "C.UTF-8", "MANWIDTH": "80"}
    command = ["man", "--warnings", "--local-file", "-"]
    done = subprocess.run(command, input=roff, env=environment, capture_output=True, timeout=60, check=False)
    assert done.returncode or done.stdout
    return done.stderr.decode()


def lint(roff: bytes) -> list[str]:
    """Return the warnings of mandoc, another reader of manual pages, for a page."""
    command = ["mandoc", "-T", "lint", "-W", "warning"]
    done = subprocess.run(command, input=roff, capture_output=True, timeout=60, check=False)
    # scdoc's own: one paragraph macro more than needed, which changes nothing that is seen.
    return [line for line in done.stdout.decode().splitlines() if "skipping paragraph macro: PP" not in line]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_builds_without_a_warning(page: Path) -> None:
    built = subprocess.run(["scdoc"], input=page.read_bytes(), capture_output=True, timeout=60, check=False)
    assert (built.returncode, built.stderr) == (0, b"")
    name, number = page.stem.rsplit(".", 1)
    assert f'.TH "{name}" "{number}"' in built.stdout.decode()
    assert warnings(built.stdout) == ""
    assert lint(built.stdout) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_page_has_no_table(page: Path) -> None:
    """scdoc does not request tbl. Without it, the man of Debian 13 renders no table, and lintian warns."""
    assert not re.search(r"^\[\[|^\|[\[\]-]", page.read_text(encoding="utf-8"), re.MULTILINE)


def test_a_warning_would_be_seen() -> None:
    wrong = b'.TH "page" "8"\n.SH NAME\npage - is wrong\n.nosuch\n'
    assert "nosuch" in warnings(wrong)
    assert "nosuch" in " ".join(lint(wrong))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_pages_of_the_project_that_it_names_exist(page: Path) -> None:
    names = re.findall(r"\*((?:org\.)?resctrl(?:mon|ctl)[\w.-]*)\*\(([0-9])\)", page.read_text(encoding="utf-8"))
    assert names
    assert {f"{name}.{number}.scd" for name, number in names} <= {known.name for known in PAGES}


def test_the_units_name_pages_that_exist() -> None:
    units = [path for path in (ROOT / "systemd").iterdir() if path.suffix in (".service", ".socket")]
    named = {name for unit in units for name in re.findall(r"man:(\S+)\(([0-9])\)", unit.read_text(encoding="utf-8"))}
    assert named
    assert {f"{name}.{number}.scd" for name, number in named} <= {known.name for known in PAGES}


def test_failed_load_of_the_witness_is_a_failed_unit() -> None:
    """systemctl start succeeded, although the kernel had refused the program or there was none."""
    units = ROOT / "systemd"
    name = "resctrlmond-witness.service"
    witness = (units / name).read_text(encoding="utf-8")
    assert not re.search("^(?:SuccessExitStatus|Condition.*)=|=-/", witness, re.MULTILINE)
    assert "\nSyslogLevel=err\n" in witness
    # The daemon starts anyway.
    daemon_unit = (units / "resctrlmond.service").read_text(encoding="utf-8")
    assert re.findall(rf"^(\w+)=.*\b{name}\b", daemon_unit, re.MULTILINE) == ["Wants", "After"]
    postinst = (ROOT / "packaging" / "debian" / "resctrlmond-witness.postinst").read_text(encoding="utf-8")
    assert f"deb-systemd-invoke start {name} || true\n" in postinst


def test_every_option_of_the_daemon() -> None:
    known = {option for action in daemon._parser()._actions for option in action.option_strings}
    assert options(DAEMON) == known
    assert options(DAEMON, "SYNOPSIS") == known - {"-h", "--help", "--version"}


def test_every_option_of_the_hook() -> None:
    known = set(re.findall(r'"(--[a-z-]+)"', SOURCE.read_text(encoding="utf-8")))
    assert len(known) > 1
    assert options(HOOK) == options(HOOK, "SYNOPSIS") == known


def test_the_defaults_of_the_hook() -> None:
    text = section(HOOK, "OPTIONS")
    source = SOURCE.read_text(encoding="utf-8")
    paths = re.findall(r'^static const char \*(?:daemon|journal)_path = "(.+)";$', source, re.MULTILINE)
    seconds = re.findall(r"\b(?:start_)?timeout = (\d+)\.0,", source)
    assert (len(paths), len(seconds)) == (2, 2)
    assert re.findall(r"Default: (.+?)\.(?:\s|$)", text) == [f"_{paths[0]}_", *seconds, f"_{paths[1]}_"]


def test_the_limits_of_the_hook() -> None:
    text = " ".join(section(HOOK, "PROTOCOL").split())
    limits = dict(re.findall(r"\b(MAX_[A-Z]+) = 1 << (\d+)", SOURCE.read_text(encoding="utf-8")))
    bytes_ = {name: 1 << int(bits) for name, bits in limits.items()}
    assert f"The state can have up to {bytes_['MAX_STATE'] >> 20} MiB" in text
    assert f"each string of more than {bytes_['MAX_STRING'] >> 10} KiB" in text
    assert f"can have up to {bytes_['MAX_MESSAGE'] >> 20} MiB" in text
    assert f"A reply of more than {bytes_['MAX_REPLY'] >> 10} KiB" in text


def test_every_exit_code_of_the_daemon() -> None:
    assert exit_codes(DAEMON) == set(Exit)


def test_every_option_of_the_exporter() -> None:
    known = {option for action in exporter._parser()._actions for option in action.option_strings}
    assert options(EXPORTER) == known
    assert options(EXPORTER, "SYNOPSIS") == known - {"-h", "--help", "--version"}
    text = section(EXPORTER, "OPTIONS")
    defaults = {action.dest: action.default for action in exporter._parser()._actions}
    assert f"Default: _{listening.DEFAULT}_" in text
    for default in (defaults["timeout"], exporter._INTERVAL_S):
        assert f"Default: _{default:g}_" in text
    assert {event.replace("_", "\\_").replace("*", "\\*") for event in metrics.DEFAULT_EVENTS} <= set(
        re.findall(r"_((?:\\.|[a-z])+)_", text)
    )
    assert {f"_{name}_" for name in metrics.Names} <= set(re.findall(r"_[a-z-]+_", text))
    assert f"Default: _{', '.join(metrics.DEFAULT_NAMES)}_." in text
    assert exit_codes(EXPORTER) == {os.EX_OK, 2, os.EX_OSERR, os.EX_CANTCREAT}
    for path in ("systemd/resctrlmon-exporter.service", "packaging/examples/resctrlmon-otlp.service"):
        unit = (ROOT / path).read_text(encoding="utf-8")
        assert "RestartSec=3\n" in unit
        assert "RestartSteps=4\nRestartMaxDelaySec=30\nRestartPreventExitStatus=2\n" in unit


def test_every_metric_of_the_exporter() -> None:
    """Each with its labels and type; and no page has another metric."""
    events = metrics.EVENT_METRICS.values()
    declared = [value for value in vars(metrics).values() if isinstance(value, metrics.Metric)]
    declared += [
        metric for row in events for metric in (row.workload, row.machine, row.accounted, row.node) if metric
    ]
    # The labels of these have paragraphs of their own.
    pods = {row.pod for row in events}
    expected = {f"*{metric.sample}*, {metric.type.value}" for metric in pods}
    names = section(EXPORTER, "NAMES OF OTHER EXPORTERS")
    assert {label for metric in pods for label in metric.labels} <= set(
        re.findall(r"_(\w+)_", names.replace("\\_", "_"))
    )
    for metric in declared:
        labels = "{" + ", ".join(f"_{label}_" for label in metric.labels) + "}" if metric.labels else ""
        kind = "" if metric.type is metrics.Type.INFO else f", {metric.type.value}"
        expected.add(f"*{metric.sample}*{labels}{kind}")
    text = "\n".join(
        section(EXPORTER, f"METRICS OF {of}") for of in ("WORKLOADS", "THE MACHINE", "SUMS", "THE SERVICE")
    )
    found = re.findall(r"^(\*(?:resctrlmond|l3|perf|node)_.*?)(?:\+\+)?$", text + names, re.MULTILINE)
    assert sorted(found) == sorted(expected)


def test_every_option_of_the_nri_adapter() -> None:
    known = {option for action in nri._parser()._actions for option in action.option_strings}
    assert options(NRI) == known
    assert options(NRI, "SYNOPSIS") == known - {"-h", "--help", "--version"}
    text = section(NRI, "OPTIONS")
    defaults = {action.dest: action.default for action in nri._parser()._actions}
    for name in ("socket", "manager_socket", "name", "index", "log_level"):
        assert f"Default: _{defaults[name]}_." in text


def test_every_exit_code_of_the_nri_adapter() -> None:
    assert exit_codes(NRI) == {0, 2, nri.EXIT_CONFIG}
    unit = (ROOT / "systemd" / "resctrlmon-nri.service").read_text(encoding="utf-8")
    assert f"RestartPreventExitStatus=2 {nri.EXIT_CONFIG}\n" in unit


def test_every_configuration_key_of_the_nri_adapter() -> None:
    text = section(NRI, "CONFIGURATION")
    assert set(re.findall(r"^\*([a-zA-Z]+)\*: ", text, re.MULTILINE)) == set(nri_settings.KEYS)
    assert nri_settings.DEFAULT_PATH in text
    [example] = re.findall(r"```\n(namespaces.*?)```", NRI.read_text(encoding="utf-8"), re.DOTALL)
    assert nri_settings.parse(example.encode(), "page") != Selection()


def test_limits_of_the_nri_adapter_are_in_its_page() -> None:
    text = section(NRI, "PODS")
    assert f"Up to {MAX_SANDBOXES} sandboxes and {MAX_MEMBERS} containers" in text
    assert (f"logged {BURST} times a minute" in text, INTERVAL_S) == (True, 60)


def test_page_names_the_replacements_of_foreign_keys() -> None:
    text = section(NRI, "MOVING FROM NRI-RESCTRL-MON")
    assert all(key in text for key in nri_settings.FOREIGN_KEYS)
    keys = set(re.findall(r"'([a-z_]+)' in resctrlmond.yaml", " ".join(nri_settings.FOREIGN_KEYS.values())))
    assert {f"*{key}*" for key in keys} <= set(re.findall(r"\*[a-z_]+\*", text))


@pytest.mark.parametrize("build", BUILDS)
def test_every_exit_code_of_the_hook(tmp_path: Path, build: str) -> None:
    absent = ["--socket", f"{tmp_path}/daemon", "--journal", f"{tmp_path}/journal"]
    seen = {
        subprocess.run(
            [compile_hook(build), *arguments, *absent],
            input=b"{}",
            capture_output=True,
            timeout=60,
            check=False,
        ).returncode
        for arguments in (["poststop"], ["poststop", "--strict"], [], ["--strict"], ["--no-such-option"])
    }
    assert exit_codes(HOOK) == seen


@pytest.mark.parametrize("page", [DAEMON, SIMULATOR], ids=lambda page: page.name)
def test_every_profile_of_the_simulator(page: Path) -> None:
    text = section(page, "OPTIONS")
    named = {
        name for name in re.findall(r"_([a-z0-9-]+)_", text) if name.startswith(("intel-", "amd-", "monitoring-"))
    }
    assert named == set(PROFILES)


def test_every_option_of_the_simulator() -> None:
    known = {option for action in simulator.parser()._actions for option in action.option_strings}
    assert options(SIMULATOR) == known


def test_every_order_to_the_simulator() -> None:
    named = set(re.findall(r"^_(user\.[a-z.A-Z]+)_$", section(SIMULATOR, "ORDERS"), re.MULTILINE))
    others = {TASK_ATTRIBUTE + "TID", RMIDS_ATTRIBUTE, MODALIAS_ATTRIBUTE, INEXACT_ATTRIBUTE}
    assert named == {FAULT, ACT, TRUTH, VIRTUAL} | others


def test_every_configuration_key_that_is_named_exists() -> None:
    keys = set(
        re.findall(r"^\*([a-z_]+)\*: ", section(ROOT / "man" / "resctrlmond.yaml.5.scd", "KEYS"), re.MULTILINE)
    )
    named = set(re.findall(r"\*([a-z]+_[a-z_]+)\*(?!\()", DAEMON.read_text(encoding="utf-8")))
    assert named
    assert named <= keys


def test_the_overview_names_every_other_page() -> None:
    text = section(OVERVIEW, "DESCRIPTION")
    named = {f"{name}.{number}.scd" for name, number in re.findall(r"\*([\w.-]+)\*\(([0-9])\)", text)}
    assert named == {page.name for page in PAGES} - {OVERVIEW.name}


def test_overview_lists_every_event_with_its_unit() -> None:
    text = section(OVERVIEW, "EVENTS")
    units: dict[str, str] = {}
    for line in re.findall(r"^(\*\w+\*.*)$", text, re.MULTILINE):
        unit = re.search(r" \((\w+)\)$", line)
        units |= dict.fromkeys(re.findall(r"\*(\w+)\*", line), unit[1] if unit else "")
    assert units == {name: event.unit for name, event in EVENTS.items()}


def test_example_of_the_proofs_is_what_show_prints() -> None:
    """No test compared the example with the sentences of figures.statements."""
    ms = 1_000_000
    watch, until_ns = Watch(begun_ns=9_184 * ms, gaps=0), 8_731_402 * ms
    of = running(entered_ns=11 * ms)
    of = of.with_group(replace(of.first, created_ns=8_642_015 * ms))
    of = replace(of, members=(replace(of.members[0], id="nginx.service"),), proof=replace(of.proof, watch=watch))
    uses = [used(ids, ns, HERE, at_ns=until_ns) for ids, ns in ((OWN, 61_730 * ms), (CLASS_DEFAULT, 1_274 * ms))]
    of = weighed(of, Seen(watch, uses), Moves(), until_ns)
    counted = [Total(event("mbm_total_bytes"), 7, Quality.EXACT)]
    rows = [
        render._proof_row(ShownProof(kind=one.kind, shown=one.shown, text=one.text))
        for one in statements(of, counted, until_ns + 16 * ms)
    ]
    printed = to_text([Table(render._PROOF_COLUMNS, tuple(rows))], 70, legend=True)
    [example] = re.findall(r"```\n(PROOF .*?)```", section(OVERVIEW, "QUALITY"), re.DOTALL)
    assert example == printed


def test_pages_state_the_cpu_time_that_a_proof_allows() -> None:
    """One page stated that no task was outside, although a millisecond is allowed."""
    allowed = f"at most {SLACK_NS / 1e6:g} ms of CPU time"
    proofs = " ".join(section(OVERVIEW, "QUALITY").partition("\n## The five proofs\n")[2].split())
    for kind, following in ((ProofKind.CLOSED, ProofKind.ALONE), (ProofKind.ALONE, ProofKind.READ)):
        assert allowed in proofs.partition(f"_{kind}_ ")[2].partition(f"_{following}_ ")[0]
    interface = (ROOT / "man" / "org.resctrlmon.Manager.5.scd").read_text(encoding="utf-8")
    for kind in (ProofKind.CLOSED, ProofKind.ALONE):
        assert re.search(rf"^\*{kind}\*\n\t[^\n]*{allowed}", interface, re.MULTILINE), kind


def test_overview_lists_every_state_quality_proof_and_word() -> None:
    kinds = re.findall(r"^_(\w+)_$", section(OVERVIEW, "QUALITY"), re.MULTILINE)
    assert kinds == [*Quality, *ProofKind]
    assert set(State) <= set(re.findall(r"_(\w+)_", section(OVERVIEW, "LIFETIMES")))
    words = re.search(r"has a word \((.*?)\)", section(OVERVIEW, "QUALITY"))
    assert words
    assert {Status(word.strip("_").lower()) for word in words[1].split(", ")} == set(Status) - {Status.OK}
