# SPDX-License-Identifier: Apache-2.0
"""Start and end of a simulation: command line, signals, the end of its parent, and refused options."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from resctrlmond import __version__
from resctrlmond.resctrl.errors import ResctrlError
from resctrlmond.sim.__main__ import main, parser
from resctrlmond.sim.control.client import Control, Fault
from resctrlmond.sim.fuse.mount import Simulation, SimulationFailed, unmount
from resctrlmond.sim.profiles import PROFILES, profile_named
from tests.wait import wait_until

COMMAND = [sys.executable, "-m", "resctrlmond.sim"]


def is_mounted(path: Path) -> bool:
    return f" {path} " in Path("/proc/self/mountinfo").read_text()


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    made = tmp_path / "m"
    made.mkdir()
    yield made
    unmount(str(made))


def start(mountpoint: Path, *options: str) -> subprocess.Popen[str]:
    server = subprocess.Popen([*COMMAND, str(mountpoint), *options], stdout=subprocess.PIPE, text=True)
    assert server.stdout
    line = server.stdout.readline()
    server.stdout.close()
    assert line.startswith("simulated resctrl (profile ")
    assert line.endswith(f" on {mountpoint}: NOT hardware\n")
    return server


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_unmounts_and_ends_with_status_0(mountpoint: Path, number: int) -> None:
    server = start(mountpoint)
    assert is_mounted(mountpoint)
    server.send_signal(number)
    assert server.wait(60) == 0
    assert not is_mounted(mountpoint)


def test_a_signal_ends_it_though_a_file_is_open_in_it(mountpoint: Path) -> None:
    server = start(mountpoint)
    fd = os.open(mountpoint / "tasks", os.O_RDONLY)
    server.terminate()
    assert server.wait(60) == 0
    assert not is_mounted(mountpoint)
    with pytest.raises(OSError, match="not connected"):
        os.close(fd)


def test_umount_ends_it(mountpoint: Path) -> None:
    server = start(mountpoint, "--profile", "intel-rdt", "--rmids", "8", "--domains", "3", "--residue", "1")
    assert (mountpoint / "info/L3_MON/num_rmids").read_text() == "8\n"
    assert (mountpoint / "mon_data/mon_L3_02").is_dir()
    subprocess.run(["umount", str(mountpoint)], check=True)
    assert server.wait(60) == 0


def test_it_ends_with_the_parent_that_was_killed(mountpoint: Path) -> None:
    code = (
        "import sys, time; from resctrlmond.sim.fuse.mount import Simulation; s = Simulation(sys.argv[1]); s.start();"
        "print(s.pid, flush=True); time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(mountpoint)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    server = int(parent.stdout.readline())
    parent.stdout.close()
    assert is_mounted(mountpoint)
    parent.kill()
    parent.wait()
    wait_until(lambda: not is_mounted(mountpoint))
    wait_until(lambda: not Path(f"/proc/{server}").exists() or "Z" in state(server))


def state(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return "Z"


def test_a_block_leaves_nothing_behind(mountpoint: Path) -> None:
    for _ in range(2):
        with Simulation(str(mountpoint), "monitoring-only", 4) as simulation:
            assert is_mounted(mountpoint)
            assert simulation.pid
            assert (mountpoint / "info/L3_MON/num_rmids").read_text() == "4\n"
        assert simulation.pid == 0
        assert not is_mounted(mountpoint)


def test_a_block_unmounts_even_a_server_that_was_killed(mountpoint: Path) -> None:
    with Simulation(str(mountpoint)) as simulation:
        os.kill(simulation.pid, signal.SIGKILL)
        wait_until(lambda: "Z" in state(simulation.pid))
    assert not is_mounted(mountpoint)


def test_errors_of_a_simulation_are_shown_at_its_end(mountpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The reader of a file sees only EINVAL for an error in the simulator."""
    with Simulation(str(mountpoint)) as simulation:
        Path(f"/proc/{simulation.pid}/fd/2").write_text("an error\n")
    assert capsys.readouterr().err == "an error\n"


def refuse_missing(path: Path) -> str:
    return str(path / "missing")


def refuse_file(path: Path) -> str:
    (path / "file").write_text("")
    return str(path / "file")


def refuse_full(path: Path) -> str:
    (path / "something").write_text("")
    return str(path)


def refuse_mounted(_path: Path) -> str:
    return "/proc"


@pytest.mark.parametrize(
    ("prepare", "words"),
    [
        (refuse_missing, ["No such file or directory", "mkdir"]),
        (refuse_file, ["Not a directory", "another directory"]),
        (refuse_full, ["not empty", "Choose an empty directory"]),
        (refuse_mounted, ["mounted there already", "unmount it first"]),
    ],
)
def test_a_mount_point_that_cannot_be_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], prepare: Callable[[Path], str], words: list[str]
) -> None:
    path = prepare(tmp_path)
    assert main([path]) == 1
    complaint = capsys.readouterr().err
    assert all(word in complaint for word in [path, *words]), complaint
    with pytest.raises(SimulationFailed) as caught:
        Simulation(path).start()
    assert isinstance(caught.value, ResctrlError)
    assert caught.value.path == path
    assert caught.value.remedy


def test_a_dead_simulation_in_the_way_is_named(mountpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    server = start(mountpoint)
    server.kill()
    server.wait()
    assert main([str(mountpoint)]) == 1
    assert f"umount --lazy {mountpoint}" in capsys.readouterr().err


def test_without_mfusepy_the_remedy_is_named(mountpoint: Path) -> None:
    code = "import sys; sys.modules['mfusepy'] = None; from resctrlmond.sim.__main__ import main; sys.exit(main())"
    run = subprocess.run([sys.executable, "-c", code, str(mountpoint)], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert "pip install resctrlmond[sim]" in run.stderr


def test_without_the_right_to_use_fuse_the_remedy_is_named(mountpoint: Path) -> None:
    device = Path("/dev/fuse").stat()
    if device.st_mode & 0o006 == 0o006:
        os.chmod("/dev/fuse", 0o600)
    code = "import os, sys; from resctrlmond.sim.fuse.mount import load_fuse; os.setuid(65534); load_fuse()"
    try:
        run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    finally:
        os.chmod("/dev/fuse", device.st_mode & 0o7777)
    assert "Permission denied (EACCES). Run it as root" in run.stderr


def test_without_the_fuse_device_the_remedy_is_named(mountpoint: Path) -> None:
    inside = ["sh", "-c", 'mount -t tmpfs none /dev && exec "$@"', "sh", *COMMAND, str(mountpoint)]
    run = subprocess.run(["unshare", "--mount", *inside], capture_output=True, text=True, check=False)
    assert run.returncode == 1
    assert run.stderr == (
        "resctrlmond-sim: /dev/fuse: cannot open the FUSE device: No such file or directory (ENOENT). "
        "Load the kernel module: 'modprobe fuse'\n"
    )


def test_second_simulation_on_a_mount_point_is_refused_and_the_first_continues(
    mountpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = start(mountpoint)
    assert main([str(mountpoint)]) == 1
    assert "something is mounted there already. Choose another directory" in capsys.readouterr().err
    assert (mountpoint / "info/last_cmd_status").read_text() == "ok\n"
    server.terminate()
    assert server.wait(60) == 0


@pytest.mark.parametrize(
    "options",
    [
        ["--rmids", "1"],
        ["--domains", "0"],
        ["--rmids", "99999"],
        ["--virtual", "0"],
        ["--lag-ms", "nan"],
        ["--profile", "amd-abmc", "--counters", "-1"],
        ["--events", "foo"],
    ],
)
def test_numbers_that_cannot_be_simulated(
    mountpoint: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(mountpoint), *options])
    assert "cannot be simulated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "kind"),
    [("--rmids", "a number"), ("--lag-ms", "a number"), ("--shareable-bits", "a hexadecimal number")],
)
def test_text_in_the_place_of_a_number(
    mountpoint: Path, capsys: pytest.CaptureFixture[str], option: str, kind: str
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(mountpoint), option, "xyz"])
    assert f"argument {option}: 'xyz' is not {kind}. See " in capsys.readouterr().err


def test_a_machine_that_the_kernel_could_not_drive_is_refused(
    mountpoint: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main([str(mountpoint), "--kernel", "6.12"])
    assert "intel-aet needs a newer kernel than 6.12" in capsys.readouterr().err


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"resctrlmond-sim {__version__}\n"


def test_profiles_are_listed_with_their_features(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list-profiles"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(PROFILES)
    assert (
        "4096 RMIDs, 2 L3 caches, 32 assignable bandwidth counters in each" in lines[list(PROFILES).index("amd-abmc")]
    )


@pytest.mark.parametrize("arguments", [[], [""]])
def test_without_a_mount_point_the_command_line_is_wrong(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert "MOUNTPOINT is missing" in capsys.readouterr().err


def test_the_command_is_installed_under_its_name() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"][parser().prog] == f"{main.__module__}:{main.__name__}"


def test_an_older_kernel_is_mounted(mountpoint: Path) -> None:
    with Simulation(str(mountpoint), "intel-snc2", kernel="6.12", domains=1):
        assert sorted(path.name for path in (mountpoint / "info/L3_MON").iterdir()) == [
            "max_threshold_occupancy",
            "mon_features",
            "num_rmids",
        ]
        assert (mountpoint / "mon_data/mon_L3_00/mon_sub_L3_01/mbm_total_bytes").exists()


def test_profiles_are_named() -> None:
    with pytest.raises(ValueError, match=f"choose one of {', '.join(PROFILES)}"):
        profile_named("amd")
    assert profile_named("intel-aet", rmids=8).num_rmids == 8


def test_a_signal_ends_it_though_a_slow_request_is_being_served(mountpoint: Path) -> None:
    server = start(mountpoint)
    Control(str(mountpoint)).set_faults(Fault(milliseconds=60_000))
    reader = subprocess.Popen(["cat", f"{mountpoint}/mon_data/mon_L3_00/llc_occupancy"], stderr=subprocess.DEVNULL)
    wait_until(lambda: "fuse" in Path(f"/proc/{reader.pid}/wchan").read_text() or state(reader.pid) == "S")
    server.terminate()
    assert server.wait(60) == 0
    assert not is_mounted(mountpoint)
    assert reader.wait(60) != 0
