# SPDX-License-Identifier: Apache-2.0
"""resctrlctl units exact: drop-ins that put the program before each command of a service."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest

from resctrlctl.command import main
from resctrlctl.units import exact_units, sandbox, unit_files
from resctrlctl.units.exec_lines import UnknownSyntax, find_program, with_program
from resctrlctl.units.unit_files import UnitLine
from resctrlmond.configuration import config
from resctrlmond.host import unit_exec
from resctrlmond.host.unit_exec import PROGRAM


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directories of unit files and of the configuration, an installed program, and a systemctl with the files."""
    monkeypatch.setattr(config, "DEFAULT_PATH", str(tmp_path / "resctrlmond.yaml"))
    monkeypatch.setattr(config, "DROP_INS", str(tmp_path / "resctrlmond.d"))
    monkeypatch.setattr(exact_units, "SYSTEM", str(tmp_path / "etc"))
    monkeypatch.setattr(sandbox, "_SELINUX", str(tmp_path / "selinux"))
    monkeypatch.setattr(sandbox, "_PAM", (str(tmp_path / "pam.d"), str(tmp_path / "vendor-pam.d")))
    program = tmp_path / "resctrlmon-unit-exec"
    program.write_text('#!/bin/sh\nexec "$@"\n')
    program.chmod(0o755)
    monkeypatch.setattr(unit_exec, "PROGRAM", str(program))
    systemctl = tmp_path / "systemctl"
    # As the real one: each file after its path, with an empty line between files.
    systemctl.write_text(f"""#!/bin/sh
echo "$@" >>{tmp_path}/called
case $1 in
cat)
    set -- "$4"
    template=$(echo "$1" | sed s/@.*[.]/@./)
    for file in {tmp_path}/usr/$1 {tmp_path}/usr/$template; do [ ! -e "$file" ] || break; done
    [ -e "$file" ] || {{ echo "No files found for $1." >&2; exit 1; }}
    echo "# $file"; cat "$file"
    for file in {tmp_path}/usr/$1.d/*.conf {tmp_path}/etc/$1.d/*.conf; do
        [ ! -e "$file" ] || {{ echo; echo "# $file"; cat "$file"; }}
    done ;;
esac
""")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    for name in ("usr", "etc", "pam.d", "vendor-pam.d"):
        (tmp_path / name).mkdir()
    return tmp_path


def unit(machine: Path, name: str, text: str, drop_in: str = "") -> Path:
    path = machine / "usr" / name
    if drop_in:
        path = machine / "etc" / f"{name}.d" / drop_in
        path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    return path


def drop_in(machine: Path, name: str) -> str:
    return (machine / "etc" / f"{name}.d" / exact_units.FILE).read_text()


def commands(machine: Path, name: str) -> list[str]:
    """Return the commands in effect, with P for the program."""
    found = unit_files.settings(unit_files.files_of(name))
    lines = exact_units.originals(exact_units.commands_of(found))
    return [line.replace(unit_exec.PROGRAM, "P") for line in lines]


def called(machine: Path) -> list[str]:
    file = machine / "called"
    lines = [line for line in file.read_text().splitlines() if not line.startswith("cat")]
    file.write_text("")
    return lines


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("/bin/a", "P /bin/a"),
        ("/bin/a  -x   'b c' \"$D\" ${E} %i", "P /bin/a  -x   'b c' \"$D\" ${E} %i"),
        ("-/bin/a", "-P /bin/a"),
        ("+!:-/bin/a b", "+!:-P /bin/a b"),
        ("!!/bin/a", "!!P /bin/a"),
        ("@/bin/a zero one", "P @ /bin/a zero one"),
        ("-@+/bin/a zero", "-+P @ /bin/a zero"),
        ("sh -c x", "P @ {sh} sh -c x"),
        ("-@sh zero -c x", "-P @ {sh} zero -c x"),
        ("%h/bin/a %i", "P %h/bin/a %i"),
        ("-%t/a", "-P %t/a"),
        (r"/bin/a\x20b c", r"P /bin/a\x20b c"),
        ('"/bin/a b" c', 'P "/bin/a b" c'),
        ("-'/bin/a b' c", "-P '/bin/a b' c"),
        ("/bin/a ; -/bin/b c ; @/bin/d zero", "P /bin/a ; -P /bin/b c ; P @ /bin/d zero"),
        (r"/bin/a \; /bin/b", r"P /bin/a \; /bin/b"),
        ("/bin/a ';' /bin/b \";\" x; /bin/c", "P /bin/a ';' /bin/b \";\" x; /bin/c"),
        (r'/bin/a "b \" ; /bin/c" d', r'P /bin/a "b \" ; /bin/c" d'),
        ("/bin/a 'b\" ; ' c", "P /bin/a 'b\" ; ' c"),
        ("/bin/a\t;\t/bin/b", "P /bin/a\t;\tP /bin/b"),
        ("/bin/ä ö", "P /bin/ä ö"),
    ],
)
def test_program_is_put_before_each_command_of_a_line(line: str, expected: str) -> None:
    assert with_program(line, "P", find_program) == expected.replace("{sh}", find_program("sh"))


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ('"-/bin/a"', "has a prefix that is quoted or not known"),
        ("|/bin/a", "has a prefix that is quoted or not known"),
        ("-|/bin/a", "has a prefix that is quoted or not known"),
        ("-", "has a prefix that is quoted or not known"),
        ("/bin/$A", "the path /bin/$A has a $"),
        ("bin/a", "the path bin/a is not absolute"),
        ("a%i", "the path a%i is not absolute"),
        ("no-such-command-anywhere", "was not found in the directories of system programs"),
        ("/bin/a 'b", "a quote is not closed"),
    ],
)
def test_line_that_cannot_be_changed_is_refused(line: str, error: str) -> None:
    with pytest.raises(UnknownSyntax, match=error.replace("$", "[$]")):
        with_program(line, "P", find_program)


FULL = """\
# a comment with a [Service] section
[Unit]
Description=a
ExecStart=/not/this
[Service]
Type=notify
ExecStartPre=/bin/old
ExecStartPre=
ExecStartPre=-/bin/pre \\
  # a comment in it
    %i \\
  last
ExecStart = @/bin/main zero $A
ExecReload=/bin/kill -HUP $MAINPID ; /bin/b
ExecStopPost=+/bin/true
[Install]
ExecStart=/nor/this
"""


def test_drop_in_keeps_the_text_of_the_unit_files(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unit(machine, "web.service", FULL)
    unit(machine, "web.service", "[Service]\nExecStop=/bin/stop\n", "override.conf")
    assert main(["units", "exact", "web.service"]) == 0
    out, err = capsys.readouterr()
    assert out == "web.service: exact\n"
    assert "systemctl stop web.service; sleep 2; systemctl start web.service" in err
    expected = [
        "ExecStartPre=-P /bin/pre  %i  last",
        "ExecStart=P @ /bin/main zero $A",
        "ExecReload=P /bin/kill -HUP $MAINPID ; P /bin/b",
        "ExecStop=P /bin/stop",
        "ExecStopPost=+P /bin/true",
    ]
    assert commands(machine, "web.service") == expected
    assert drop_in(machine, "web.service").count("ExecStart=\n") == 1
    assert called(machine) == ["daemon-reload", "is-active --quiet resctrlmond.service", "reload resctrlmond.service"]
    assert config.load().units == ("web.service",)
    # Again, nothing changes; and with another command, it is written again.
    assert main(["units", "exact", "web.service"]) == 0
    assert capsys.readouterr().out == "web.service: exact already\n"
    assert called(machine) == []
    unit(machine, "web.service", "[Service]\nExecStart=\nExecStart=/bin/new\n", "override.conf")
    assert main(["units", "exact", "web.service"]) == 0
    assert "ExecStart=P /bin/new" in commands(machine, "web.service")
    assert main(["units", "status", "--json"]) == 0
    path = str(machine / "etc/web.service.d" / exact_units.FILE)
    captured = capsys.readouterr().out
    assert json.loads(captured[captured.index("{") :])["exact"] == [{"unit": "web.service", "path": path}]
    assert main(["units"]) == 0
    assert path in capsys.readouterr().out
    assert main(["units", "inexact", "web.*"]) == 0
    assert capsys.readouterr().out == "web.service: inexact, and still watched\n"
    assert os.listdir(machine / "etc/web.service.d") == ["override.conf"]
    assert called(machine)[-1] == "daemon-reload"
    assert main(["units", "inexact", "web.service"]) == 0
    assert capsys.readouterr().out == "no service that matches is exact\n"


def test_service_that_no_glob_selects_is_not_called_watched(
    machine: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    unit(machine, "web.service", FULL)
    assert main(["units", "exact", "web.service"]) == 0
    assert main(["units", "disable", "web.service"]) == 0
    capsys.readouterr()
    assert main(["units", "inexact", "web.service"]) == 0
    assert capsys.readouterr().out == "web.service: inexact\n"


def test_status_shows_exact_services_that_no_glob_selects(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They start through the program all the same, and it said only that no units are watched."""
    for name in ("s@.service", "t.service"):
        unit(machine, name, "[Service]\nExecStart=/bin/a\n")
    assert main(["units", "exact", "s@.service", "t.service"]) == 0
    assert main(["units", "disable", "s@*.service", "t.service"]) == 0
    capsys.readouterr()
    assert main(["units", "status"]) == 0
    printed = capsys.readouterr()
    assert "no units are watched" in printed.out
    assert f"t.service      {machine}/etc/t.service.d/{exact_units.FILE}" in printed.out
    assert "are in no group. To watch them: resctrlctl units enable 's@*.service' t.service" in printed.err
    assert main(["units", "enable", "s@*.service", "t.service"]) == 0
    capsys.readouterr()
    assert main(["units", "status"]) == 0
    assert capsys.readouterr().err == ""


def test_template_stands_for_its_instances(machine: Path) -> None:
    unit(machine, "job@.service", "[Service]\nType=oneshot\nExecStart=/bin/a %i\nExecStart=-/bin/b ; /bin/c\n")
    assert main(["units", "exact", "job@.service"]) == 0
    assert commands(machine, "job@.service") == ["ExecStart=P /bin/a %i", "ExecStart=-P /bin/b ; P /bin/c"]
    assert config.load().units == ("job@*.service",)
    assert main(["units", "exact", "job@1.service"]) == 0
    assert config.load().units == ("job@*.service",)


def test_service_that_a_glob_selects_gets_no_glob(machine: Path) -> None:
    (machine / "resctrlmond.yaml").write_text("units: ['*.service', '!b*']\n")
    for name in ("a.service", "b.service"):
        unit(machine, name, "[Service]\nExecStart=/bin/a\n")
    assert main(["units", "exact", "a.service"]) == 0
    assert called(machine) == ["daemon-reload"]
    assert main(["units", "exact", "b.service"]) == 1
    assert not (machine / "etc/b.service.d").exists()


SERVICE = "[Service]\nExecStart=/bin/a\n"


@pytest.mark.parametrize(
    ("command", "line", "file"),
    [
        ("/usr/sbin/sshd -D $SSHD_OPTS", "@include common-session", "sshd"),
        ("-/usr/sbin/sshd -i", "session    include      common-session", "sshd"),
        ("/bin/a ; @sshd zero", "session substack common-session", "sshd"),
        ("/usr/sbin/sshd", "-session optional /lib/security/pam_systemd.so kill=1", "sshd"),
        ("-/sbin/agetty -o '-- \\u' - $TERM", "session\t[success=ok default=bad]\tpam_systemd.so", "login"),
        ("/usr/sbin/sshd", "#session optional pam_systemd.so", ""),
        ("/usr/sbin/sshd", "session optional pam_systemd_home.so", ""),
        ("/usr/sbin/sshd", "auth include common-session", ""),
        ("/usr/sbin/sshd", "@include missing", ""),
        ("/usr/sbin/sshd", "@include sshd", ""),
        ("/usr/sbin/cron -f", "session required pam_unix.so", ""),
    ],
)
def test_service_that_opens_sessions_is_exact_with_a_warning(
    machine: Path, capsys: pytest.CaptureFixture[str], command: str, line: str, file: str
) -> None:
    """No warning stated that sessions make the figures of ssh.service estimated."""
    for name in ("sshd", "login", "cron"):
        (machine / "pam.d" / name).write_text(f"# {name}\n{line}\n")
    (machine / "vendor-pam.d" / "common-session").write_text("session optional\tpam_systemd.so\n")
    find = machine / "sshd"
    find.write_text("")
    unit(machine, "ssh.service", f"[Service]\nExecStart={command.replace('@sshd', f'@{find}')}\n")
    assert main(["units", "exact", "ssh.service"]) == 0
    err = capsys.readouterr().err
    assert ("the figures of ssh.service are estimated after its first session" in err) == bool(file)
    assert (f"{machine}/pam.d/{file}" in err) == bool(file)
    assert ("resctrlctl units inexact ssh.service" in err) == bool(file)


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ("RootDirectory=/srv/x", "RootDirectory=/srv/x hides"),
        ("RootDirectory=/srv/x\nRootDirectory=/", ""),
        ("RootImage=/x.raw", "RootImage=/x.raw hides"),
        ("AppArmorProfile=x", "AppArmorProfile=x would be applied"),
        ("SELinuxContext=x", "SELinuxContext=x would be applied"),
        ("SmackProcessLabel=x", "SmackProcessLabel=x would be applied"),
        ("PAMName=login", "PAMName=login starts a process"),
        ("Delegate=cpu memory", ""),
        ("Delegate=yes\nDelegateSubgroup=main", "DelegateSubgroup=main puts"),
        ("ExecSearchPath=/opt", "ExecSearchPath=/opt decides"),
        ("RestrictAddressFamilies=AF_INET AF_INET6", "does not allow AF_UNIX"),
        ("RestrictAddressFamilies=none", "does not allow AF_UNIX"),
        ("RestrictAddressFamilies=~AF_UNIX", "does not allow AF_UNIX"),
        ("RestrictAddressFamilies=~AF_INET", ""),
        ("RestrictAddressFamilies=AF_INET\nRestrictAddressFamilies=AF_UNIX", ""),
        ("RestrictAddressFamilies=AF_INET AF_UNIX\nRestrictAddressFamilies=~AF_UNIX", "does not allow AF_UNIX"),
        ("RestrictAddressFamilies=none\nRestrictAddressFamilies=", ""),
        ("InaccessiblePaths=/home -/run", "InaccessiblePaths=/run hides /run/resctrlmond/org.resctrlmon.Unit"),
        ("InaccessiblePaths=/home /runs /usr/lib", ""),
        ("InaccessiblePaths=/", "InaccessiblePaths=/ hides"),
        ("TemporaryFileSystem=/run:ro", "TemporaryFileSystem=/run hides"),
        ("TemporaryFileSystem=/var", ""),
        ("BindPaths=/srv/run:/run", "BindPaths= mounts over /run"),
        ("BindReadOnlyPaths=/run /srv:/opt", "BindReadOnlyPaths= mounts over /run"),
        ("BindPaths=/run/x /srv:/opt", ""),
        ("NoExecPaths=/", "NoExecPaths=/ keeps"),
        ("NoExecPaths=/\nExecPaths=/usr /tmp", ""),
        ("SystemCallFilter=@basic-io @file-system", "SystemCallFilter= forbids socket, connect"),
        ("SystemCallFilter=@system-service", ""),
        ("SystemCallFilter=@system-service\nSystemCallFilter=~@privileged @resources", ""),
        ("SystemCallFilter=~@network-io", "SystemCallFilter= forbids socket"),
        ("SystemCallFilter=~@mount connect:EPERM", "SystemCallFilter= forbids connect"),
        ("SystemCallFilter=~@mount @clock", ""),
        (
            "RestrictNamespaces=yes\nDynamicUser=yes\nProtectSystem=strict\nPrivateTmp=yes\nMemoryDenyWriteExecute=yes",
            "",
        ),
        ("ExecStart=", "it has no ExecStart="),
        ("ExecStart=|/bin/b", "ExecStart=|/bin/b in"),
    ],
)
def test_service_that_cannot_be_exact_is_refused_with_the_setting(
    machine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, settings: str, error: str
) -> None:
    # The rules are about the installed program, not about that of the test.
    program = unit_exec.PROGRAM
    monkeypatch.setattr(unit_exec, "PROGRAM", PROGRAM)
    monkeypatch.setattr(os, "access", lambda path, mode: path == PROGRAM or os.path.exists(path))
    assert program != PROGRAM
    unit(machine, "a.service", f"{SERVICE}{settings}\n")
    assert main(["units", "exact", "a.service"]) == (1 if error else 0)
    assert error in capsys.readouterr().err
    assert (machine / "etc/a.service.d").exists() == (not error)


@pytest.mark.parametrize(
    ("name", "status", "message"),
    [
        ("a", 2, "such as nginx.service. Did you mean a.service?"),
        ("a.socket", 2, "such as nginx.service\n"),
        ("*.service", 2, "such as nginx.service\n"),
        ("a.service/../b.service", 2, "such as nginx.service\n"),
        ("resctrlmond.service", 1, "it would wait for itself"),
        ("dbus.service", 1, "dbus.service"),
        ("user-1:a.service", 1, "cannot read the files"),
    ],
)
def test_other_units_are_refused(
    machine: Path, name: str, status: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for known in ("a.service", "resctrlmond.service", "dbus.service"):
        unit(machine, known, SERVICE)
    assert main(["units", "exact", "a.service", name]) == status
    assert message in capsys.readouterr().err
    assert os.listdir(machine / "etc") == []


def test_alias_generated_and_masked_units_are_refused(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unit(machine, "real.service", SERVICE)
    (machine / "usr/alias.service").symlink_to("real.service")
    (machine / "usr/masked.service").symlink_to("/dev/null")
    assert main(["units", "exact", "alias.service"]) == 1
    assert "it is an alias of real.service" in capsys.readouterr().err
    assert main(["units", "exact", "masked.service"]) == 1
    assert main(["units", "exact", "none.service"]) == 1
    assert "No files found for none.service" in capsys.readouterr().err
    for folder in ("generator", "generator.late", "transient"):
        with pytest.raises(Exception, match="is generated, or transient"):
            exact_units._check_files("a.service", [f"/run/systemd/{folder}/a.service"])


def test_drop_in_that_is_applied_later_is_named(machine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    unit(machine, "a.service", SERVICE)
    path = unit(machine, "a.service", "[Service]\nExecReload=/bin/b\n", "zzz.conf")
    assert main(["units", "exact", "a.service"]) == 1
    assert f"{path} sets ExecReload=, and is applied after {exact_units.FILE}" in capsys.readouterr().err


def test_missing_program_is_refused(
    machine: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    unit(machine, "a.service", SERVICE)
    monkeypatch.setattr(unit_exec, "PROGRAM", str(machine / "none"))
    assert main(["units", "exact", "a.service"]) == 1
    assert "is not installed" in capsys.readouterr().err


def test_selinux_is_refused(tmp_path: Path) -> None:
    (tmp_path / "enforce").write_text("0")
    found = [UnitLine("ExecStart", "/bin/a", "/x")]
    assert sandbox.problem(found, selinux=str(tmp_path / "none")) == ""
    assert "SELinux" in sandbox.problem(found, selinux=str(tmp_path / "enforce"))


def test_system_calls_of_the_program_are_checked() -> None:
    """As many as the compiled program makes, according to strace, which systemd does not always allow."""
    default = set(sandbox._members("@default", sandbox._sets()))
    machine = platform.machine()
    checked = {*sandbox._CALLS, *sandbox._CALLS_OF_MACHINE.get(machine, sandbox._NEWER_CALLS)}
    program = Path(__file__).parents[3] / "build" / "resctrlmon-unit-exec"
    subprocess.run(["make", "-s", "-C", str(program.parents[1]), "build/resctrlmon-unit-exec"], check=True)
    done = subprocess.run(
        ["strace", "-qq", "-f", "-e", "signal=none", str(program), str(program)],
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    made = {line.partition("(")[0] for line in done.stderr.splitlines() if "(" in line}
    made = {call for call in made if call.isidentifier()} - {"write"}  # only after a failure
    assert {"socket", "connect", "close"} <= made
    assert made - default <= checked


def test_systemd_accepts_the_drop_in(machine: Path) -> None:
    text = FULL.replace("/bin/pre", "/bin/true").replace("/bin/main", "/bin/true").replace("/bin/b\n", "/bin/true\n")
    unit(machine, "web.service", text)
    assert main(["units", "exact", "web.service"]) == 0
    folder = machine / "verified"
    shutil.copytree(machine / "etc", folder)
    shutil.copy(machine / "usr/web.service", folder)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", "web.service"],
        env=os.environ | {"SYSTEMD_UNIT_PATH": f"{folder}:/usr/lib/systemd/system", "LC_ALL": "C"},
        check=False,
        capture_output=True,
        text=True,
        timeout=60,
    )
    # The test file itself has unknown keys in other sections.
    assert [line for line in done.stderr.splitlines() if "Unknown key" not in line] == []
