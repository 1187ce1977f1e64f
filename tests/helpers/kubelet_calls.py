"""`python -m helpers.kubelet_calls SOCKET`: does gRPC calls for a test, one for each line "METHOD HEX" on stdin.

A line "socket PATH" directs the following calls to another socket.

It is a separate process, because gRPC keeps threads and descriptors for as long as its process runs. For each call it
prints "ok HEX" or "failed CODE DETAILS". For a line "stream:METHOD" it prints the first message of the stream. It does
not interpret the bytes, because the test encodes them itself.
"""

import sys
from typing import Any

import grpc

CALL_LIMIT_S = 45.0
"""Seconds for one call: the kubelet's own limit for a driver."""


def main() -> None:
    channel = grpc.insecure_channel(f"unix:{sys.argv[1]}")
    try:
        for line in sys.stdin:
            method, _, body = line.strip().partition(" ")
            try:
                if method == "socket":
                    channel.close()
                    channel = grpc.insecure_channel(f"unix:{body}")
                    print("ok", flush=True)
                    continue
                if method.startswith("stream:"):
                    stream: Any = channel.unary_stream(
                        method.removeprefix("stream:"), request_serializer=bytes, response_deserializer=bytes
                    )(b"")
                    print("ok", next(stream).hex(), flush=True)
                    stream.cancel()
                    continue
            except grpc.RpcError as error:
                print("failed", error.code().name, error.details(), flush=True)
                continue
            call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
            try:
                print("ok", call(bytes.fromhex(body), timeout=CALL_LIMIT_S).hex(), flush=True)
            except grpc.RpcError as error:
                print("failed", error.code().name, error.details(), flush=True)
    finally:
        channel.close()


if __name__ == "__main__":
    main()
