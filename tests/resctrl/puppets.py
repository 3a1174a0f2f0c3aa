# SPDX-License-Identifier: Apache-2.0
"""Real processes that start threads, fork and end on the command of a test."""

from __future__ import annotations

import os
import time

from tests.commanded import Commanded

# Reads commands from standard input, one a line, and answers each with one line.
PROGRAM = """
import os, sys, threading, time

def park(started):
    started.set()
    threading.Event().wait()

def thread():
    started = threading.Event()
    made = threading.Thread(target=park, args=(started,), daemon=True)
    made.start()
    started.wait()
    return made.native_id

def fork():
    child = os.fork()
    if child == 0:
        time.sleep(600)
        os._exit(0)
    return child

def chain():
    # Each thread starts the next thread and ends, so a listed thread has ended before it is moved.
    time.sleep(0.001)
    threading.Thread(target=chain, daemon=True).start()

def breed():
    while True:
        for _ in range(5):
            child = os.fork()
            if child == 0:
                time.sleep(0.2)
                os._exit(0)
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            pass
        time.sleep(0.005)

def give(number, make):
    # The kernel hands out the number after the last one; another process may be quicker, and is waited for then.
    for _ in range(200):
        while os.path.exists(f"/proc/{number}"):
            time.sleep(0.001)
        with open("/proc/sys/kernel/ns_last_pid", "w") as last:
            last.write(str(number - 1))
        made = make()
        if made == number:
            return made
        if make is fork:
            os.kill(made, 9)
            os.waitpid(made, 0)
    return 0

for line in sys.stdin:
    verb, *words = line.split()
    if verb == "thread":
        answer = thread()
    elif verb == "fork":
        answer = fork()
    elif verb == "zombie":
        answer = os.fork()
        if answer == 0:
            os._exit(0)
        os.waitid(os.P_PID, answer, os.WEXITED | os.WNOWAIT)
    elif verb == "burn":
        until = time.process_time() + 0.05
        while time.process_time() < until:
            pass
        answer = "done"
    elif verb == "chains":
        for _ in range(4):
            threading.Thread(target=chain, daemon=True).start()
        answer = "started"
    elif verb == "breed":
        threading.Thread(target=breed, daemon=True).start()
        answer = "started"
    elif verb == "fork-as":
        answer = give(int(words[0]), fork)
    elif verb == "thread-as":
        answer = give(int(words[0]), thread)
    elif verb == "short-thread":
        go, gone = threading.Event(), threading.Thread(target=lambda: go.wait(), daemon=True)
        gone.start()
        answer = gone.native_id
    elif verb == "end-thread":
        go.set()
        gone.join()
        while os.path.exists(f"/proc/self/task/{gone.native_id}"):
            time.sleep(0.001)
        answer = "ended"
    print(answer, flush=True)
"""


class Puppet(Commanded):
    """A process that starts threads and children, and ends them."""

    def __init__(self) -> None:
        super().__init__(PROGRAM)

    def make(self, command: str) -> int:
        """The number of what a command made."""
        return int(self.do(command))

    def threads(self) -> set[int]:
        """All its threads at this moment."""
        return {int(name) for name in os.listdir(f"/proc/{self.pid}/task")}


def pause_for_start_time() -> None:
    """Wait until a new process has another start time than one of now: two clock ticks."""
    time.sleep(0.025)
