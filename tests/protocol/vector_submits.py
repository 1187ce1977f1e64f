"""The conversations of `vectors/conversations/` that are about submits."""

from dataclasses import replace

from gpulease.protocol import Exclusivity, Failure, Opcode, Status
from gpulease.protocol import messages as m
from gpulease.protocol.lease_options import SUBMIT
from gpulease.protocol.opcodes import GPU_RESOURCE_TYPE, TYPED_VALUE, ArgumentKind, ParameterType, SubmitOption
from gpulease.protocol.primitives import LeaseParameter, Tlv

from .vector_messages import CARD_UUID, EXPIRES, LEASE
from .vector_script import PTX, SLICE, Script, X


def submit() -> Script:
    script = Script(
        "One kernel in a context of its own, beside a session; the next one is refused while two are under way, then "
        "answered without outputs. The lease goes on."
    )
    script.hello("control")
    parameters = (LeaseParameter(SUBMIT.tag, (16 << 20).to_bytes(8, "big")),)
    grant = m.LeaseGrant(LEASE, 1, SLICE, 120_000, EXPIRES, Exclusivity.SESSION_EXCLUSIVE, CARD_UUID)
    script.call(
        "control", Opcode.LEASE_ALLOC, m.LeaseAlloc(GPU_RESOURCE_TYPE, SLICE, 120_000, 0, None, parameters), grant
    )
    ready = m.AttachReply(16 << 20, "cpu", CARD_UUID, ())
    arguments = (
        m.SubmitArgument(ArgumentKind.INOUT, 0, X),
        *(m.SubmitArgument(ArgumentKind.VALUE, 0, bytes.fromhex(value)) for value in ("04000000", "00000040")),
    )
    run = m.SubmitRun("scale", 1, 1, 1, 256, 1, 1, 0, arguments, PTX)
    script.hello("submit")
    script.call("submit", Opcode.GPU_SUBMIT, m.GpuSubmit(30_000, ()), ready, LEASE)
    twice = m.SubmitDone((bytes.fromhex("000000000000004000008040" + "0000c040"),))
    script.call("submit", Opcode.SUBMIT_RUN, run, twice, LEASE)
    script.hello("next submit")
    busy = Failure(Status.BUSY, "the lease has a submit under way, and another one waits for it")
    asked = script.ask("next submit", Opcode.GPU_SUBMIT, m.GpuSubmit(30_000, ()), session_id=LEASE)
    script.refuse("next submit", asked, busy, "the connection is a control connection still: it may ask again")
    script.call("next submit", Opcode.GPU_SUBMIT, m.GpuSubmit(30_000, ()), ready, LEASE)
    failed = script.ask("next submit", Opcode.SUBMIT_RUN, replace(run, kernel="scaled"), session_id=LEASE)
    fault = Failure(Status.LAUNCH_FAILED, "module 1 has no kernel 'scaled'", kernel="scaled")
    script.refuse("next submit", failed, fault)
    script.call("control", Opcode.LEASE_FREE, m.LeaseRef(LEASE), m.Empty())
    return script


def typed_submit() -> Script:
    script = Script("A submit whose values' types are told; one is an integer where the image's PTX declares a float.")
    script.hello("submit")
    ready = m.AttachReply(16 << 20, "cpu", CARD_UUID, (Tlv(SubmitOption.TYPED_VALUES, b""),))
    script.call("submit", Opcode.GPU_SUBMIT, m.GpuSubmit(30_000, ()), ready, LEASE)
    arguments = (
        m.SubmitArgument(ArgumentKind.INOUT, 0, X),
        m.SubmitArgument(TYPED_VALUE + ParameterType.U32, 0, bytes.fromhex("04000000")),
        m.SubmitArgument(TYPED_VALUE + ParameterType.U32, 0, bytes.fromhex("02000000")),
    )
    run = m.SubmitRun("scale", 1, 1, 1, 256, 1, 1, 0, arguments, PTX)
    asked = script.ask("submit", Opcode.SUBMIT_RUN, run, session_id=LEASE)
    words = "scale: argument 2 is .u32, the kernel's parameter is .f32"
    script.refuse("submit", asked, Failure(Status.LAUNCH_FAILED, words, kernel="scale"))
    return script
