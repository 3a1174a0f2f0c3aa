# SPDX-License-Identifier: Apache-2.0
"""The grammar of tasks: valid lists, the messages of refusals, and the tasks that are moved before an error."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .actors import Actor
from .target import Resctrl

NO_SUCH = 4_194_303  # above every pid_max but the largest, of which it is the last number


@pytest.fixture
def tasks(fs: Resctrl) -> str:
    return fs.create("mon_groups/a") + "/tasks"


@pytest.mark.parametrize(
    ("before", "after"),
    [("", ""), ("", "\n"), (" ", " "), ("\t", " \n"), ("", ","), ("+", ""), ("00", ""), ("", "\0rest"), ("", ",\n")],
)
def test_valid_text_around_a_number(fs: Resctrl, actor: Actor, tasks: str, before: str, after: str) -> None:
    """White space, a sign, one newline, a trailing comma and any text after a NUL are accepted."""
    # A leading 0 makes it octal.
    number = f"{actor.pid:o}" if before == "00" else str(actor.pid)
    assert fs.try_write(tasks, before + number + after) == ("OK", "ok\n")
    assert fs.members("mon_groups/a") == {actor.pid}


@pytest.mark.parametrize("form", ["0x{:x}", "0X{:X}", "0{:o}", "{:d}"])
def test_numbers_may_be_hexadecimal_octal_or_decimal(fs: Resctrl, actor: Actor, tasks: str, form: str) -> None:
    """Numbers may be hexadecimal, octal or decimal."""
    assert fs.try_write(tasks, form.format(actor.pid)) == ("OK", "ok\n")
    assert fs.members("mon_groups/a") == {actor.pid}


@pytest.mark.parametrize("command", ["\n", "\0", "\n5", "\0abc"])
def test_a_command_may_be_empty(fs: Resctrl, tasks: str, command: str) -> None:
    """A command that begins with a newline or a NUL succeeds, does nothing and clears last_cmd_status."""
    fs.set_status()
    assert fs.try_write(tasks, command) == ("OK", "ok\n")
    assert fs.members("mon_groups/a") == set()


@pytest.mark.kernel_only("a write of no bytes does not get past the kernel's own side of FUSE")
def test_an_empty_write_is_a_command(fs: Resctrl, tasks: str) -> None:
    """A write of no bytes succeeds and clears last_cmd_status."""
    fs.set_status()
    assert fs.try_write(tasks, "") == ("OK", "ok\n")


@pytest.mark.parametrize(
    ("command", "token"),
    [
        ("abc", "abc"),
        ("abc\n", "abc"),
        ("12abc", "12abc"),
        ("1 2", "1 2"),
        ("0x", "0x"),
        ("08", "08"),
        ("1.5", "1.5"),
        (",", ""),
        (" ", ""),
        ("--5", "--5"),
        ("- 5", "- 5"),
        ("2147483648", "2147483648"),
        ("99999999999999999999", "99999999999999999999"),
        ("-2147483649", "-2147483649"),
        ("1\n2\n", "1\n2"),
        ("\u0661", "\u0661"),
        ("\udcff", "\udcff"),
    ],
)
def test_an_invalid_number_is_einval(fs: Resctrl, tasks: str, command: str, token: str) -> None:
    """A value that is not a number of 32 bits is EINVAL, and last_cmd_status has the token."""
    assert fs.try_write(tasks, command) == ("EINVAL", f"Task list parsing error pid {token}\n")


@pytest.mark.parametrize("number", [-1, -5, -(2**31)])
def test_negative_numbers(fs: Resctrl, tasks: str, number: int) -> None:
    """A negative number is EINVAL "Invalid pid"."""
    assert fs.try_write(tasks, number) == ("EINVAL", f"Invalid pid {number}\n")


def test_minus_0_is_0(fs: Resctrl, actor: Actor, tasks: str) -> None:
    """-0 is the writing thread, as 0 is."""
    assert actor.call("write", path=fs.path(tasks), text="-0") == "OK"
    assert fs.members("mon_groups/a") == {actor.pid}


def test_an_unused_number_is_esrch(fs: Resctrl, tasks: str) -> None:
    """An unused number is ESRCH, with two lines in last_cmd_status."""
    words = f"No task {NO_SUCH}\nError while processing task {NO_SUCH}\n"
    assert fs.try_write(tasks, NO_SUCH) == ("ESRCH", words)


def test_the_largest_number(fs: Resctrl, tasks: str) -> None:
    """2147483647 is a valid number without a task."""
    assert fs.try_write(tasks, 2**31 - 1)[0] == "ESRCH"


def test_messages_have_the_number_as_decimal(fs: Resctrl, tasks: str) -> None:
    """A hexadecimal number is decimal in last_cmd_status."""
    words = f"No task {NO_SUCH}\nError while processing task {NO_SUCH}\n"
    assert fs.try_write(tasks, f"{NO_SUCH:#x}") == ("ESRCH", words)


def test_a_list_of_tasks(fs: Resctrl, actors: Callable[[], Actor], tasks: str) -> None:
    """Commas separate tasks, with optional white space."""
    one, two, three = actors(), actors(), actors()
    assert fs.try_write(tasks, f"{one.pid}, {two.pid} ,\t{three.pid}\n") == ("OK", "ok\n")
    assert fs.members("mon_groups/a") == {one.pid, two.pid, three.pid}


@pytest.mark.parametrize(
    ("bad", "result", "words"),
    [
        ("x", "EINVAL", "Task list parsing error pid x\n"),
        ("", "EINVAL", "Task list parsing error pid \n"),
        ("-3", "EINVAL", "Invalid pid -3\n"),
        (str(NO_SUCH), "ESRCH", f"No task {NO_SUCH}\nError while processing task {NO_SUCH}\n"),
    ],
)
def test_a_list_stops_at_the_first_error(
    fs: Resctrl, actors: Callable[[], Actor], bad: str, result: str, words: str
) -> None:
    """Tasks before the invalid token have moved, those after it have not, and the call fails as a whole."""
    before, after = actors(), actors()
    tasks = fs.create("mon_groups/a") + "/tasks"
    assert fs.try_write(tasks, f"{before.pid},{bad},{after.pid}") == (result, words)
    assert fs.members("mon_groups/a") == {before.pid}


def test_newlines_do_not_separate(fs: Resctrl, actors: Callable[[], Actor], tasks: str) -> None:
    """Two numbers on two lines are one invalid token, and no task moves."""
    one, two = actors(), actors()
    words = f"Task list parsing error pid {one.pid}\n{two.pid}\n"
    assert fs.try_write(tasks, f"{one.pid}\n{two.pid}\n") == ("EINVAL", words)
    assert fs.members("mon_groups/a") == set()


def test_a_comma_and_a_newline_end_the_list(fs: Resctrl, actors: Callable[[], Actor], tasks: str) -> None:
    """A newline at the begin of a token ends the list: the rest is ignored."""
    one, two = actors(), actors()
    assert fs.try_write(tasks, f"{one.pid},\n{two.pid},x") == ("OK", "ok\n")
    assert fs.members("mon_groups/a") == {one.pid}


def test_moving_a_member_again_is_accepted(fs: Resctrl, actor: Actor, tasks: str) -> None:
    """A task that is already in the group is accepted, also twice in one list."""
    fs.write(tasks, actor.pid)
    assert fs.try_write(tasks, f"{actor.pid},{actor.pid}") == ("OK", "ok\n")
    assert fs.members("mon_groups/a") == {actor.pid}


def test_the_status_holds_511_bytes(fs: Resctrl, tasks: str) -> None:
    """A message of more than 511 bytes with its newline is cut; 7.3 marks it, 6.12 does not."""
    words = "Task list parsing error pid " + "x" * 3000
    assert fs.try_write(tasks, "x" * 482) == ("EINVAL", words[:510] + "\n")
    cut = words[:511] + ("[truncated]\n" if fs.is_6_16 else "")
    assert fs.try_write(tasks, "x" * 483) == ("EINVAL", cut)
    assert fs.try_write(tasks, "x" * 3000) == ("EINVAL", cut)
    assert fs.try_write(tasks, "\n") == ("OK", "ok\n")


def test_each_write_begins_a_new_status(fs: Resctrl, tasks: str) -> None:
    """A write to tasks clears the message of the previous write."""
    fs.try_write(tasks, "first")
    assert fs.try_write(tasks, "second") == ("EINVAL", "Task list parsing error pid second\n")


@pytest.mark.allocation
def test_a_task_of_another_control_group(fs: Resctrl, actor: Actor) -> None:
    """A monitoring group accepts only tasks of its control group: EINVAL, with two lines."""
    fs.create("class")
    fs.create("class/mon_groups/a")
    words = f"Can't move task to different control group\nError while processing task {actor.pid}\n"
    assert fs.try_write("class/mon_groups/a/tasks", actor.pid) == ("EINVAL", words)
    assert fs.groups_of(actor.pid) == ("/", "")


def test_zombies_can_be_moved(fs: Resctrl, actor: Actor, tasks: str) -> None:
    """A zombie is a task until it is reaped; then it is ESRCH."""
    child = actor.fork()
    child.exit()
    assert fs.try_write(tasks, child.pid) == ("OK", "ok\n")
    assert fs.members("mon_groups/a") == {child.pid}
    actor.call("reap", pid=child.pid)
    assert fs.members("mon_groups/a") == set()
    assert fs.try_write(tasks, child.pid)[0] == "ESRCH"


def test_pid_0_is_the_writing_process(fs: Resctrl, actor: Actor, tasks: str) -> None:
    """0 is the writing thread."""
    assert actor.call("write", path=fs.path(tasks), text="0") == "OK"
    assert fs.members("mon_groups/a") == {actor.pid}


def test_pid_0_is_the_writing_thread(fs: Resctrl, actor: Actor, tasks: str) -> None:
    """0 is the writing thread, not its process."""
    tid = actor.thread()
    assert actor.call("write", thread=tid, path=fs.path(tasks), text="0\n") == "OK"
    assert fs.members("mon_groups/a") == {tid}


@pytest.mark.kernel_only("the simulator finds no thread of the kernel if /proc does not show any")
def test_kernel_threads_can_be_moved(fs: Resctrl, tasks: str) -> None:
    """A kernel thread can be moved as any other task."""
    assert fs.try_write(tasks, 2) == ("OK", "ok\n")
    assert fs.members("mon_groups/a") == {2}
