# SPDX-License-Identifier: Apache-2.0
"""Set what a container's profile says about memory, in the response to CreateContainer: before the container runs.

A runtime that cannot write a file does not start the container. So a file is only set if it can be: on cgroup v2,
with the memory controller, if the kernel has the file, and if neither the runtime's client nor another plugin has set
it. NRI refuses a container for which two plugins set the same file.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import Iterable, Sequence

from resctrlmond.configuration import profile_files
from resctrlmond.configuration.config_file import ConfigError
from resctrlmond.nri import place
from resctrlmond.nri.messages import Container, Pod
from resctrlmond.nri.pods import facts_of
from resctrlmond.resctrl.errors import printable
from resctrlmond.resctrl.mounts import mounts
from resctrlmond.service import journal
from resctrlmond.workloads.profiles.memory_settings import files_of, text_of
from resctrlmond.workloads.profiles.profile import Choice, Profiles, select

log = logging.getLogger(__name__)

OWNER = "nri"


class Memory:
    """The profiles of these directories, as far as they concern memory."""

    def __init__(self, directories: Sequence[str] = profile_files.DIRECTORIES) -> None:
        self._directories = directories
        self._profiles = Profiles()
        # The mount point of cgroup v2; "" if there is none.
        self._top = ""

    @property
    def profiles(self) -> Profiles:
        """The profiles that were read last."""
        return self._profiles

    @property
    def is_wanted(self) -> bool:
        """Whether any profile sets anything."""
        return any(profile.memory for profile in self._profiles.by_name.values())

    def load(self, otherwise: str) -> bool:
        """Read the profiles, and return whether that was possible. ``otherwise`` ends the message if it was not."""
        # Once, because the cost of a look grows with the mounts of the host.
        self._top = next((m.point for m in mounts() if m.fstype == "cgroup2" and m.root == "/"), "")
        try:
            self._profiles = profile_files.load(self._directories)
        except ConfigError as error:
            log.error("the profiles are wrong, and %s: %s", otherwise, error, extra=journal.fields(error))
            return False
        return True

    def choose(self, pod: Pod, container: Container) -> Choice:
        """Return the profile of a container that is being created."""
        inner = place.inner_path(container.cgroups_path)
        return select(self._profiles, facts_of(pod, container), owner=OWNER, cgroup=f"/{inner}" if inner else "")

    async def files(self, pod: Pod, container: Container) -> dict[str, str]:
        """Return the text for each file of the control group of a container that is being created.

        The files are looked at in a thread, because that may block. Cancel it to end the wait.
        """
        return await asyncio.to_thread(self._files, pod, container) if self.is_wanted else {}

    def _files(self, pod: Pod, container: Container) -> dict[str, str]:
        inner = place.inner_path(container.cgroups_path)
        choice = self.choose(pod, container)
        if choice.profile is None or not choice.profile.memory:
            return {}
        wanted, wrong = files_of(choice.profile.memory, pod.annotations, container.name)
        found = {}
        for name, amount in wanted.items():
            if why_not := _why_not(name, self._top, inner, container.set_files):
                wrong.append(f"{name} is not set to {text_of(amount)}: {why_not}")
            else:
                found[name] = text_of(amount)
        self._complain(pod, container, choice.name, wrong)
        if found:
            texts = ", ".join(f"{name} to {text}" for name, text in found.items())
            log.info("container %s: set %s, as its profile %s says", container.id, texts, choice.name)
        return found

    def _complain(self, pod: Pod, container: Container, profile: str, wrong: Iterable[str]) -> None:
        for text in wrong:
            log.warning(
                "container %s of pod %s with the profile %s: %s",
                printable(container.name),
                printable(f"{pod.namespace}/{pod.name}"),
                profile,
                printable(text),
                extra=journal.fields(key=pod.uid or pod.id),
            )


def _why_not(name: str, top: str, inner: str, set_files: frozenset[str]) -> str:
    """Return why the file cannot be set in the control group ``inner`` below the mount point; "" if it can."""
    if name in set_files:
        return "the runtime's client or another plugin sets it"
    if not top:
        return "the host has no control groups of version 2"
    directory = os.path.join(top, os.path.dirname(inner)) if inner else ""
    while len(directory) > len(top) and not os.path.isdir(directory):
        directory = os.path.dirname(directory)
    if not directory:
        return "the runtime does not report the control group of the container"
    if "memory" not in _words(os.path.join(directory, "cgroup.controllers")):
        return f"{printable(directory)} has no memory controller"
    # The root has no such file, and those below it have it if the kernel has it.
    places = [directory] if directory != top else _children(top)
    if not any(os.path.exists(os.path.join(place, name)) for place in places):
        return "the kernel has no such file"
    return ""


def _words(path: str) -> list[str]:
    with contextlib.suppress(OSError), open(path, encoding="ascii", errors="replace") as file:
        return file.read().split()
    return []


def _children(top: str) -> list[str]:
    with contextlib.suppress(OSError), os.scandir(top) as entries:
        return [entry.path for entry in entries if entry.is_dir(follow_symlinks=False)]
    return []
