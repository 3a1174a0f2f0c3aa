# SPDX-License-Identifier: Apache-2.0
"""The selection of a profile, as a table: annotations before rules before the default."""

from __future__ import annotations

from typing import Any

import pytest

from resctrlmond.workloads.model.reports import Facts
from resctrlmond.workloads.profiles.label_selector import parse_selector
from resctrlmond.workloads.profiles.profile import (
    Choice,
    Profile,
    Profiles,
    Rule,
    Watch,
    annotation_names,
    select,
    select_for_pod,
    select_for_unit,
    unit_of,
    user_of,
)

OURS, THEIRS = "profile.resctrlmon.org", "class.memtierd.nri.io"
BY_NAME = {name: Profile(name) for name in ("one", "two", "three", "usual")}
LIBPOD = "/machine.slice/libpod-abc.scope/container"


def known(**facts: Any) -> Facts:
    """Return facts; those that are not given are not known."""
    return Facts(**{"annotations": {}, "namespace": "", "image": "", "container": "", **facts})


def rule(profile: str = "one", **conditions: Any) -> Rule:
    """Return a rule with these conditions."""
    return Rule(profile, f"F:{profile}", **conditions)


def chosen(
    facts: Facts, *rules: Rule, default: str = "", owner: str = "oci", cgroup: str = LIBPOD
) -> tuple[str, str]:
    """Return the name of the selected profile, and the annotation or rule that selected it."""
    found = select(Profiles(BY_NAME, rules, default, "F:9"), facts, owner=owner, cgroup=cgroup)
    return found.name, found.source


def annotated(container: str = "app", **annotations: str) -> Facts:
    """Return facts with annotations: ``ours``, ``ours_app``, ``theirs`` and ``theirs_app``."""
    names = {
        name.replace("_", "/").replace("ours", OURS).replace("theirs", THEIRS): value
        for name, value in annotations.items()
    }
    return known(annotations=names, container=container)


@pytest.mark.parametrize(
    ("facts", "profile", "source"),
    [
        (annotated(ours="one"), "one", f"annotation {OURS}"),
        (annotated(ours="one", ours_app="two"), "two", f"annotation {OURS}/app"),
        (annotated("other", ours="one", ours_app="two"), "one", f"annotation {OURS}"),
        (annotated("", ours="one", ours_app="two"), "one", f"annotation {OURS}"),
        (annotated(theirs="one"), "one", f"annotation {THEIRS}"),
        (annotated(theirs="one", theirs_app="two"), "two", f"annotation {THEIRS}/app"),
        (annotated(ours="one", theirs_app="two"), "one", f"annotation {OURS}"),
        (annotated(ours=""), "", f"annotation {OURS} is empty"),
        (annotated(ours="one", ours_app=""), "", f"annotation {OURS}/app is empty"),
        (annotated(ours="", ours_app="one"), "one", f"annotation {OURS}/app"),
        (annotated(theirs_app="", ours_x="one"), "", f"annotation {THEIRS}/app is empty"),
        (annotated(ours_x="one"), "three", "rule at F:three"),
        (annotated(), "three", "rule at F:three"),
    ],
)
def test_annotations_come_first(facts: Facts, profile: str, source: str) -> None:
    everything = rule("three", globs={"cgroup": ("*",)})
    assert chosen(facts, everything, default="usual") == (profile, source)


@pytest.mark.parametrize("default", ["usual", ""])
def test_unknown_profile_in_an_annotation_selects_the_default_and_no_rule(default: str) -> None:
    profiles = Profiles(BY_NAME, (rule("three", globs={"cgroup": ("*",)}),), default, "F:9")
    found = select(profiles, annotated(ours="on\x1be", theirs="one"), owner="oci", cgroup=LIBPOD)
    assert found.name == default
    assert found.unknown == f"annotation {OURS} names the profile 'on\\x1be', which does not exist"
    assert found.source == (f"default_profile at F:9; {found.unknown}" if default else found.unknown)


FACTS = known(namespace="shop", labels={"app": "web"}, image="registry/web:1", container="app")


@pytest.mark.parametrize(
    ("conditions", "matches"),
    [
        ({"owners": frozenset({"oci"})}, True),
        ({"owners": frozenset({"nri"})}, False),
        ({"globs": {"namespace": ("sh*",)}}, True),
        ({"globs": {"namespace": ("Shop", "kube-*")}}, False),
        ({"globs": {"namespace": ("kube-*", "shop")}}, True),
        ({"globs": {"image": ("registry/*",)}}, True),
        ({"globs": {"image": ("web",)}}, False),
        ({"globs": {"container": ("app",)}}, True),
        ({"globs": {"container": ("ap",)}}, False),
        ({"globs": {"unit": ("libpod-*.scope",)}}, True),
        ({"globs": {"unit": ("machine.slice",)}}, False),
        ({"globs": {"cgroup": ("/machine.slice/*",)}}, True),
        ({"globs": {"cgroup": ("machine.slice/*",)}}, False),
        ({"labels": parse_selector("app in (web, api), !canary")}, True),
        ({"labels": parse_selector("app=api")}, False),
        ({"users": frozenset({1000})}, False),
        ({"globs": {"namespace": ("shop",), "container": ("other",)}}, False),
        ({"globs": {"namespace": ("shop",)}, "owners": frozenset({"nri"})}, False),
        ({"globs": {"namespace": ("shop",)}, "labels": parse_selector("app")}, True),
    ],
)
def test_rule_matches_if_all_conditions_are_met(conditions: dict[str, Any], matches: bool) -> None:
    assert chosen(FACTS, rule(**conditions)) == (("one", "rule at F:one") if matches else ("", ""))


@pytest.mark.parametrize(
    "conditions",
    [
        {"globs": {"namespace": ("*",)}},
        {"globs": {"image": ("*",)}},
        {"globs": {"container": ("*",)}},
        {"globs": {"unit": ("*",)}},
        {"globs": {"cgroup": ("*",)}},
        {"labels": parse_selector("!canary")},
        {"users": frozenset({0})},
    ],
    ids=str,
)
def test_unknown_fact_meets_no_condition(conditions: dict[str, Any]) -> None:
    assert chosen(known(), rule(**conditions), default="usual", cgroup="") == ("usual", "default_profile at F:9")


def test_first_rule_that_matches_applies() -> None:
    rules = [rule("one", globs={"namespace": ("kube",)}), rule("two", globs={"namespace": ("*",)})]
    assert chosen(FACTS, *rules, rule("three", globs={"image": ("*",)})) == ("two", "rule at F:two")


def test_user_of_a_slice_meets_the_condition() -> None:
    cgroup = "/user.slice/user-1000.slice/user@1000.service/app.slice/web.service/libpod-payload-abc"
    assert chosen(FACTS, rule(users=frozenset({0, 1000}), globs={"unit": ("web.*",)}), cgroup=cgroup)[0] == "one"
    assert chosen(FACTS, rule(users=frozenset({100})), cgroup=cgroup)[0] == ""


def test_pod_as_a_whole_has_no_facts_of_a_container() -> None:
    rules = (
        rule("one", globs={"container": ("*",)}),
        rule("one", globs={"image": ("*",)}),
        rule("one", globs={"cgroup": ("*",)}),
        rule("two", globs={"namespace": ("shop",)}),
    )
    profiles = Profiles(BY_NAME, rules)
    assert select_for_pod(profiles, FACTS, owner="nri").name == "two"
    facts = known(annotations={f"{OURS}/app": "one", OURS: "three"}, container="app")
    assert select_for_pod(profiles, facts, owner="nri").name == "three"


def test_container_without_a_profile_is_counted_in_its_pod() -> None:
    assert Choice().watch is Watch.POD
    assert Choice(Profile("x", Watch.NONE)).watch is Watch.NONE


def test_only_annotations_that_can_name_a_profile_are_kept() -> None:
    kept = {OURS: "a", f"{OURS}/app": "b", THEIRS: "c", f"{THEIRS}/app": ""}
    others = {"memory.high.memtierd.nri.io": "1", f"{OURS}x": "1", "other": "x", f"x.{OURS}": "1"}
    assert annotation_names(kept | others) == kept


UNITS = frozenset({"systemd"})
OF_POD = ("namespace", "image", "container")
IN_USER_SLICE = "/user.slice/user-1000.slice/user@1000.service/app.slice/app.service"


@pytest.mark.parametrize(
    ("conditions", "matches"),
    [
        ({"owners": UNITS}, True),
        ({"owners": UNITS | {"nri"}}, True),
        ({"owners": frozenset({"oci"})}, False),
        ({}, False),
        ({"globs": {"unit": ("user-1000:*.service",)}}, False),
        ({"owners": UNITS, "globs": {"unit": ("user-1000:*.service",)}}, True),
        ({"owners": UNITS, "globs": {"unit": ("app.service",)}}, False),
        ({"owners": UNITS, "globs": {"unit": ("*", "*.service", "*app.service")}}, False),
        ({"owners": UNITS, "globs": {"unit": ("*app.service",)}, "users": frozenset({1000})}, True),
        ({"owners": UNITS, "globs": {"unit": ("*app.service",), "cgroup": ("/user.slice/*",)}}, False),
        ({"owners": UNITS, "globs": {"unit": ("user-*:*",), "cgroup": ("*/app.slice/*",)}}, True),
        ({"owners": UNITS, "globs": {"cgroup": ("/user.slice/*",)}}, True),
        ({"owners": UNITS, "globs": {"cgroup": ("*/app.service", "/u*")}}, False),
        ({"owners": UNITS, "globs": {"cgroup": ("*/app.service",)}, "users": frozenset({1000})}, True),
        ({"owners": UNITS, "users": frozenset({1000})}, True),
        ({"owners": UNITS, "users": frozenset({1001})}, False),
        *(({"owners": UNITS | {"oci"}, "globs": {key: ("*",)}}, False) for key in OF_POD),
        ({"owners": UNITS | {"nri"}, "labels": parse_selector("!canary")}, False),
    ],
)
def test_rule_for_units_matches_only_by_what_units_have(conditions: dict[str, Any], matches: bool) -> None:
    profiles = Profiles(BY_NAME, (rule(**conditions),), "usual", "F:8", "two", "F:9")
    found = select_for_unit(profiles, "user-1000:app.service", cgroup=IN_USER_SLICE, user=1000)
    expected = ("one", "rule at F:one") if matches else ("two", "default_unit_profile at F:9")
    assert (found.name, found.source) == expected


def test_default_of_containers_does_not_apply_to_units() -> None:
    """A configuration from before there were profiles for units leaves all of them watched."""
    profiles = Profiles(BY_NAME, (rule(globs={"unit": ("*",)}), rule(globs={"cgroup": ("*",)})), "usual", "F:9")
    assert select_for_unit(profiles, "web.service", cgroup="/system.slice/web.service", user=None) == Choice()


def test_rule_for_units_does_not_concern_containers_in_them() -> None:
    of_units = rule(owners=UNITS, globs={"unit": ("libpod-*",)})
    assert chosen(FACTS, of_units) == ("", "")


@pytest.mark.parametrize(
    ("cgroup", "unit", "user"),
    [
        ("", "", None),
        ("/system.slice/web.service", "web.service", None),
        ("/system.slice/web.service/libpod-payload-abc", "web.service", None),
        ("/machine.slice/libpod-abc.scope/container", "libpod-abc.scope", None),
        ("/user.slice/user-1000.slice/session-2.scope", "session-2.scope", 1000),
        ("/kubepods/besteffort/pod1/abc", "", None),
        ("/user.slice/user-x.slice/.service", "", None),
        ("/user-12345678901.slice", "", None),
    ],
)
def test_unit_and_user_are_found_in_the_path_of_the_control_group(cgroup: str, unit: str, user: int | None) -> None:
    assert (unit_of(cgroup), user_of(cgroup)) == (unit, user)
