# SPDX-License-Identifier: Apache-2.0
"""Every program reports a wrong command line in one line."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from resctrlctl.base.defaults import SOCKET
from resctrlmond import __main__ as daemon
from resctrlmond.exporter import __main__ as exporter
from resctrlmond.exporter import command as exporter_command
from resctrlmond.nri import __main__ as nri
from resctrlmond.nri import command as nri_command
from resctrlmond.sim import __main__ as sim


@pytest.mark.parametrize(
    "module",
    [daemon, exporter, nri, sim],
    ids=["resctrlmond", "resctrlmon-exporter", "resctrlmon-nri", "resctrlmond-sim"],
)
def test_wrong_option_is_one_line(
    module: object,
    request: pytest.FixtureRequest,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    name = request.node.callspec.id
    monkeypatch.setattr(sys, "argv", [name, "--no-such-option"])
    with pytest.raises(SystemExit) as ended:
        module.main()  # type: ignore[attr-defined]
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error == f"{name}: error: unrecognized arguments: --no-such-option. See '{name} --help'\n"


@pytest.mark.parametrize("of", [exporter_command, nri_command], ids=["resctrlmon-exporter", "resctrlmon-nri"])
def test_environment_names_the_socket_of_resctrlmond(of: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    def socket_of(*words: str) -> str:
        found: str = of._parser().parse_args(words).manager_socket
        return found

    for value in (None, ""):
        monkeypatch.delenv("RESCTRLMOND_SOCKET", raising=False)
        if value is not None:
            monkeypatch.setenv("RESCTRLMOND_SOCKET", value)
        assert socket_of() == SOCKET
    monkeypatch.setenv("RESCTRLMOND_SOCKET", "/tmp/sim/socket")
    assert socket_of() == "/tmp/sim/socket"
    assert socket_of("--manager-socket", "/other") == "/other"


@pytest.mark.parametrize("words", [[], ["--check-config"]])
def test_profile_of_a_simulation_needs_one(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        daemon.main([*words, "--profile", "intel-rdt"])
    assert ended.value.code == 2
    assert "--profile needs --simulate DIRECTORY" in capsys.readouterr().err
