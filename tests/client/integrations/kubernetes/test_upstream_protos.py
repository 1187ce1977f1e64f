"""The driver's messages against the kubelet's own .proto files, from a checkout of kubernetes/kubelet.

`GPULEASE_KUBELET=CHECKOUT pytest tests/client/integrations/kubernetes/test_upstream_protos.py`, with grpcio-tools.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from google.protobuf import descriptor_pb2

from gpulease.client.integrations.kubernetes import kubelet_plugin

pytestmark = pytest.mark.slow

FILES = {
    "pluginregistration/v1": "pluginregistration",
    "dra/v1": "k8s.io.kubelet.pkg.apis.dra.v1",
    "dra/v1beta1": "k8s.io.kubelet.pkg.apis.dra.v1beta1",
    "dra-health/v1": "v1",
    "dra-health/v1alpha1": "v1alpha1",
}


def upstream(folder: str, scratch: Path) -> descriptor_pb2.FileDescriptorProto:
    """A .proto file, compiled."""
    source = os.environ.get("GPULEASE_KUBELET")
    if source is None:
        pytest.skip("GPULEASE_KUBELET names no checkout of kubernetes/kubelet")
    path = Path(source) / "pkg" / "apis" / folder
    command = [sys.executable, "-m", "grpc_tools.protoc", f"-I{path}", f"--descriptor_set_out={scratch}/set"]
    subprocess.run([*command, "api.proto"], check=True)
    (file,) = descriptor_pb2.FileDescriptorSet.FromString((scratch / "set").read_bytes()).file
    return file


def shape(file: descriptor_pb2.FileDescriptorProto) -> dict[str, object]:
    """What is on the wire: each message's fields, and the numbers of enums."""
    messages = {
        name: sorted((field.number, field.name, field.type, field.label, field.type_name) for field in fields)
        for message in file.message_type
        for name, fields in [
            (message.name, message.field),
            *((f"{message.name}.{nested.name}", nested.field) for nested in message.nested_type),
        ]
    }
    enums = {enum.name: [(value.number, value.name) for value in enum.value] for enum in file.enum_type}
    return {"messages": messages, "enums": enums, "package": file.package}


@pytest.mark.parametrize("folder", FILES)
def test_the_driver_s_messages_are_the_kubelet_s(folder: str, tmp_path: Path) -> None:
    theirs = upstream(folder, tmp_path)
    ours = descriptor_pb2.FileDescriptorProto()
    kubelet_plugin._POOL.FindFileByName(f"{FILES[folder]}.proto").CopyToProto(ours)
    assert shape(ours) == shape(theirs)
    # The services' names are in the paths of calls, which the tests of the contract use.
    (service,) = theirs.service
    contract = Path(__file__).with_name("test_kubelet_contract.py").read_text()
    helper = (Path(__file__).parents[3] / "helpers" / "kubelet.py").read_text()
    assert f"{service.name}/" in contract + helper
    assert all(method.name in contract + helper or "NodeUnprepare" in method.name for method in service.method)
