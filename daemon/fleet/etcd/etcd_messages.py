"""The messages and calls of etcd that the client uses (etcd, api/etcdserverpb/rpc.proto, api/mvccpb/kv.proto).

The classes are built from the table `MESSAGES`, without a compiler of .proto files. They are in a pool of their own, so
that another library may also define etcd's messages in the same process. Enumerations are plain numbers.
"""

from collections.abc import Mapping
from typing import Any, Final

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

CREATE: Final = 1
MOD: Final = 2
"""Compare.target: compare a key's create revision, or its mod revision."""

DELETE: Final = 1
"""Event.type: the key was removed."""

_PACKAGE: Final = "etcdserverpb"
_KINDS: Final = {
    "bytes": descriptor_pb2.FieldDescriptorProto.TYPE_BYTES,
    "string": descriptor_pb2.FieldDescriptorProto.TYPE_STRING,
    "bool": descriptor_pb2.FieldDescriptorProto.TYPE_BOOL,
    "int64": descriptor_pb2.FieldDescriptorProto.TYPE_INT64,
    "uint64": descriptor_pb2.FieldDescriptorProto.TYPE_UINT64,
}
"""Types of fields. Every other type is a message."""

MESSAGES: Final = {
    "ResponseHeader": "uint64 cluster_id = 1, uint64 member_id = 2, int64 revision = 3",
    "KeyValue": "bytes key = 1, int64 create_revision = 2, int64 mod_revision = 3, bytes value = 5",
    "Event": "int64 type = 1, KeyValue kv = 2",
    "RangeRequest": "bytes key = 1, bytes range_end = 2, int64 limit = 3, int64 revision = 4",
    "RangeResponse": "ResponseHeader header = 1, KeyValue* kvs = 2, bool more = 3",
    "PutRequest": "bytes key = 1, bytes value = 2",
    "DeleteRangeRequest": "bytes key = 1",
    "RequestOp": "RangeRequest request_range = 1, PutRequest request_put = 2,"
    " DeleteRangeRequest request_delete_range = 3",
    "ResponseOp": "RangeResponse response_range = 1",
    # The revision is in a oneof, so a 0 is also sent.
    "Compare": "int64 result = 1, int64 target = 2, bytes key = 3, int64 create_revision = 5 of union,"
    " int64 mod_revision = 6 of union",
    "TxnRequest": "Compare* compare = 1, RequestOp* success = 2, RequestOp* failure = 3",
    "TxnResponse": "ResponseHeader header = 1, bool succeeded = 2, ResponseOp* responses = 3",
    "CompactionRequest": "int64 revision = 1",
    "CompactionResponse": "ResponseHeader header = 1",
    "WatchCreateRequest": "bytes key = 1, bytes range_end = 2, int64 start_revision = 3, bool progress_notify = 4",
    "WatchRequest": "WatchCreateRequest create_request = 1",
    "WatchResponse": "ResponseHeader header = 1, bool created = 3, bool canceled = 4, int64 compact_revision = 5,"
    " string cancel_reason = 6, Event* events = 11",
    "StatusRequest": "",
    "StatusResponse": "ResponseHeader header = 1, int64 db_size = 3, int64 db_size_quota = 12",
}
"""Fields by message: `TYPE NAME = NUMBER`. `*` marks a repeated field, and `of union` a field of a oneof."""


def messages_of(package: str, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return message classes by name, from fields in the notation of `MESSAGES`."""
    # Step 1: build the descriptor of a .proto file, field by field.
    file = descriptor_pb2.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, texts in fields.items():
        message = file.message_type.add(name=name)
        for text in filter(None, texts.split(",")):
            kind, field_name, _, number, *of_union = text.split()
            field = message.field.add(name=field_name, number=int(number))
            field.label = field.LABEL_REPEATED if kind.endswith("*") else field.LABEL_OPTIONAL
            kind = kind.rstrip("*")
            field.type = _KINDS.get(kind, field.TYPE_MESSAGE)
            if kind not in _KINDS:
                field.type_name = f".{package}.{kind}"
            # A field of a oneof is sent even if it is 0.
            if of_union:
                if not message.oneof_decl:
                    message.oneof_decl.add(name="union")
                field.oneof_index = 0
    # Step 2: add it to a separate pool.
    pool = descriptor_pool.DescriptorPool()
    pool.AddSerializedFile(file.SerializeToString())
    descriptors = {name: pool.FindMessageTypeByName(f"{package}.{name}") for name in fields}
    return {name: message_factory.GetMessageClass(descriptor) for name, descriptor in descriptors.items()}


_CLASSES: Final = messages_of(_PACKAGE, MESSAGES)

Compare: Final = _CLASSES["Compare"]
CompactionRequest: Final = _CLASSES["CompactionRequest"]
DeleteRangeRequest: Final = _CLASSES["DeleteRangeRequest"]
PutRequest: Final = _CLASSES["PutRequest"]
RangeRequest: Final = _CLASSES["RangeRequest"]
RequestOp: Final = _CLASSES["RequestOp"]
StatusRequest: Final = _CLASSES["StatusRequest"]
TxnRequest: Final = _CLASSES["TxnRequest"]
WatchCreateRequest: Final = _CLASSES["WatchCreateRequest"]
WatchRequest: Final = _CLASSES["WatchRequest"]


class EtcdCalls:
    """etcd's calls on one channel, as gRPC callables."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.range = _unary(channel, "KV/Range", "RangeRequest", "RangeResponse")
        self.txn = _unary(channel, "KV/Txn", "TxnRequest", "TxnResponse")
        self.compact = _unary(channel, "KV/Compact", "CompactionRequest", "CompactionResponse")
        self.status = _unary(channel, "Maintenance/Status", "StatusRequest", "StatusResponse")
        self.watch: Any = channel.stream_stream(
            f"/{_PACKAGE}.Watch/Watch",
            request_serializer=WatchRequest.SerializeToString,
            response_deserializer=_CLASSES["WatchResponse"].FromString,
        )


def _unary(channel: grpc.aio.Channel, method: str, request: str, response: str) -> Any:
    return channel.unary_unary(
        f"/{_PACKAGE}.{method}",
        request_serializer=_CLASSES[request].SerializeToString,
        response_deserializer=_CLASSES[response].FromString,
    )
