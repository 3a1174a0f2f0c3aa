# SPDX-License-Identifier: Apache-2.0
"""Every program reports a wrong command line in one line."""

from __future__ import annotations

import sys

import pytest

from resctrlmond import __main__ as daemon
from resctrlmond.exporter import __main__ as exporter
from resctrlmond.nri import __main__ as nri
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


@pytest.mark.parametrize("words", [[], ["--check-config"]])
def test_profile_of_a_simulation_needs_one(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        daemon.main([*words, "--profile", "intel-rdt"])
    assert ended.value.code == 2
    assert "--profile needs --simulate DIRECTORY" in capsys.readouterr().err
