# SPDX-License-Identifier: Apache-2.0
"""Each reason for which the daemon does not start has its own exit code, and its message is kept."""

from __future__ import annotations

from pathlib import Path

import pytest

from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.daemon.startup import Exit, StartupError, as_startup_error, check_host, check_in_memory
from resctrlmond.resctrl.errors import (
    KernelRefused,
    MonitoringUnavailable,
    NotMounted,
    PermissionDenied,
    ResctrlError,
)


@pytest.mark.parametrize(
    ("kind", "code"),
    [(ConfigError, 78), (NotMounted, 69), (MonitoringUnavailable, 71), (PermissionDenied, 77), (KernelRefused, 1)],
)
def test_each_reason_not_to_start_has_its_exit_code(kind: type[ResctrlError], code: int) -> None:
    cause = kind("offers nothing", path="/sys/fs/resctrl/info", errno=13, remedy="Look at the kernel's command line")
    failed = as_startup_error(cause)
    assert failed.exit == code
    assert str(failed) == str(cause)
    assert as_startup_error(failed) is failed


def test_debian_12_is_refused_with_one_sentence() -> None:
    release = {"ID": "debian", "VERSION_ID": "12", "PRETTY_NAME": "Debian GNU/Linux 12 (bookworm)"}
    with pytest.raises(StartupError) as caught:
        check_host(release)
    assert caught.value.exit == Exit.OLD_HOST
    assert str(caught.value) == (
        "resctrlmond needs Debian 13 or later with systemd 253 or later, "
        "and this host runs Debian GNU/Linux 12 (bookworm). Upgrade the host"
    )


@pytest.mark.parametrize("release", [{"ID": "debian", "VERSION_ID": "13"}, {"ID": "debian"}, {"ID": "other"}, {}])
def test_debian_13_testing_and_sid_are_not_refused(release: dict[str, str]) -> None:
    check_host(release)


def test_a_runtime_folder_that_is_not_in_memory_is_refused() -> None:
    # Every host has /proc; a host may have no disk, with tmpfs on every mount point.
    with pytest.raises(ConfigError) as caught:
        check_in_memory("runtime_dir", "/proc")
    assert "runtime_dir is on proc, not on tmpfs" in str(caught.value)
    assert "Set runtime_dir to a folder in /run" in str(caught.value)
    assert as_startup_error(caught.value).exit == Exit.CONFIG


def test_a_runtime_folder_in_memory_is_not_refused() -> None:
    assert Path("/dev/shm").is_dir()
    check_in_memory("runtime_dir", "/dev/shm")
