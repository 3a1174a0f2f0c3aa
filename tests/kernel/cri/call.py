# SPDX-License-Identifier: Apache-2.0
"""CRI calls, inside the guest: python3 call.py METHOD JSON [METHOD JSON]... prints the answers as one JSON object.

$NAME in a call's JSON stands for that field of an earlier answer: to start Python is slow in the guest.
"""

from __future__ import annotations

import json
import sys
from string import Template
from typing import Any

import cri_pb2 as cri
import grpc
from google.protobuf import json_format

SOCKET = "unix:///run/containerd/containerd.sock"
RUNTIME, IMAGE = "runtime.v1.RuntimeService", "runtime.v1.ImageService"

METHODS = {
    "RunPodSandbox": (RUNTIME, cri.RunPodSandboxRequest, cri.PodSandboxId),
    "StopPodSandbox": (RUNTIME, cri.PodSandboxId, cri.Empty),
    "RemovePodSandbox": (RUNTIME, cri.PodSandboxId, cri.Empty),
    "CreateContainer": (RUNTIME, cri.CreateContainerRequest, cri.ContainerId),
    "StartContainer": (RUNTIME, cri.ContainerId, cri.Empty),
    "StopContainer": (RUNTIME, cri.ContainerId, cri.Empty),
    "RemoveContainer": (RUNTIME, cri.ContainerId, cri.Empty),
    "ExecSync": (RUNTIME, cri.ExecSyncRequest, cri.ExecSyncResponse),
    "ListImages": (IMAGE, cri.Empty, cri.ListImagesResponse),
}


def call(channel: grpc.Channel, method: str, parameters: str) -> dict[str, Any]:
    """Make one call; an error ends the program with what containerd says."""
    service, request, reply = METHODS[method]
    remote = channel.unary_unary(
        f"/{service}/{method}",
        request_serializer=request.SerializeToString,
        response_deserializer=reply.FromString,
    )
    try:
        answer = remote(json_format.Parse(parameters, request()), timeout=60, wait_for_ready=True)
    except grpc.RpcError as error:
        sys.exit(f"{method}: {error.code()}: {error.details()}")
    found: dict[str, Any] = json_format.MessageToDict(answer)
    return found


def main(*words: str) -> None:
    """Make the calls, one after the other."""
    answers: dict[str, Any] = {}
    with grpc.insecure_channel(SOCKET) as channel:
        for method, parameters in zip(words[::2], words[1::2], strict=True):
            answers |= call(channel, method, Template(parameters).safe_substitute(answers))
    print(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
