# SPDX-License-Identifier: Apache-2.0
"""NRI's messages: decoding, skipped fields, responses, and that the generated code is current."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from resctrlmond.nri import messages, nri_pb2
from resctrlmond.nri.messages import Event
from resctrlmond.workloads.model.pods import ContainerState
from tests.nri.hostile import container, pod

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["nri_pb2.py", "nri_pb2.pyi"])
def test_the_generated_code_is_current(tmp_path: Path, name: str) -> None:
    version = subprocess.run(["protoc", "--version"], capture_output=True, text=True, check=True).stdout
    assert version.startswith("libprotoc 3.21."), "newer ones write code that older protobuf libraries do not import"
    source = "resctrlmond/nri/nri.proto"
    protoc = ["protoc", "--proto_path=.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", source]
    subprocess.run(protoc, cwd=ROOT, check=True)
    assert (tmp_path / "resctrlmond/nri" / name).read_text() == (ROOT / "resctrlmond/nri" / name).read_text()


def test_mask_has_only_events_that_every_version_knows() -> None:
    assert messages.MASK == 0x677
    assert messages.MASK & ~0x7FF == 0
    answer = messages.answer(messages.Configure("containerd", "v1.7.24"))
    assert nri_pb2.ConfigureResponse.FromString(answer).events == 0x677


def test_dedicated_method_and_state_change_are_equal() -> None:
    for method, event in messages.METHODS.items():
        change = nri_pb2.StateChangeEvent(event=event, pod=pod(), container=container())
        dedicated = nri_pb2.EventRequest(pod=pod(), container=container())
        decoded = messages.decode(method, dedicated.SerializeToString())
        assert decoded == messages.decode("StateChange", change.SerializeToString())
        assert isinstance(decoded, messages.EventReport)
        assert decoded.event is event
    assert {method for method in messages.METHODS if "Update" in method} == set()


def test_all_used_fields_are_decoded() -> None:
    change = nri_pb2.StateChangeEvent(event=6, pod=pod(), container=container())
    decoded = messages.decode("StateChange", change.SerializeToString())
    assert decoded == messages.EventReport(
        Event.START_CONTAINER,
        messages.Pod(
            id="a" * 64,
            uid="0f1e2d3c-4b5a-4697-8877-66554433221a",
            name="web-a",
            namespace="shop",
            labels={"app": "web", "tier": "x"},
            annotations={"example.com/team": "sea"},
            pid=4242,
        ),
        messages.Container(
            id="c" * 64,
            sandbox="a" * 64,
            name="app",
            state=ContainerState.RUNNING,
            pid=4243,
            cgroups_path=f"kubepods-pod1.slice:cri-containerd:{'c' * 64}",
        ),
    )


# A field and its wire type, as in protobuf's encoding: 0 varint, 1 and 5 fixed, 2 with a length.
UNKNOWN = [
    pytest.param(b"\x98\x06\x05", id="99-varint"),
    pytest.param(b"\x99\x06" + bytes(8), id="99-fixed64"),
    pytest.param(b"\x9d\x06" + bytes(4), id="99-fixed32"),
    pytest.param(b"\x9a\x06\x02hi", id="99-bytes"),
]


@pytest.mark.parametrize("unknown", UNKNOWN)
def test_unknown_fields_are_skipped(unknown: bytes) -> None:
    given = pod().SerializeToString() + unknown
    change = b"\x08\x01\x12" + bytes([len(given) & 0x7F | 0x80, len(given) >> 7]) + given
    decoded = messages.decode("StateChange", change)
    assert decoded == messages.decode("RunPodSandbox", nri_pb2.EventRequest(pod=pod()).SerializeToString())


def test_labels_and_text_are_limited_in_size() -> None:
    labels = {f"l{number:04}": "x" * 1000 for number in range(1000)} | {"a": "y" * 1_000_000, "z": "1"}
    given = nri_pb2.EventRequest(pod=nri_pb2.PodSandbox(id="i" * 9000, name="n" * 9000, labels=labels))
    decoded = messages.decode("RunPodSandbox", given.SerializeToString())
    assert isinstance(decoded, messages.EventReport)
    assert decoded.pod is not None
    assert 60_000 < sum(len(name) + len(text) for name, text in decoded.pod.labels.items()) <= 65_536
    assert decoded.pod.labels["z"] == "1", "a label that is too long does not displace others"
    assert len(decoded.pod.id) == len(decoded.pod.name) == 4096


def test_event_with_an_annotation_that_is_not_utf8_is_decoded() -> None:
    given = nri_pb2.EventRequest(pod=pod())
    given.pod.annotations.add(name=b"k", value=b"\xff\xfe")
    decoded = messages.decode("RunPodSandbox", given.SerializeToString())
    assert isinstance(decoded, messages.EventReport)
    assert decoded.pod is not None
    assert decoded.pod.annotations["k"] == "\ufffd\ufffd"


@pytest.mark.parametrize("event", [-1, 0, 4, 8, 12, 13, 14, 15, 2**31 - 1])
def test_unsubscribed_event_is_none(event: int) -> None:
    decoded = messages.decode("StateChange", nri_pb2.StateChangeEvent(event=event).SerializeToString())
    assert decoded == messages.EventReport(None, None, None)


def test_absent_is_not_the_same_as_empty() -> None:
    decoded = messages.decode(
        "StateChange", nri_pb2.StateChangeEvent(event=1, pod=nri_pb2.PodSandbox()).SerializeToString()
    )
    assert decoded == messages.EventReport(Event.RUN_POD_SANDBOX, messages.Pod(""), None)


@pytest.mark.parametrize(
    "payload",
    [
        pytest.param(b"\x12\x05\x0a", id="cut"),
        pytest.param(b"\x12\x03\x0a\x01\xff", id="name-that-is-no-utf8"),
        pytest.param(b"\x08" + b"\xff" * 10 + b"\x01", id="varint-of-eleven-bytes"),
        pytest.param(b"\x00", id="field-0"),
    ],
)
def test_invalid_payload_raises_unreadable(payload: bytes) -> None:
    with pytest.raises(messages.Unreadable, match="StateChange"):
        messages.decode("StateChange", payload)


@pytest.mark.parametrize("method", ["", "CreateSandbox", "UpdateContainer", "ValidateContainerAdjustment", "x" * 999])
def test_unknown_method_is_none(method: str) -> None:
    assert messages.decode(method, b"") is None


def test_response_to_a_chunk_repeats_more() -> None:
    chunk = nri_pb2.SynchronizeRequest(pods=[pod()], more=True)
    decoded = messages.decode("Synchronize", chunk.SerializeToString())
    assert isinstance(decoded, messages.Synchronize)
    assert nri_pb2.SynchronizeResponse.FromString(messages.answer(decoded)).more
    last = messages.decode("Synchronize", b"")
    assert last == messages.Synchronize((), (), False)
    assert messages.answer(messages.Synchronize((), (), False)) == b""


@pytest.mark.parametrize("order", [1, -1])
def test_pod_of_cri_o_does_not_choose_the_image_of_its_container(order: int) -> None:
    """CRI-O copies the annotations of the pod, which a user writes, to each container."""
    one = container()
    given = {"io.kubernetes.cri.image-name": "wanted", "io.kubernetes.cri-o.ImageName": "real"}
    one.annotations.extend(
        nri_pb2.Annotation(name=name.encode(), value=value.encode()) for name, value in list(given.items())[::order]
    )
    event = nri_pb2.StateChangeEvent(event=Event.START_CONTAINER, pod=pod(), container=one)
    decoded = messages.decode("StateChange", event.SerializeToString())
    assert "image='real'" in repr(decoded)
