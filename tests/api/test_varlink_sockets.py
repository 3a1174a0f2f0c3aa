# SPDX-License-Identifier: Apache-2.0
"""Sockets are created safely, or passed by systemd."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
import stat
import subprocess
import sys
import textwrap
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from resctrlmond.api.sockets import AddressInUse, let_connect, listen, passed_sockets
from tests.api.private_bus import NOBODY
from tests.api.varlink_server import public_directory

CONNECT = f"""
import os, socket, sys
os.setgroups([int(gid) for gid in sys.argv[2:]]); os.setgid({NOBODY}); os.setuid({NOBODY})
socket.socket(socket.AF_UNIX).connect(sys.argv[1])
"""


def test_mode_group_and_type(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    gid = 12345 if os.getuid() == 0 else os.getgid()
    with listen(str(path), 0o660, gid) as listener:
        status = path.lstat()
        assert stat.S_ISSOCK(status.st_mode)
        assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, gid)
        assert not listener.get_inheritable()
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(path))


def test_socket_has_no_wider_mode_before_it_has_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    chown = os.chown

    def recording_chown(path: str, *arguments: int, **options: bool) -> None:
        seen.append(stat.S_IMODE(os.lstat(path).st_mode))
        chown(path, *arguments, **options)

    monkeypatch.setattr(os, "chown", recording_chown)
    before = os.umask(0)
    try:
        listen(str(tmp_path / "socket"), 0o640).close()
    finally:
        os.umask(before)
    assert seen == [0o600]
    assert stat.S_IMODE((tmp_path / "socket").lstat().st_mode) == 0o640


def can_connect(path: str, *gids: int) -> bool:
    """Whether a process of another user with these supplementary groups can connect."""
    command = [sys.executable, "-c", CONNECT, path, *map(str, gids)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr or "PermissionError: [Errno 13]" in done.stderr
    return done.returncode == 0


def test_one_more_group_can_connect() -> None:
    with public_directory() as directory:
        path = f"{directory}/socket"
        with listen(path, 0o660, 4242):
            os.chmod(path, 0o600)
            let_connect(path, 4243)
            assert not can_connect(path)
            assert [can_connect(path, gid) for gid in (4242, 4243, 4244)] == [True, True, False]
            let_connect(path, 4244)  # replaces the list
            assert [can_connect(path, gid) for gid in (4242, 4243, 4244)] == [True, False, True]
            status = os.lstat(path)
            assert (stat.S_IMODE(status.st_mode), status.st_gid) == (0o660, 4242)


def test_stale_socket_is_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    listen(path).close()
    stale = os.lstat(path)
    with listen(path) as listener, socket.socket(socket.AF_UNIX) as client:
        client.connect(path)
        listener.accept()[0].close()
    assert os.lstat(path).st_ctime_ns > stale.st_ctime_ns


def test_socket_in_use_is_not_replaced(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    with socket.socket(socket.AF_UNIX) as first:
        first.bind(path)
        first.listen(0)
        with socket.socket(socket.AF_UNIX) as client:
            with pytest.raises(AddressInUse, match="in use; stop the server"):
                listen(path)
            # The check itself has filled the backlog of one connection.
            client.setblocking(False)
            assert client.connect_ex(path) == errno.EAGAIN
            with pytest.raises(AddressInUse):
                listen(path)
            first.accept()[0].close()
    datagrams = str(tmp_path / "datagrams")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as other:
        other.bind(datagrams)
        with pytest.raises(AddressInUse):
            listen(datagrams)


def test_file_that_is_not_a_socket_is_not_removed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("precious")
    with pytest.raises(AddressInUse, match="not a socket"):
        listen(str(path))
    assert path.read_text() == "precious"
    listen(str(tmp_path / "target")).close()
    (tmp_path / "link").symlink_to("target")
    with pytest.raises(AddressInUse, match="not a socket"):
        listen(str(tmp_path / "link"))


def test_errors_name_the_path(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        listen(str(tmp_path / "missing" / "socket"))
    with pytest.raises(OSError, match="cannot listen: AF_UNIX path too long") as caught:
        listen(str(tmp_path / ("x" * 120)))
    assert caught.value.filename == str(tmp_path / ("x" * 120))


def test_only_one_of_concurrent_starts_gets_the_socket(tmp_path: Path) -> None:
    path = str(tmp_path / "socket")
    listen(path).close()
    created: list[socket.socket] = []
    refused: list[AddressInUse] = []
    gate = threading.Barrier(8)

    def start() -> None:
        gate.wait()
        try:
            created.append(listen(path))
        except AddressInUse as error:
            refused.append(error)

    threads = [threading.Thread(target=start) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(created), len(refused)) == (1, 7)
    created[0].close()


def test_lock_of_the_directory_by_another_user_does_not_block_the_start(tmp_path: Path) -> None:
    """Every user with read access to a directory can lock it, so the daemon locks a file of mode 0600."""
    descriptor = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        listen(str(tmp_path / "socket")).close()
    finally:
        os.close(descriptor)
    (lock,) = tmp_path.glob("*.lock")
    assert stat.S_IMODE(lock.lstat().st_mode) == 0o600


PASSED = """
    import json, os, sys

    # Through high numbers, because the number 3 or 4 may be that of the other socket.
    for target, source in enumerate([os.dup2(int(fd), 50 + int(fd)) for fd in sys.argv[2:]], start=3):
        os.dup2(source, target)

    from resctrlmond.api.sockets import passed_sockets

    os.environ["LISTEN_PID"] = str(os.getpid() + int(sys.argv[1]))
    try:
        sockets = passed_sockets()
        found = {name: [sock.fileno(), sock.getsockname(), sock.get_inheritable()] for name, sock in sockets.items()}
    except (ValueError, OSError) as error:
        sockets, found = {}, str(error)
    print(json.dumps([found, [name for name in os.environ if name.startswith("LISTEN_")]]))
    for sock in sockets.values():
        sock.close()
"""


def passed(path: Path, environment: dict[str, str], *, other_pid: bool = False) -> object:
    """Return what passed_sockets() returns in a process with the sockets ``a`` and ``b`` as descriptors 3 and 4."""
    with listen(str(path / "a")) as a, listen(str(path / "b")) as b:
        return passed_to_process([a, b], environment, other_pid=other_pid)


def passed_to_process(
    sockets: Sequence[socket.socket], environment: dict[str, str], *, other_pid: bool = False
) -> object:
    """Return what passed_sockets() returns in a process with these sockets as descriptors from 3 on."""
    descriptors = [sock.fileno() for sock in sockets]
    arguments = [str(int(other_pid)), *map(str, descriptors)]
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", textwrap.dedent(PASSED), *arguments],
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2]), **environment},
        pass_fds=descriptors,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found, variables = json.loads(done.stdout)
    assert variables == []
    return found


def test_passed_sockets_have_their_names(tmp_path: Path) -> None:
    found = passed(tmp_path, {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "varlink:other", "LISTEN_PIDFDID": "7"})
    assert found == {
        "varlink": [3, str(tmp_path / "a"), False],
        "other": [4, str(tmp_path / "b"), False],
    }


def test_passed_socket_without_a_name_is_unknown(tmp_path: Path) -> None:
    assert passed(tmp_path, {"LISTEN_FDS": "1"}) == {"unknown": [3, str(tmp_path / "a"), False]}


def test_sockets_passed_to_another_process_are_ignored(tmp_path: Path) -> None:
    assert passed(tmp_path, {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:b"}, other_pid=True) == {}
    assert passed(tmp_path, {}) == {}


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"LISTEN_FDS": "two"}, "not a number of descriptors"),
        ({"LISTEN_FDS": "-1"}, "not a number of descriptors"),
        ({"LISTEN_FDS": "2", "LISTEN_FDNAMES": "a"}, "does not name"),
        ({"LISTEN_FDS": "2", "LISTEN_FDNAMES": "a:a"}, "two sockets with the same name"),
        ({"LISTEN_FDS": "2"}, "two sockets with the same name"),
    ],
)
def test_invalid_variables_are_refused(tmp_path: Path, environment: dict[str, str], text: str) -> None:
    found = passed(tmp_path, environment)
    assert isinstance(found, str)
    assert text in found


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("datagrams", "the descriptor 4 (datagrams) that systemd passed does not listen; set ListenStream="),
        ("closed", "the descriptor 4 (closed) that systemd passed cannot be used: Bad file descriptor"),
    ],
)
def test_descriptors_that_do_not_listen_are_refused(tmp_path: Path, name: str, text: str) -> None:
    """As with ListenDatagram= or Accept=yes: a server would call accept(2) without end."""
    with listen(str(tmp_path / "a")) as a, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as datagrams:
        given = [a, datagrams] if name == "datagrams" else [a]
        found = passed_to_process(given, {"LISTEN_FDS": "2", "LISTEN_FDNAMES": f"varlink:{name}"})
    assert isinstance(found, str)
    assert text in found


def test_no_sockets_without_variables() -> None:
    assert passed_sockets() == {}
