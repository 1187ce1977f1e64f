"""What a submit is told, on either face; what becomes of it is in behaviour/test_submits."""

from typing import Any, cast

import numpy as np
import pytest

from gpulease.client import GpuBuilder, InvalidHandle, InvalidRequest, KernelArgs, LaunchFailed, Submission, aio
from gpulease.client.core.submits import SubmissionBase
from gpulease.client.core.waits import Procedure
from gpulease.client.handles import Buffer, HandleOwner
from gpulease.protocol.codec import build_body
from gpulease.protocol.lease_options import SUBMIT
from gpulease.protocol.limits import MAX_SUBMIT_ARGUMENTS, MAX_SUBMIT_OUTPUT_BYTES
from gpulease.protocol.messages import SubmitArgument
from gpulease.protocol.opcodes import TYPED_VALUE, ArgumentKind
from gpulease.protocol.opcodes import ParameterType as T


class Owner:
    """A session, as far as its handles need one."""

    def __init__(self) -> None:
        self.dropped: list[Any] = []
        self.is_alive = True


def a_sessions_buffer() -> KernelArgs:
    return KernelArgs().push_buffer(Buffer(cast("HandleOwner", Owner()), 256, 4))


FACES = [Submission, aio.Submission]
VALUE, INPUT, OUTPUT, INOUT = ArgumentKind


def never(_: SubmissionBase) -> Procedure[list[bytes]]:
    raise AssertionError("it was launched")
    yield


@pytest.fixture(params=FACES)
def submission(request: pytest.FixtureRequest) -> Any:
    return request.param("infer", "// ptx", never)


def test_what_is_asked_for_is_what_was_said(submission: Any) -> None:
    submission.grid([4]).block((8, 2)).shared_bytes(64).arg(b"in").arg(np.uint32(7)).inout(np.zeros(2, np.uint8))
    body = submission.args(KernelArgs().push_f32(2).push_u64(3)).out(9).arg(np.arange(6)[::2])._body()
    assert (body.kernel, body.image) == ("infer", b"// ptx")
    assert (body.grid_x, body.grid_y, body.block_x, body.block_y, body.block_z) == (4, 1, 8, 2, 1)
    assert body.shared_bytes == 64
    assert body.arguments == (
        SubmitArgument(INPUT, 0, b"in"),
        SubmitArgument(VALUE, 0, bytes([7, 0, 0, 0])),
        SubmitArgument(INOUT, 0, bytes(2)),
        SubmitArgument(VALUE, 0, bytes.fromhex("00000040")),
        SubmitArgument(VALUE, 0, bytes([3]) + bytes(7)),
        SubmitArgument(OUTPUT, 9, b""),
        SubmitArgument(INPUT, 0, np.array([0, 2, 4]).tobytes()),
    )
    build_body(body)
    kinds = [argument.kind for argument in submission._typed(body).arguments]
    types = [None, T.U32, None, T.F32, T.U64, None, None]
    plain = [INPUT, VALUE, INOUT, VALUE, VALUE, OUTPUT, INPUT]
    expected = [kind if of is None else TYPED_VALUE + of for kind, of in zip(plain, types, strict=True)]
    assert kinds == expected, "for a daemon that takes types"


WRONG: dict[str, Any] = {
    "a grid of nothing": lambda s: s.grid([0]),
    "a block of four dimensions": lambda s: s.block([1, 1, 1, 1]),
    "shared bytes below zero": lambda s: s.shared_bytes(-1),
    "a number without a size": lambda s: s.arg(7),
    "nothing": lambda s: s.arg(b""),
    "an output of nothing": lambda s: s.out(0),
    "outputs too large together": lambda s: s.out(MAX_SUBMIT_OUTPUT_BYTES).inout(b"x"),
    "an argument of more bytes than any memory": lambda s: s.arg(np.broadcast_to(np.uint8(1), 1 << 50)),
    "arguments that are none": lambda s: s.args(b"1234"),
    "buffers of a session": lambda s: s.args(a_sessions_buffer()),
    "too many": lambda s: [s.arg(np.uint32(1)) for _ in range(MAX_SUBMIT_ARGUMENTS + 1)],
    "no time": lambda s: s.timeout_secs(0),
}


@pytest.mark.parametrize("say", WRONG.values(), ids=WRONG)
def test_what_makes_no_sense_is_told_at_once(submission: Any, say: Any) -> None:
    with pytest.raises((InvalidRequest, LaunchFailed, InvalidHandle)):
        say(submission)


def test_a_lease_is_asked_for_with_room_for_submits() -> None:
    wanted = GpuBuilder("unix:/nowhere").min_vram(10).submits(5)._request()
    assert wanted.size_bytes == 15
    assert [(one.tag, one.value) for one in wanted.parameters] == [(SUBMIT.tag, bytes(7) + b"\x05")]
    with pytest.raises(InvalidRequest, match="submits"):
        GpuBuilder("unix:/nowhere").submits(0)
