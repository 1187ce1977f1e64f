"""Builds the script of a conversation, for the vectors."""

from collections import Counter
from typing import Any

from gpulease.protocol import Exclusivity, Failure, Opcode
from gpulease.protocol import messages as m
from gpulease.protocol.lease_options import EXCLUSIVITY
from gpulease.protocol.limits import MAX_PAYLOAD_BYTES
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, Flag
from gpulease.protocol.primitives import LeaseParameter, Tlv
from gpulease.protocol.ring import SharedMemoryGrant, SharedMemoryRequest

from .vector_json import body_to_json, bytes_to_json, frame, header_to_json
from .vector_messages import CARD_UUID, EXPIRES, LEASE, POINTER

SLICE = 64 << 20
MODULE = 1
X = b"".join(bytes.fromhex(value) for value in ("00000000", "0000803f", "00000040", "00004040"))
Y = b"".join(bytes.fromhex(value) for value in ("00002041", "00004041", "00006041", "00008041"))
"""X has the floats 0, 1, 2, 3. Y has twice each of them plus ten."""

_HEAD = ".version 6.3\n.target sm_75\n.address_size 64\n"
_KERNEL = """.visible .entry {name}(.param .u64 x, .param .u32 n, .param .f32 a)
{{
.reg .pred %p; .reg .b32 %i, %n, %b, %t; .reg .f32 %a, %v; .reg .b64 %x, %o;
ld.param.u64 %x, [x]; ld.param.u32 %n, [n]; ld.param.f32 %a, [a];
mov.u32 %b, %ctaid.x; mov.u32 %t, %ntid.x; mov.u32 %i, %tid.x;
mad.lo.s32 %i, %b, %t, %i;
setp.ge.u32 %p, %i, %n;
@%p bra DONE;
cvta.to.global.u64 %x, %x; mul.wide.u32 %o, %i, 4; add.s64 %x, %x, %o;
ld.global.f32 %v, [%x]; {op}.f32 %v, %v, %a; st.global.f32 [%x], %v;
DONE: ret;
}}
"""
PTX = (_HEAD + _KERNEL.format(name="scale", op="mul") + _KERNEL.format(name="bias", op="add")).encode()
WITH_VARIABLE = (
    _HEAD + ".visible .const .align 4 .b8 coefficients[16];\n" + _KERNEL.format(name="scale", op="mul")
).encode()
KERNELS = tuple(m.KernelEntry(name, 1024, (8, 4, 4)) for name in ("scale", "bias"))


class Script:
    def __init__(self, comment: str) -> None:
        self.comment = comment
        self.steps: list[dict[str, Any]] = []
        self._asked: dict[tuple[str, int], tuple[Opcode, int]] = {}
        self._last_id: Counter[str] = Counter()

    def ask(
        self, connection: str, op: Opcode, body: m.Body, *, session_id: int = 0, quiet: bool = False, comment: str = ""
    ) -> int:
        """Add the client's next request on a connection. Returns its id."""
        self._last_id[connection] += 1
        request_id = self._last_id[connection]
        self._asked[connection, request_id] = op, session_id
        flags = int(Flag.QUIET) if quiet else 0
        wire = frame(op, body, request_id=request_id, session_id=session_id, flags=flags)
        self._step(connection, "client", op, body, wire, comment)
        return request_id

    def reply(self, connection: str, request_id: int, body: m.Body, comment: str = "", status: int = 0) -> None:
        op, session_id = self._asked[connection, request_id]
        wire = frame(op, body, flags=Flag.REPLY, status=status, request_id=request_id, session_id=session_id)
        self._step(connection, "daemon", op, body, wire, comment)

    def refuse(self, connection: str, request_id: int, failure: Failure, comment: str = "") -> None:
        self.reply(connection, request_id, failure.to_body(), comment, failure.status)

    def tell(self, connection: str, subscription: int, event: m.LeaseEvent | m.RegionEvent, comment: str = "") -> None:
        op = Opcode.LEASE_EVENT if isinstance(event, m.LeaseEvent) else Opcode.REGION_EVENT
        wire = frame(op, event, flags=Flag.REPLY, request_id=subscription)
        self._step(connection, "daemon", op, event, wire, comment)

    def say_goodbye(self, connection: str, failure: Failure, comment: str = "") -> None:
        body = failure.to_body()
        wire = frame(Opcode.GOODBYE, body, flags=Flag.REPLY, status=failure.status, request_id=0)
        self._step(connection, "daemon", Opcode.GOODBYE, body, wire, comment)

    def call(self, connection: str, op: Opcode, body: m.Body, reply: m.Body, session_id: int = 0) -> None:
        self.reply(connection, self.ask(connection, op, body, session_id=session_id), reply)

    def hello(self, connection: str, *options: Tlv) -> None:
        """Add the greeting with which every connection begins."""
        reply = m.HelloReply(0, "gpuleased 0.1.0", MAX_PAYLOAD_BYTES, options)
        self.call(connection, Opcode.HELLO, m.Hello(0, "gpulease 0.1.0", ()), reply)

    def grant(self, connection: str = "control", ttl_ms: int = 120_000) -> None:
        """Add the grant of a lease of 64 MiB."""
        grant = m.LeaseGrant(LEASE, 1, SLICE, ttl_ms, EXPIRES, Exclusivity.SHARED, CARD_UUID)
        self.call(connection, Opcode.LEASE_ALLOC, alloc(SLICE, ttl_ms), grant)

    def attach(
        self,
        wanted: SharedMemoryRequest | None = None,
        given: SharedMemoryGrant | None = None,
        told: tuple[Tlv, ...] = (),
        asked: tuple[Tlv, ...] = (),
    ) -> None:
        """Add a second connection, which becomes the lease's session."""
        asked, options = (
            (wanted or SharedMemoryRequest()).to_options() + asked,
            (given or SharedMemoryGrant()).to_options() + told,
        )
        self.hello("session")
        self.call("session", Opcode.ATTACH, m.Attach(asked), m.AttachReply(SLICE, "cpu", CARD_UUID, options), LEASE)

    def load(self) -> None:
        self.call("session", Opcode.MODULE_LOAD, m.ModuleLoad(PTX), m.ModuleLoaded(MODULE, KERNELS), LEASE)

    def to_json(self) -> dict[str, Any]:
        return {"kind": "conversation", "comment": self.comment, "steps": self.steps}

    def _step(self, connection: str, sender: str, op: Opcode, body: m.Body, wire: bytes, comment: str) -> None:
        step: dict[str, Any] = {"connection": connection, "from": sender, "op": op.name}
        if comment:
            step["comment"] = comment
        described = {"header": header_to_json(wire[:40]), "message": type(body).__name__, "body": body_to_json(body)}
        self.steps.append(step | described | {"wire": bytes_to_json(wire)})


def alloc(size_bytes: int, ttl_ms: int = 120_000, exclusivity: int = 0, wait_ms: int = 0) -> m.LeaseAlloc:
    parameters = (LeaseParameter(EXCLUSIVITY.tag, bytes([exclusivity])),)
    return m.LeaseAlloc(GPU_RESOURCE_TYPE, size_bytes, ttl_ms, wait_ms, None, parameters)


def launch(kernel: str, value_hex: str) -> m.Launch:
    """Return the launch of a kernel on the four floats.

    Its arguments are a pointer, a count and a value, little-endian and packed.
    """
    args = POINTER.to_bytes(8, "little") + (4).to_bytes(4, "little") + bytes.fromhex(value_hex)
    return m.Launch(MODULE, kernel, 1, 1, 1, 256, 1, 1, 0, args, (8, 4, 4))
