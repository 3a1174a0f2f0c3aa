# SPDX-License-Identifier: Apache-2.0
"""The file for node_exporter: valid, replaced as a whole, readable by others, and removed at the end."""

from __future__ import annotations

import contextlib
import errno
import http.client
import os
import re
import resource
import signal
import stat
from pathlib import Path
from typing import NoReturn

import pytest
from prometheus_client.parser import text_string_to_metric_families

from resctrlmond.exporter.collector import Exporter
from resctrlmond.exporter.source import Source
from resctrlmond.exporter.textfile import Textfile
from tests.exporter.conftest import Machine, request
from tests.exporter.node_exporter import node_exporter, write_file
from tests.exporter.test_figures import run_for
from tests.wait import wait_until


def test_file_is_replaced_and_removed(machine: Machine) -> None:
    machine.start()
    folder = machine.top / "textfiles"
    folder.mkdir()
    file = folder / "resctrlmond.prom"
    process = write_file(folder, machine.socket, machine.top / "log")
    try:
        wait_until(file.exists)
        assert stat.S_IMODE(file.stat().st_mode) == 0o644
        with file.open() as opened:
            machine.call("Create", key="k", claim="me")
            wait_until(lambda: 'key="k"' in file.read_text())
            # A reader of the former file still gets the whole of it.
            assert os.fstat(opened.fileno()).st_nlink == 0
            before = opened.read()
        assert before.endswith("\n")
        assert "resctrlmond_up 1.0" in before
        assert 'key="k"' not in before
        names = {family.name for family in text_string_to_metric_families(file.read_text())}
        assert "resctrlmond_core_energy_joules" in names
        assert not any(name.endswith("_created") for name in names)
        # node_exporter refuses times.
        lines = [line for line in file.read_text().splitlines() if not line.startswith("#")]
        assert {len(line.rpartition("}")[2].split()) for line in lines if "}" in line} == {1}
        machine.kill()
        wait_until(lambda: "resctrlmond_up 0.0" in file.read_text())
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert os.listdir(folder) == []


def test_node_exporter_serves_the_file_without_an_error(machine: Machine) -> None:
    """It has metrics of its own process, and reports an error at each scrape for a second one with the same name."""
    machine.start()
    run_for(machine, "ended", namespace="shop")
    folder = machine.top / "textfiles"
    folder.mkdir()
    process = write_file(folder, machine.socket, machine.top / "log")
    try:
        wait_until((folder / "resctrlmond.prom").exists)
        with node_exporter(machine.top, folder) as server:
            reply = request(http.client.HTTPConnection("127.0.0.1", server.port, timeout=60))
    finally:
        process.kill()
        process.wait()
    assert reply.status == 200
    assert "level=error" not in server.log.read_text()
    served = parsed(reply.text)
    assert served["node_textfile_scrape_error", frozenset()] == 0
    # The selector of the alert ResctrlmonTextfileStale among the examples.
    files = [dict(labels)["file"] for name, labels in served if name == "node_textfile_mtime_seconds"]
    assert [file for file in files if re.fullmatch(r".*/resctrlmond[.]prom", file)] == files != []
    written = parsed((folder / "resctrlmond.prom").read_text())
    of = frozenset({"by": "namespace", "name": "shop"}.items())
    assert written["resctrlmond_accounted_core_energy_joules_total", of] > 0
    # The figures of a run that has ended do not change between two readings.
    ended = {of: value for of, value in written.items() if ("key", "ended") in of[1] or ("name", "shop") in of[1]}
    assert ended
    assert {of: served.get(of) for of in ended} == ended


def parsed(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    return {
        (one.name, frozenset(one.labels.items())): one.value
        for family in text_string_to_metric_families(text)
        for one in family.samples
    }


def test_directory_that_is_missing_is_reported(tmp_path: Path) -> None:
    process = write_file(tmp_path / "none", "/nowhere", tmp_path / "log")
    assert process.wait(60) == os.EX_CANTCREAT
    log = (tmp_path / "log").read_text()
    assert "cannot write" in log
    assert "Check that the directory exists" in log


class _BrokenExporter(Exporter):
    """An exporter whose file does not fit on the disk, or that has a defect."""

    error: Exception

    def render(self, *_: object, **__: object) -> NoReturn:
        raise self.error


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), RuntimeError("a defect")])
def test_file_that_cannot_be_replaced_is_removed(
    tmp_path: Path, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """node_exporter would serve the figures of the last success, with resctrlmond_up 1, for as long as it lasts."""
    file = tmp_path / "resctrlmond.prom"
    exporter = _BrokenExporter(Source("/nowhere", 1))
    exporter.error = error
    textfile = Textfile(str(tmp_path), exporter, 1)
    for _ in range(2):
        file.write_text("resctrlmond_up 1.0\n")
        assert not textfile.write()
        assert not file.exists()
    assert caplog.text.count(f"cannot write {file}: ") == 1


@pytest.mark.parametrize("kind", ["link", "fifo", "left"])
def test_file_of_another_user_beside_it_is_not_followed(tmp_path: Path, kind: str) -> None:
    """In a directory that others can write to, the name of the other file can be known before."""
    folder, victim = tmp_path / "textfiles", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("secret")
    name = folder / ".resctrlmond.prom.new"
    match kind:
        case "link":
            os.symlink(victim, name)
        case "fifo":
            os.mkfifo(name)
        case _:
            name.write_text("the file of an exporter that was killed")
    assert Textfile(str(folder), Exporter(Source("/nowhere", 1)), 1).write()
    assert victim.read_text() == "secret"
    assert os.listdir(folder) == ["resctrlmond.prom"]
    assert (folder / "resctrlmond.prom").is_file()


def test_link_that_is_put_there_again_is_not_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another user can do so between the removal of the other file and its creation."""
    folder, victim = tmp_path / "textfiles", tmp_path / "victim"
    folder.mkdir()
    victim.write_text("secret")
    unlink = os.unlink

    def replaced(path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            unlink(path)
        if not os.path.lexists(path):
            os.symlink(victim, path)

    monkeypatch.setattr(os, "unlink", replaced)
    assert not Textfile(str(folder), Exporter(Source("/nowhere", 1)), 1).write()
    assert victim.read_text() == "secret"


def test_file_that_does_not_fit_leaves_nothing(tmp_path: Path) -> None:
    """As on a full disk."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        assert not Textfile(str(tmp_path), Exporter(Source("/nowhere", 1)), 1).write()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert os.listdir(tmp_path) == []
