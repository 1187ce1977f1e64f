"""Checks whether a running driver answers, for the probes of its pod."""

from pathlib import Path
from typing import Final

import grpc

from gpulease.client.integrations.kubernetes.kubelet_plugin import dra_message, message, registration_socket

PROBE_LIMIT_S: Final = 5.0
"""Maximum seconds for each of the two calls."""


def problem_of(driver: str, registry: Path, instance: str) -> str:
    """Return the problem of a pod's driver, or "" if it answers the calls that the kubelet would make."""
    path = registration_socket(driver, registry, instance)
    try:
        # Step 1: get the DRA service's socket from the registration socket.
        info = message("pluginregistration.PluginInfo").FromString(
            _call(str(path), "/pluginregistration.Registration/GetInfo")
        )
        # Step 2: send a request without claims, which gets no answer if all threads of the driver hang.
        reply = _call(info.endpoint, "/k8s.io.kubelet.pkg.apis.dra.v1.DRAPlugin/NodeUnprepareResources")
        dra_message("v1", "NodeUnprepareResourcesResponse").FromString(reply)
    except grpc.RpcError as error:
        return f"the driver does not answer at {path}: {error.code().name}: {error.details()}"
    return ""


def _call(path: str, method: str) -> bytes:
    with grpc.insecure_channel(f"unix:{path}") as channel:
        call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        return bytes(call(b"", timeout=PROBE_LIMIT_S))
