# SPDX-License-Identifier: Apache-2.0
"""Profiles: which containers and units are watched, and how; and the selection of a profile. No I/O."""

from __future__ import annotations

import enum
import fnmatch
import re
from collections.abc import Collection, Iterable, Iterator, Mapping

import msgspec

from resctrlmond.host.unit_globs import is_of_user
from resctrlmond.resctrl.errors import printable
from resctrlmond.workloads.model.owners import SYSTEMD
from resctrlmond.workloads.model.reports import Facts
from resctrlmond.workloads.model.validation import attribute_value
from resctrlmond.workloads.profiles.companion_settings import Companion
from resctrlmond.workloads.profiles.label_selector import Requirement
from resctrlmond.workloads.profiles.memory_settings import MemorySettings

# The annotations that name a profile, the most important first: each for one container ("<name>/<container>"), then
# for the pod. The second one is that of memtierd's NRI plugin.
ANNOTATIONS = ("profile.resctrlmon.org", "class.memtierd.nri.io")

# Kubernetes allows 63 characters.
_MAX_CONTAINER_NAME = 253
_UNIT = re.compile(r".\.(?:service|scope)\Z", re.DOTALL)
# The beginning of the paths of all units of users.
_OF_USERS = "/user.slice/"
_USER_SLICE = re.compile(r"user-([0-9]{1,10})\.slice")


class Watch(enum.StrEnum):
    """The group in which a container is counted."""

    POD = "pod"
    """The group of its pod or, outside of Kubernetes, its own."""
    CONTAINER = "container"
    """A group of its own."""
    NONE = "none"
    """No group."""


class Profile(msgspec.Struct, frozen=True):
    """How a container is watched. Keys that are not set are None; ``class_`` is "" for the root class.

    ``keeps_files``: the begin and end files of a run stay until ``snapshot_ttl`` after its end. ``events`` are the
    globs of the events in its files and figures (``event_globs``), () for all. ``exposes``: containers of the NRI
    plugin have the figures of their workload as a mount. ``origin`` is the file and the line,
    for messages; so is ``class_origin``, of the class.
    """

    name: str
    watch: Watch = Watch.POD
    class_: str | None = None
    snapshot_ttl_s: float | None = None
    linger_s: float | None = None
    priority: int | None = None
    origin: str = ""
    memory: MemorySettings = MemorySettings()
    keeps_files: bool = True
    events: tuple[str, ...] = ()
    companion: Companion | None = None
    exposes: bool = False
    class_origin: str = ""


class Rule(msgspec.Struct, frozen=True):
    """Assigns a profile, given by its name, to the containers that meet all conditions.

    ``globs`` has the patterns of each condition by its key (``RULE_GLOBS``): one of them must match the fact.
    ``users`` are user ids. Empty conditions are met. Units of systemd are selected only by a rule that has SYSTEMD
    among its ``owners``.
    """

    profile: str
    origin: str = ""
    owners: frozenset[str] = frozenset()
    globs: Mapping[str, tuple[str, ...]] = msgspec.field(default_factory=dict)
    labels: tuple[Requirement, ...] = ()
    users: frozenset[int] = frozenset()

    def matches(self, facts: Facts, *, owner: str, cgroup: str) -> bool:
        """Whether the container meets the conditions. A fact that is not known meets none."""
        if self.owners and owner not in self.owners:
            return False
        if self.users and user_of(cgroup) not in self.users:
            return False
        if self.labels and (
            facts.labels is None or not all(requirement.holds(facts.labels) for requirement in self.labels)
        ):
            return False
        known = {
            "namespace": facts.namespace,
            "image": facts.image,
            "container": facts.container,
            "unit": unit_of(cgroup),
            "cgroup": cgroup,
        }
        return _all_match(self.globs, known)

    def matches_unit(self, unit: str, *, cgroup: str, user: int | None) -> bool:
        """Whether the rule is for units of systemd, and the unit with that key meets the conditions."""
        if SYSTEMD not in self.owners or self.labels or (self.users and user not in self.users):
            return False
        globs = self._globs_of_users() if is_of_user(unit) and not self.users else self.globs
        return _all_match(globs, {"unit": unit, "cgroup": cgroup})

    @property
    def is_for_users(self) -> bool:
        """Whether the conditions can select units of users."""
        return bool(self.users) or all(self._globs_of_users().values())

    def _globs_of_users(self) -> Mapping[str, tuple[str, ...]]:
        """Return the conditions with those patterns only that are meant for units of users.

        A user chooses the names of these units and of their control groups, and must not choose a profile by that.
        """
        if "unit" in self.globs:
            return {**self.globs, "unit": tuple(filter(is_of_user, self.globs["unit"]))}
        if "cgroup" in self.globs:
            in_slice = tuple(pattern for pattern in self.globs["cgroup"] if pattern.startswith(_OF_USERS))
            return {**self.globs, "cgroup": in_slice}
        return self.globs

    def __str__(self) -> str:
        parts = {
            "owner": ", ".join(sorted(self.owners)),
            **{key: ", ".join(patterns) for key, patterns in self.globs.items()},
            "labels": ", ".join(map(str, self.labels)),
            "user": ", ".join(map(str, sorted(self.users))),
        }
        return "; ".join(f"{key}: {text}" for key, text in parts.items() if text)


RULE_GLOBS = ("namespace", "image", "container", "unit", "cgroup")
# The conditions on facts that units of systemd do not have.
OF_CONTAINERS = ("namespace", "image", "container", "labels")


class Profiles(msgspec.Struct, frozen=True):
    """All profiles by name, the rules in their order, and the default: the name of a profile, "" for none.

    ``unit_default`` is the default for units of systemd.
    """

    by_name: Mapping[str, Profile] = msgspec.field(default_factory=dict)
    rules: tuple[Rule, ...] = ()
    default: str = ""
    default_origin: str = ""
    unit_default: str = ""
    unit_default_origin: str = ""

    def find(self, name: str) -> Profile | None:
        """Return the profile of that name; None if there is none."""
        return self.by_name.get(name)


def missing_classes(profiles: Iterable[Profile], existing: Collection[str]) -> Iterator[str]:
    """Yield a message for each profile whose class is not one of those that exist, with the class most like it."""
    for profile in profiles:
        if profile.class_ and profile.class_ not in existing:
            import difflib  # noqa: PLC0415 - only a wrong profile needs it

            known = sorted(filter(None, existing))
            close = difflib.get_close_matches(profile.class_, known, n=1)
            others = f"Existing classes: {', '.join(('/', *known))}"
            remedy = f"Did you mean {close[0]}?" if close else others
            named = f"profile {profile.name} names the class {printable(profile.class_)}, which does not exist"
            effect = "until it exists, containers and units with this profile stay in their class"
            yield f"{profile.class_origin}: {named}: {effect}. {printable(remedy)}"


class Choice(msgspec.Struct, frozen=True):
    """The selected profile, None for none, and the annotation or rule that selected it.

    ``unknown`` describes an annotation that names a profile that does not exist; "" if there is none.
    """

    profile: Profile | None = None
    source: str = ""
    unknown: str = ""

    @property
    def name(self) -> str:
        """The name of the profile; "" for none."""
        return self.profile.name if self.profile else ""

    @property
    def watch(self) -> Watch:
        """The group in which the container is counted."""
        return self.profile.watch if self.profile else Watch.POD


def select(profiles: Profiles, facts: Facts, *, owner: str, cgroup: str) -> Choice:
    """Return the profile of a container: by its annotations, else by the first rule that matches, else the default.

    An empty annotation selects no profile. One that names a profile that does not exist selects the default.
    ``cgroup`` is the path of the control group below the mount.
    """
    for annotation in choosing_names(facts.container):
        value = facts.annotations.get(annotation)
        if value is None:
            continue
        shown = attribute_value(annotation)
        if not value:
            return Choice(None, f"annotation {shown} is empty")
        profile = profiles.find(value)
        if profile is not None:
            return Choice(profile, f"annotation {shown}")
        unknown = f"annotation {shown} names the profile {value[:64]!a}, which does not exist"
        default = _default(profiles)
        return Choice(default.profile, "; ".join(filter(None, (default.source, unknown))), unknown)
    for rule in profiles.rules:
        if rule.matches(facts, owner=owner, cgroup=cgroup):
            return Choice(profiles.find(rule.profile), f"rule at {rule.origin}")
    return _default(profiles)


def select_for_pod(profiles: Profiles, facts: Facts, *, owner: str) -> Choice:
    """Return the profile of a pod as a whole, from the facts about one of its containers."""
    of_pod = msgspec.structs.replace(facts, container="", image="")
    return select(profiles, of_pod, owner=owner, cgroup="")


def select_for_unit(profiles: Profiles, unit: str, *, cgroup: str, user: int | None) -> Choice:
    """Return the profile of a unit of systemd: by the first rule that matches, else the default of units.

    ``unit`` is the key of its workload. ``cgroup`` is the path of its control group below the mount. ``user`` is the
    user in whose slice it is, None for no user.
    """
    for rule in profiles.rules:
        if rule.matches_unit(unit, cgroup=cgroup, user=user):
            return Choice(profiles.find(rule.profile), f"rule at {rule.origin}")
    if not profiles.unit_default:
        return Choice()
    return Choice(profiles.find(profiles.unit_default), f"default_unit_profile at {profiles.unit_default_origin}")


def annotation_names(annotations: Mapping[str, str]) -> dict[str, str]:
    """Return the annotations that can name a profile."""
    # Not for each name: there may be tens of thousands.
    prefixes = tuple(f"{prefix}/" for prefix in ANNOTATIONS)
    return {name: value for name, value in annotations.items() if name in ANNOTATIONS or name.startswith(prefixes)}


def choosing_names(container: str) -> Iterator[str]:
    """Return the annotations that can name the profile of a container, "" for none, the most important first."""
    for name in ANNOTATIONS:
        if 0 < len(container) <= _MAX_CONTAINER_NAME:
            yield f"{name}/{container}"
        yield name


def unit_of(cgroup: str) -> str:
    """Return the innermost service or scope of systemd in the path of a control group; "" if there is none."""
    return next((name for name in reversed(cgroup.split("/")) if _UNIT.search(name)), "")


def user_of(cgroup: str) -> int | None:
    """Return the user whose slice of systemd the path of a control group is in; None if it is in none."""
    for name in cgroup.split("/"):
        if found := _USER_SLICE.fullmatch(name):
            return int(found[1])
    return None


def _all_match(globs: Mapping[str, tuple[str, ...]], known: Mapping[str, str]) -> bool:
    """Return whether a pattern of each condition matches its fact. A fact that is not known meets none."""
    return all(
        known.get(key) and any(fnmatch.fnmatchcase(known[key], pattern) for pattern in patterns)
        for key, patterns in globs.items()
    )


def _default(profiles: Profiles) -> Choice:
    if not profiles.default:
        return Choice()
    return Choice(profiles.find(profiles.default), f"default_profile at {profiles.default_origin}")
