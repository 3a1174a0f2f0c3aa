# SPDX-License-Identifier: Apache-2.0
"""The OCI state is read strictly, and the workload that it names is the pod or else the container."""

from __future__ import annotations

import contextlib
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resctrlmond.api import oci_state
from resctrlmond.workloads.model.validation import attribute_value, canonical_key, check_attributes, check_member_id
from resctrlmond.workloads.profiles.profile import Profile, Profiles, select

ID = "4d" * 32
UID = "0f8fad5b-d9cb-469f-a165-70867728950e"


def state(**fields: Any) -> str:
    return json.dumps({"ociVersion": "1.0.2", "id": ID, "status": "creating", "pid": 4711, **fields})


def container(**annotations: str) -> oci_state.OciContainer:
    return oci_state.container_of(oci_state.parse_state(state(annotations=annotations)))


CRIO = {
    "io.kubernetes.pod.uid": UID,
    "io.kubernetes.pod.name": "web-0",
    "io.kubernetes.pod.namespace": "shop",
    "io.kubernetes.container.name": "nginx",
    "io.kubernetes.cri-o.ContainerName": f"k8s_nginx_web-0_shop_{UID}_0",
    "io.kubernetes.cri-o.ContainerType": "container",
}
CONTAINERD = {
    "io.kubernetes.cri.sandbox-uid": UID,
    "io.kubernetes.cri.sandbox-name": "web-0",
    "io.kubernetes.cri.sandbox-namespace": "shop",
    "io.kubernetes.cri.container-name": "nginx",
    "io.kubernetes.cri.container-type": "container",
}


def test_a_state_is_read_with_all_its_fields() -> None:
    read = oci_state.parse_state(state(bundle="/run/b", annotations={"a": "b"}, root="/", owner={"x": [1]}))
    assert (read.oci_version, read.id, read.status, read.pid) == ("1.0.2", ID, "creating", 4711)
    assert (read.bundle, read.annotations) == ("/run/b", {"a": "b"})


def test_facts_have_the_limits_of_attributes() -> None:
    """Each rule compares them, and an annotation may have most of a megabyte."""
    names = {"io.kubernetes.cri-o.ImageName": "i\x1b" * 100_000, "io.kubernetes.pod.namespace": "n" * 100_000}
    read = oci_state.parse_state(state(annotations={**CRIO, **names}))
    facts = oci_state.facts_of(read, oci_state.container_of(read))
    assert (facts.image, facts.namespace) == ("i" * 4096, "n" * 4096)


def test_a_stopped_container_has_no_pid() -> None:
    read = oci_state.parse_state(f'{{"ociVersion":"1.0.2","id":"{ID}","status":"stopped"}}')
    assert (read.pid, read.bundle, read.annotations) == (0, "", {})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "{",
        state() + "x",
        state(id=7),
        state(id=""),
        state(id=".."),
        state(id="../../etc/passwd"),
        state(id="a\n"),
        state(id="x" * 256),
        state(pid=-1),
        state(pid="4711"),
        state(pid=4711.5),
        state(pid=True),
        state(pid=2**31),
        state(pid=10**400),
        state(status=None),
        state(ociVersion=1),
        state(bundle=3),
        state(annotations=[]),
        state(annotations={"a": 1}),
        state()[:-1] + ',"x":' + "[" * 100_000,
        state(bundle="x" * (1 << 21)),
        state()[:-1] + ',"bundle":"\ud800"}',
    ],
    ids=lambda text: ascii(text)[-40:],
)
def test_invalid_state_is_refused(text: str) -> None:
    with pytest.raises(oci_state.InvalidOciState, match="OCI state"):
        oci_state.parse_state(text)


@given(st.one_of(st.text(), st.recursive(st.none() | st.integers() | st.text(), st.lists).map(json.dumps)))
def test_any_text_is_read_or_refused(text: str) -> None:
    with contextlib.suppress(oci_state.InvalidOciState):
        oci_state.parse_state(text)


def test_a_container_without_pod_is_its_own_workload() -> None:
    assert container() == oci_state.OciContainer(key=ID, member=ID, kind="container", attributes={})


@pytest.mark.parametrize("annotations", [CRIO, CONTAINERD], ids=["cri-o", "containerd"])
def test_a_container_in_a_pod_is_a_member_of_the_pod(annotations: dict[str, str]) -> None:
    attributes = {"pod.name": "web-0", "pod.namespace": "shop", "pod.uid": UID, "container.name": "nginx"}
    assert container(**annotations) == oci_state.OciContainer(UID, ID, "container", attributes)


def test_compact_uid_of_a_static_pod_becomes_a_key_and_is_kept_as_an_attribute() -> None:
    compact = UID.replace("-", "").upper()
    found = container(**{"io.kubernetes.pod.uid": compact})
    assert (found.key, found.attributes["pod.uid"]) == (UID, compact)


def test_the_first_runtimes_annotation_counts() -> None:
    both = {"io.kubernetes.pod.uid": UID, "io.kubernetes.cri.sandbox-uid": "no uid"}
    assert container(**both).key == UID


@pytest.mark.parametrize("name", ["io.kubernetes.pod.uid", "io.kubernetes.cri.sandbox-uid"])
@pytest.mark.parametrize("uid", ["", "..", "../../x", UID + "\n", "tasks", "x" * 201])
def test_an_annotation_that_holds_no_uid_is_refused_by_name(name: str, uid: str) -> None:
    with pytest.raises(oci_state.InvalidOciState, match=name):
        container(**{name: uid})


def test_a_uid_can_be_any_key() -> None:
    """A pod of crictl can have any UID, and so can a static pod."""
    assert container(**{"io.kubernetes.pod.uid": "etcd-master-0"}).key == "etcd-master-0"


@pytest.mark.parametrize("id_", [UID, UID.replace("-", ""), UID.upper()])
def test_a_container_id_in_the_form_of_a_uid_is_a_key(id_: str) -> None:
    read = oci_state.parse_state(state(id=id_))
    found, wrong = oci_state.claimed_container(read)
    assert (found.key, found.member, wrong, oci_state.claims_pod(read)) == (UID, id_, "", False)


@pytest.mark.parametrize(
    "annotation",
    ["io.kubernetes.cri-o.ContainerType", "io.kubernetes.cri.container-type"],
    ids=["cri-o", "cri"],
)
def test_the_container_that_only_holds_the_pod_is_a_sandbox(annotation: str) -> None:
    assert container(**{annotation: "sandbox"}).kind == "sandbox"
    assert container(**{annotation: "container"}).kind == "container"


@pytest.mark.parametrize("name", ["tasks", "mon_groups", "-x", ".x", "x" * 201])
def test_a_container_id_that_can_be_no_key_is_refused(name: str) -> None:
    with pytest.raises(oci_state.InvalidOciState, match="not a valid key"):
        oci_state.container_of(oci_state.parse_state(state(id=name)))


def test_values_are_cut_and_cleaned() -> None:
    read = oci_state.parse_state(
        state(bundle="/b\n\x1b[2J", annotations={"io.kubernetes.pod.name": "n" * 5000, "other": "x"})
    )
    assert oci_state.container_of(read).attributes == {"pod.name": "n" * 4096, "bundle": "/b[2J"}


@given(st.dictionaries(st.sampled_from(sorted({*CRIO, *CONTAINERD})), st.text() | st.just(UID)), st.text())
def test_workload_of_any_annotations_is_within_the_limits(annotations: dict[str, str], bundle: str) -> None:
    try:
        found = oci_state.container_of(oci_state.parse_state(state(annotations=annotations, bundle=bundle)))
    except oci_state.InvalidOciState:
        return
    assert canonical_key(found.key) == found.key
    check_member_id(found.member)
    check_attributes(found.attributes)


OURS, THEIRS = "profile.resctrlmon.org", "class.memtierd.nri.io"
_NAMES = st.sampled_from(["", "app", "a/b", "../app", "app\x1b", "x" * 300]) | st.text(max_size=9)
_KEYS = st.builds(str.__add__, st.sampled_from([OURS, THEIRS, "x"]), st.just("") | _NAMES.map("/{}".format))
_VALUES = st.sampled_from(["gold", "quiet", "", "gold\n", "Gold", "../gold", "$KEY", "\u0261old"]) | st.text()


@given(st.dictionaries(_KEYS, _VALUES, max_size=20), _NAMES)
def test_any_annotations_only_choose_among_the_profiles(annotations: dict[str, str], name: str) -> None:
    given_ = {**annotations, "io.kubernetes.container.name": name}
    try:
        read = oci_state.parse_state(state(annotations=given_))
    except oci_state.InvalidOciState:
        # JSON has no lone surrogates.
        assert not json.dumps(given_, ensure_ascii=False).isprintable()
        return
    found = oci_state.facts_of(read, oci_state.container_of(read))
    profiles = Profiles({known: Profile(known) for known in ("gold", "quiet", "usual")}, default="usual")
    choice = select(profiles, found, owner="oci", cgroup="")
    shown = attribute_value(name)
    in_order = [
        f"{kind}{of}" for kind in (OURS, THEIRS) for of in ([f"/{shown}", ""] if 0 < len(shown) < 254 else [""])
    ]
    first = next((annotations[key] for key in in_order if key in annotations), "usual")
    assert choice.name == (first if first in ("gold", "quiet", "usual", "") else "usual")
    assert attribute_value(choice.source) == choice.source
    assert len(choice.source) < 1000
