# SPDX-License-Identifier: Apache-2.0
"""Globs that select systemd units: the value of the configuration key ``units``."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence

# The types of units with control groups of processes that belong together. A glob may also end with "*" or "]".
TYPES = (".service", ".scope", ".slice")
_OTHER_TYPES = frozenset(("automount", "device", "mount", "path", "socket", "swap", "target", "timer"))
# Those of a type that starts the service of the same name, unless Unit= or Service= names another one.
_STARTERS = frozenset(("path", "socket", "timer"))
# A glob for units of users has the prefix "user-UID:". The characters of a name are those of systemd.unit(5).
_NAME = re.compile(r"[A-Za-z0-9:_.\\@-]{1,248}\.(service|scope|slice)", re.ASCII)
_GLOB = re.compile(r"[A-Za-z0-9:_.\\@*?\[\]!-]{1,255}")
# Process 1 starts each service: if it were in a group, all of them would start there. The root slice is the host.
NEVER = frozenset({"init.scope", "-.slice"})

# The units of companions (resctrlmond-profiles(5)), each of which would take an RMID beside its workload.
COMPANION_PREFIX = "resctrlmon-companion-"

# As in fnmatch(3): a bracket at the beginning of a set does not end it.
_SET = re.compile(r"\[!?+\]?+[^\]]*\]")
_USER = re.compile(r"\Auser-(?:[0-9*?]|\[!?[0-9-]+\])+:")


def problem_of(glob: str) -> str:
    """Return why the text is not a valid glob, with the nearest valid one if there is one; "" if it is valid."""
    text = glob.removeprefix("!")
    if not _GLOB.fullmatch(text):
        return "not the name or glob of a unit, such as nginx.service, *.service or !getty@*.service"
    if has_open_bracket(text):
        return "a glob with a bracket that has no end, and would match no unit. Write [ab] for a or b"
    if text.startswith("user-") and ":" in text and not is_of_user(text):
        return "not a glob of units of a user. Write the user's number after user-: user-1000:*.service"
    if text in NEVER:
        return "never watched: it has the tasks of the whole host, or process 1, which starts all services"
    if not text.endswith((*TYPES, "*", "]")):
        return f"not a glob of services, scopes or slices. {remedy_for_type(glob)}"
    return ""


def remedy_for_type(glob: str) -> str:
    """Return what to write in the place of a glob that does not end with one of TYPES."""
    near = service_near(glob)
    return f"Did you mean {near}?" if near else "Units of other types are not watched"


def service_near(glob: str) -> str:
    """Return the glob with the type that was probably meant; "" if it names a type without a service."""
    import difflib  # noqa: PLC0415 - only a wrong glob needs it

    stem, dot, kind = glob.rpartition(".")
    if kind.removeprefix("!") in _OTHER_TYPES:
        return f"{stem}.service" if stem and kind in _STARTERS else ""
    # The part after a dot may also belong to the name, as in org.example.Server.
    types = [name.removeprefix(".") for name in TYPES]
    close = difflib.get_close_matches(kind[:64], types, n=1, cutoff=0.8) if dot and stem else []
    return f"{stem}.{close[0]}" if close else f"{glob}.service"


def has_open_bracket(glob: str) -> bool:
    """Return whether the glob has a bracket without an end, which no name of a unit has."""
    return "[" in _SET.sub("", glob)


def is_valid_name(name: str) -> bool:
    """Return whether systemd would accept the name for a service, scope or slice."""
    return _NAME.fullmatch(name) is not None


def is_of_user(name: str) -> bool:
    """Return whether a name, or a glob, is that of units of users."""
    return _USER.match(name) is not None


class UnitGlobs:
    """Selects units by globs, the most important first. A unit that a glob with "!" matches is never selected.

    A name is that of a system unit, or "user-UID:" and the name of a unit of that user. Only a glob with such a
    prefix selects units of users, and only a glob that begins with COMPANION_PREFIX those of companions.
    """

    def __init__(self, globs: Sequence[str]) -> None:
        self.wanted = tuple(dict.fromkeys(glob for glob in globs if not glob.startswith("!")))
        self._excluded = tuple(glob[1:] for glob in globs if glob.startswith("!"))

    @property
    def of_system(self) -> list[str]:
        """The globs for system units."""
        return [glob for glob in self.wanted if not is_of_user(glob)]

    @property
    def has_users(self) -> bool:
        """Whether a glob selects units of users."""
        return any(map(is_of_user, self.wanted))

    def rank(self, name: str) -> int | None:
        """Return the index of the first glob that selects the unit; None if none does."""
        if _USER.sub("", name) in NEVER or not name.endswith(TYPES):
            return None
        if self.excluded_by(name):
            return None
        return next((index for index, glob in enumerate(self.wanted) if _matches(name, glob)), None)

    def excluded_by(self, name: str) -> str:
        """Return the first glob with "!" that matches the unit, with the "!"; "" if none does."""
        return next((f"!{glob}" for glob in self._excluded if _matches(name, glob)), "")


def _matches(name: str, glob: str) -> bool:
    if name.startswith(COMPANION_PREFIX) and not glob.startswith(COMPANION_PREFIX):
        return False
    return is_of_user(name) == is_of_user(glob) and fnmatch.fnmatchcase(name, glob)
