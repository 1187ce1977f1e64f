"""A process that acquires leases as a pod's user, because the daemon identifies tenants by their peer credentials.

The driver has threads of gRPC and so must not fork. It starts another Python process, which becomes the user and reads
a request from each line of its input.

Each request has a token that permits LEASE_ALLOC. A site that requires such tokens (`require_token = ["alloc"]`)
prevents pods from acquiring leases besides their claims.
"""

import base64
import json
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any, Final, Self

if __name__ == "__main__":
    from gpulease.imports import begin_imports

    begin_imports()

from gpulease.client.core.exchange import FixedDeadline, ask, dial
from gpulease.client.core.lease_request import address_of
from gpulease.client.core.tokens import issue_request
from gpulease.client.core.waits import Procedure
from gpulease.client.errors import Disconnected, GpuLeaseError
from gpulease.client.integrations.other_user import MAX_ERROR_CHARS, become, refusal_of, refusal_reply
from gpulease.client.sync.driver import ask as ask_once
from gpulease.client.sync.driver import drive
from gpulease.imports import end_imports
from gpulease.protocol import Exclusivity, Opcode
from gpulease.protocol.address import Address
from gpulease.protocol.capabilities import Permission
from gpulease.protocol.lease_ids import LeaseId
from gpulease.protocol.lease_options import EXCLUSIVITY, ORPHAN, REQUEST_ID
from gpulease.protocol.messages import CapabilityPresent, Empty, LeaseAlloc
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE

PROCESS_LIMIT_S: Final = 30.0
"""Maximum seconds for all leases of one claim. The kubelet waits 45 s for the whole request."""

REQUEST_LIMIT_S: Final = 10.0
"""Maximum seconds to acquire one lease. The request does not wait for room, because the kubelet retries."""

ALLOC_TOKEN_S: Final = 60.0
"""Seconds for which the token for one lease is valid."""


class NoUserProcess(GpuLeaseError):
    """No process could be started as the pod's user, or it could not reach the daemon."""

    default_hint = "The user must be able to connect to the daemon's socket; the driver must be root, or that user"


class UserProcess:
    """The process, which runs during a `with` block. Only one thread may call `acquire`."""

    def __init__(self, user: int, address: str, socket: Path) -> None:
        """Prepare a process of this user for the daemon at `address`, whose file is `socket`."""
        self._user, self._address, self._socket = user, address, socket

    def __enter__(self) -> Self:
        """Start the process, and wait until it reports the audience for its tokens. Raises NoUserProcess."""
        # Pods have the socket's group as a supplementary group, so give it to the process too.
        group = self._socket.stat().st_gid
        command = [sys.executable, "-P", "-m", __name__, str(self._user), str(group), self._address]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        # If the daemon hangs, kill the process, so that further requests about this claim are not blocked.
        self._watchdog = threading.Timer(PROCESS_LIMIT_S, self._process.kill)
        self._watchdog.start()
        try:
            self._audience = self._read_audience()
            return self
        except BaseException:
            self.__exit__()
            raise

    def __exit__(self, *_: object) -> None:
        # The process ends at the end of its input. If it does not, the watchdog kills it.
        self._process.communicate()
        self._watchdog.cancel()
        self._watchdog.join()

    def acquire(self, size_bytes: int, first_ms: int, card_uuid: str, request_id: bytes) -> LeaseId:
        """Acquire a shared lease for the user on one card, without waiting for room.

        Args:
            size_bytes: The lease's size.
            first_ms: Its first duration in milliseconds. The caller extends the lease later.
            card_uuid: The card.
            request_id: 16 bytes by which the daemon recognises a repeated request.

        Raises RefusedForUser, NoUserProcess, and the errors of issuing a token.
        """
        request = issue_request(0, Permission.LEASE_ALLOC, self._audience, ALLOC_TOKEN_S, 0)
        token = ask_once(Opcode.CAPABILITY_ISSUE, request, self._address).token
        message = {
            "token": base64.b64encode(token).decode(),
            "size_bytes": size_bytes,
            "first_ms": first_ms,
            "card_uuid": card_uuid,
            "request_id": request_id.hex(),
        }
        reply = json.loads(self._exchange(json.dumps(message)))
        if "lease_id" in reply:
            return LeaseId(int(reply["lease_id"], 16))
        raise refusal_of(reply)

    def _read_audience(self) -> bytes:
        line = self._exchange("")
        if not re.fullmatch("[0-9a-f]{64}", line):
            raise self._failure(line)
        return bytes.fromhex(line)

    def _exchange(self, line: str) -> str:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(line + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise self._failure("") from None
        if not (answer := self._process.stdout.readline()):
            raise self._failure("")
        return answer.rstrip("\n")

    def _failure(self, line: str) -> NoUserProcess:
        # `communicate` closes the process's input, which ends the process.
        _, stderr = self._process.communicate()
        # The last line of a traceback is the error. The text becomes an event of the pod.
        last = (line or stderr).strip().rpartition("\n")[2]
        return NoUserProcess(f"user {self._user} got no answer from the node: {last[-MAX_ERROR_CHARS:]}")


# --- in the process ---


def _serve(user: int, group: int, address: str) -> None:
    """Become the user, and answer requests. Modules must be imported before: the user may be unable to read them."""
    if os.geteuid() != user:
        become(user, group, [])
    for line in sys.stdin:
        if not line.strip():
            print(ask_once(Opcode.CAPABILITY_AUDIENCE, Empty(), address).audience.hex(), flush=True)
            continue
        try:
            lease_id = drive(_acquire(address_of(address), json.loads(line)))
            answer: dict[str, Any] = {"lease_id": str(lease_id)}
        except Disconnected:
            raise
        except GpuLeaseError as error:
            answer = refusal_reply(error)
        print(json.dumps(answer), flush=True)


def _acquire(address: Address, request: dict[str, Any]) -> Procedure[LeaseId]:
    deadline = FixedDeadline(REQUEST_LIMIT_S, "acquire", address)
    channel, _ = yield from dial(address, deadline)
    try:
        # The token applies to this connection.
        token = base64.b64decode(request["token"])
        yield from ask(channel, Opcode.CAPABILITY_PRESENT, CapabilityPresent(token), deadline)
        parameters = (
            EXCLUSIVITY.parameter(Exclusivity.SHARED),  # containers and pods may share a claim
            ORPHAN.parameter(0),  # the lease must survive times without any connection
            REQUEST_ID.parameter(request["request_id"]),
        )
        body = LeaseAlloc(
            GPU_RESOURCE_TYPE, request["size_bytes"], request["first_ms"], 0, request["card_uuid"], parameters
        )
        granted = yield from ask(channel, Opcode.LEASE_ALLOC, body, deadline)
        return LeaseId(granted.lease_id)
    finally:
        channel.close()


if __name__ == "__main__":
    end_imports()
    _serve(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
