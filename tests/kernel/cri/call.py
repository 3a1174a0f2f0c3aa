# SPDX-License-Identifier: Apache-2.0
"""Make CRI calls inside the guest on request: call.py SOCKET, with one connection for each request.

A request is a JSON array of [method, parameters], the reply one JSON object of all their replies, or containerd's
error as "error". $NAME in the parameters of a call is replaced by that field of an earlier reply. The process stays
in the guest because a start of Python with gRPC is slow there.
"""

from __future__ import annotations

import contextlib
import json
import socket
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
    """Make one call. Raises RpcError with containerd's error."""
    service, request, reply = METHODS[method]
    remote = channel.unary_unary(
        f"/{service}/{method}",
        request_serializer=request.SerializeToString,
        response_deserializer=reply.FromString,
    )
    answer = remote(json_format.Parse(parameters, request()), timeout=60, wait_for_ready=True)
    found: dict[str, Any] = json_format.MessageToDict(answer)
    return found


def answers(calls: list[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Make the calls, one after the other, until one fails."""
    found: dict[str, Any] = {}
    # A channel for each request, because containerd may have been restarted meanwhile.
    with grpc.insecure_channel(SOCKET) as channel:
        for method, parameters in calls:
            try:
                found |= call(channel, method, Template(json.dumps(parameters)).safe_substitute(found))
            except grpc.RpcError as error:
                return {"error": f"{method}: {error.code()}: {error.details()}"}
    return found


def main(path: str) -> None:
    """Relay until the process is killed."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            # The process that sent the request may have ended.
            with contextlib.suppress(OSError, ValueError), connection, connection.makefile("rwb") as stream:
                reply = answers(json.loads(stream.readline()))
                stream.write(json.dumps(reply).encode())


if __name__ == "__main__":
    main(*sys.argv[1:])
