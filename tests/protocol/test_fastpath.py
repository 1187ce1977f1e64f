from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpulease.protocol import BodyError, LocalProtocolError, Opcode, fastpath
from gpulease.protocol import messages as m
from gpulease.protocol.codec import build_body, parse_body
from gpulease.protocol.framing import HEADER, build_frame
from gpulease.protocol.limits import MAX_ARGUMENT_BYTES, MAX_DATA_BYTES, MAX_KERNEL_NAME_BYTES
from gpulease.protocol.opcodes import Flag

from . import strategies


@st.composite
def consistent_launches(draw: st.DrawFn) -> m.Launch:
    """Launches whose sizes add up to their argument bytes."""
    sizes = tuple(draw(st.lists(st.integers(0, 16), max_size=6)))
    launch: m.Launch = draw(strategies.records(m.Launch))
    values = {name: getattr(launch, name) for name in launch.__dataclass_fields__}
    args = draw(st.binary(min_size=sum(sizes), max_size=sum(sizes)))
    return m.Launch(**values | {"args": args, "arg_sizes": sizes})


def with_args(launch: m.Launch, args: bytes) -> m.Launch:
    return m.Launch(**{name: getattr(launch, name) for name in launch.__dataclass_fields__} | {"args": args})


@settings(max_examples=80, deadline=None)
@given(launch=consistent_launches(), session_id=strategies.SESSION_IDS, data=st.data())
def test_a_template_gives_the_frame_of_the_codec(launch: m.Launch, session_id: int, data: st.DataObject) -> None:
    template = fastpath.LaunchTemplate(launch, session_id)
    assert template.args_bytes == len(launch.args)
    args = data.draw(st.binary(min_size=len(launch.args), max_size=len(launch.args)))
    request_id = data.draw(strategies.REQUEST_IDS)
    payload = build_body(with_args(launch, args))
    plain = build_frame(Opcode.LAUNCH, payload, request_id=request_id, session_id=session_id, flags=Flag.QUIET)
    assert template.frame(request_id, args) == plain


def in_regions(launch: m.Launch, region_set: int, position: int) -> m.LaunchIn:
    same = {name: getattr(launch, name) for name in launch.__dataclass_fields__}
    return m.LaunchIn(**same, region_set=region_set, position=position)


@settings(max_examples=80, deadline=None)
@given(launch=consistent_launches(), ids=st.lists(strategies.REQUEST_IDS, min_size=4, max_size=4))
def test_a_template_in_regions_gives_the_frame_of_the_codec(launch: m.Launch, ids: list[int]) -> None:
    session_id, request_id, region_set, position = ids
    template = fastpath.LaunchTemplate(launch, session_id, Opcode.LAUNCH_IN)
    payload = build_body(in_regions(launch, region_set, position))
    plain = build_frame(Opcode.LAUNCH_IN, payload, request_id=request_id, session_id=session_id, flags=Flag.QUIET)
    assert template.frame(request_id, launch.args, region_set, position) == plain


@given(launch=consistent_launches(), numbers=st.lists(st.integers(0, 2**32 - 1), min_size=7, max_size=7))
def test_a_template_with_attributes_gives_the_frame_of_the_codec(launch: m.Launch, numbers: list[int]) -> None:
    request_id, *trailer = numbers
    template = fastpath.LaunchTemplate(launch, 7, Opcode.LAUNCH_WITH)
    payload = build_body(m.LaunchWith(*(getattr(launch, name) for name in launch.__slots__), *trailer))
    plain = build_frame(Opcode.LAUNCH_WITH, payload, request_id=request_id, session_id=7, flags=Flag.QUIET)
    assert template.frame(request_id, launch.args, *trailer) == plain
    rest, flags, cluster = fastpath.split_attributes(memoryview(payload))
    assert (flags, *cluster) == tuple(trailer[2:])
    assert bytes(rest) == build_body(in_regions(launch, *trailer[:2]))
    with pytest.raises(BodyError):
        fastpath.split_attributes(memoryview(payload)[:15])


@pytest.mark.parametrize("op", sorted(set(Opcode) - {Opcode.LAUNCH, Opcode.LAUNCH_IN}))
def test_only_launches_have_templates_and_patterns(op: Opcode) -> None:
    launch = m.Launch(1, "k", 1, 1, 1, 1, 1, 1, 0, b"", ())
    if op is not Opcode.LAUNCH_WITH:
        with pytest.raises(KeyError):
            fastpath.LaunchTemplate(launch, 1, op)
    with pytest.raises(KeyError):
        fastpath.LaunchPattern(build_body(launch), 1, op)


def test_a_template_of_arguments_that_do_not_add_up_is_refused() -> None:
    with pytest.raises(LocalProtocolError, match="add up to 12 bytes, the arguments have 3"):
        fastpath.LaunchTemplate(m.Launch(1, "k", 1, 1, 1, 1, 1, 1, 0, b"abc", (8, 4)), 1)


def joined(shape: bytes, args: bytes) -> bytes:
    """The payload that was split: the argument bytes go behind their length."""
    at = 8 + 4 + int.from_bytes(shape[8:12], "big") + 28 + 4
    return shape[:at] + args + shape[at:]


@settings(max_examples=80, deadline=None)
@given(body=strategies.records(m.GraphLaunch))
def test_graph_launches_equal_the_codec(body: m.GraphLaunch) -> None:
    payload = fastpath.graph_launch_payload(body.graph, body.args)
    assert payload == build_body(body)
    assert m.GraphLaunch(*fastpath.parse_graph_launch(memoryview(payload))) == body


@settings(max_examples=80, deadline=None)
@given(payload=st.binary(max_size=24) | strategies.records(m.GraphLaunch).map(build_body).map(lambda data: data[:-1]))
def test_parse_graph_launch_refuses_what_the_codec_refuses(payload: bytes) -> None:
    try:
        expected = parse_body(m.GraphLaunch, payload)
    except BodyError:
        with pytest.raises(BodyError, match="GraphLaunch is malformed"):
            fastpath.parse_graph_launch(memoryview(payload))
    else:
        assert m.GraphLaunch(*fastpath.parse_graph_launch(memoryview(payload))) == expected


@pytest.mark.parametrize("length", [MAX_ARGUMENT_BYTES, MAX_ARGUMENT_BYTES + 1])
def test_graph_launches_at_the_limit(length: int) -> None:
    body = m.GraphLaunch(1, bytes(length))
    payload = bytes(7) + b"\1" + length.to_bytes(4, "big") + body.args
    if length <= MAX_ARGUMENT_BYTES:
        assert fastpath.graph_launch_payload(1, body.args) == payload
        assert fastpath.parse_graph_launch(memoryview(payload)) == (1, body.args)
        return
    with pytest.raises(BodyError, match="at most"):
        fastpath.parse_graph_launch(memoryview(payload))
    for number, args in ((1, body.args), (1 << 64, b"")):
        with pytest.raises(LocalProtocolError):
            fastpath.graph_launch_payload(number, args)


@settings(max_examples=80, deadline=None)
@given(launch=strategies.records(m.Launch))
def test_a_split_launch_joins_to_itself(launch: m.Launch) -> None:
    payload = build_body(launch)
    shape, args = fastpath.split_launch(memoryview(payload))
    assert args == launch.args
    assert joined(shape, args) == payload


@settings(max_examples=80, deadline=None)
@given(one=strategies.records(m.Launch), other=strategies.records(m.Launch), same=st.booleans())
def test_the_first_part_of_a_split_is_a_key(one: m.Launch, other: m.Launch, same: bool) -> None:
    if same:
        other = with_args(one, bytes(len(one.args)))
    shapes = [fastpath.split_launch(memoryview(build_body(launch)))[0] for launch in (one, other)]
    alike = with_args(one, b"") == with_args(other, b"") and len(one.args) == len(other.args)
    assert (shapes[0] == shapes[1]) == alike


@settings(max_examples=80, deadline=None)
@given(body=strategies.records(m.LaunchIn) | strategies.records(m.GraphLaunchIn))
def test_what_names_regions_splits_into_what_does_not(body: m.LaunchIn | m.GraphLaunchIn) -> None:
    rest, region_set, position = fastpath.split_regions(memoryview(build_body(body)))
    assert (region_set, position) == (body.region_set, body.position)
    if isinstance(body, m.LaunchIn):
        launch = parse_body(m.Launch, rest)
        assert in_regions(launch, region_set, position) == body
    else:
        assert m.GraphLaunchIn(*fastpath.parse_graph_launch(rest), region_set, position) == body
        assert fastpath.graph_launch_payload(body.graph, body.args, region_set, position) == build_body(body)


@pytest.mark.parametrize("kind", [m.LaunchIn, m.GraphLaunchIn])
@settings(max_examples=200, deadline=None)
@given(payload=st.binary(max_size=80))
def test_what_names_regions_is_refused_where_the_codec_refuses_it(kind: type[Any], payload: bytes) -> None:
    try:
        expected = parse_body(kind, payload)
    except BodyError:
        expected = None
    try:
        rest, *regions = fastpath.split_regions(memoryview(payload))
        split = parse_body(m.Launch if kind is m.LaunchIn else m.GraphLaunch, rest)
    except BodyError:
        assert expected is None
        return
    assert expected is not None
    assert kind(*(getattr(split, name) for name in split.__dataclass_fields__), *regions) == expected


@pytest.mark.parametrize("regions", [(1 << 64, 0), (0, -1)])
def test_a_graph_launch_in_regions_that_do_not_fit_is_refused(regions: tuple[int, int]) -> None:
    with pytest.raises(LocalProtocolError):
        fastpath.graph_launch_payload(1, b"", *regions)


def is_of(pattern: fastpath.LaunchPattern, frame: bytes) -> bool:
    """What a pattern's docstring says of a frame that is of it."""
    return (
        len(frame) == pattern.frame_bytes
        and frame.startswith(pattern.front)
        and frame.startswith(pattern.middle, fastpath.MIDDLE_AT)
        and frame.startswith(pattern.tail, pattern.args_end)
    )


@settings(max_examples=80, deadline=None)
@given(
    one=strategies.records(m.Launch), other=strategies.records(m.Launch), ids=st.lists(st.integers(1, 9), min_size=4)
)
def test_a_pattern_knows_frames_of_its_kind_and_no_others(one: m.Launch, other: m.Launch, ids: list[int]) -> None:
    pattern = fastpath.LaunchPattern(build_body(one), ids[0])
    alike = with_args(one, b"\xff" * len(one.args))
    for launch, session_id in ((one, ids[0]), (alike, ids[0]), (one, ids[1]), (other, ids[0])):
        frame = build_frame(
            Opcode.LAUNCH, build_body(launch), request_id=ids[2], session_id=session_id, flags=Flag.QUIET
        )
        expected = launch in (one, alike) and session_id == ids[0]
        assert is_of(pattern, frame) == expected
        if expected:
            assert frame[pattern.args_at : pattern.args_end] == launch.args
    loud = build_frame(Opcode.LAUNCH, build_body(one), request_id=ids[2], session_id=ids[0])
    assert not is_of(pattern, loud)


@settings(max_examples=80, deadline=None)
@given(one=consistent_launches(), other=consistent_launches(), numbers=st.lists(strategies.REQUEST_IDS, min_size=4))
def test_a_pattern_in_regions_leaves_set_and_position_open(one: m.Launch, other: m.Launch, numbers: list[int]) -> None:
    pattern = fastpath.LaunchPattern(build_body(in_regions(one, 0, 0)), 7, Opcode.LAUNCH_IN)
    alike = with_args(one, b"\xff" * len(one.args))
    for launch in (one, alike, other):
        payload = build_body(in_regions(launch, numbers[0], numbers[1]))
        frame = build_frame(Opcode.LAUNCH_IN, payload, request_id=numbers[2], session_id=7, flags=Flag.QUIET)
        expected = with_args(launch, bytes(len(launch.args))) == with_args(one, bytes(len(one.args)))
        assert is_of(pattern, frame) == expected
        if expected:
            assert frame[pattern.args_at : pattern.args_end] == launch.args
            trailer = frame[pattern.frame_bytes - pattern.trailer_bytes :]
            assert trailer == numbers[0].to_bytes(8, "big") + numbers[1].to_bytes(8, "big")
            assert pattern.args_end + len(pattern.tail) + pattern.trailer_bytes == pattern.frame_bytes
    plain = build_frame(Opcode.LAUNCH, build_body(one), request_id=numbers[2], session_id=7, flags=Flag.QUIET)
    assert not is_of(pattern, plain)


@settings(max_examples=400, deadline=None)
@given(payload=st.binary(max_size=120) | st.binary(max_size=60).map((bytes(8) + b"\0\0\0\1").__add__))
def test_any_bytes_split_or_are_a_body_error(payload: bytes) -> None:
    try:
        shape, args = fastpath.split_launch(memoryview(payload))
    except BodyError:
        with pytest.raises(BodyError):
            parse_body(m.Launch, payload)
        return
    assert joined(shape, args) == payload


LAUNCH = build_body(m.Launch(1, "scale", 1, 1, 1, 1, 1, 1, 0, b"12345678", (8,)))


@pytest.mark.parametrize("cut", range(len(LAUNCH)))
def test_a_launch_cut_anywhere_is_refused_no_later_than_by_the_codec(cut: int) -> None:
    with pytest.raises(BodyError):
        parse_body(m.Launch, LAUNCH[:cut])
    try:
        shape, args = fastpath.split_launch(memoryview(LAUNCH)[:cut])
    except BodyError:
        return
    # Only the sizes list may still be wrong; it is in the part that is checked once per shape.
    assert cut >= len(LAUNCH) - 4
    assert joined(shape, args) == LAUNCH[:cut]


def replaced(at: int, value: int) -> memoryview:
    return memoryview(LAUNCH[:at] + value.to_bytes(4, "big") + LAUNCH[at + 4 :])


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (8, MAX_KERNEL_NAME_BYTES + 1),
        (8, 0xFFFF_FFFF),
        (8, 300),
        (45, MAX_ARGUMENT_BYTES + 1),
        (45, 0xFFFF_FFFF),
        (45, 20),
    ],
)
def test_lengths_that_do_not_fit_are_refused(at: int, value: int) -> None:
    for parse in (fastpath.split_launch, lambda payload: parse_body(m.Launch, payload)):
        with pytest.raises(BodyError):
            parse(replaced(at, value))


def mem_write_by_codec(payload: bytes) -> tuple[int, int, bytes]:
    body = parse_body(m.MemWrite, payload)
    return body.handle, body.offset, body.data


@settings(max_examples=300, deadline=None)
@given(
    payload=strategies.records(m.MemWrite).map(build_body)
    | st.binary(max_size=60)
    | st.builds(lambda n, data: bytes(16) + n.to_bytes(4, "big") + data, st.integers(0, 40), st.binary(max_size=40))
)
def test_parse_mem_write_equals_the_codec(payload: bytes) -> None:
    try:
        expected = mem_write_by_codec(payload)
    except BodyError:
        with pytest.raises(BodyError, match="MemWrite is malformed"):
            fastpath.parse_mem_write(memoryview(payload))
        return
    handle, offset, data = fastpath.parse_mem_write(memoryview(payload))
    assert (handle, offset, bytes(data)) == expected


@pytest.mark.parametrize("length", [MAX_DATA_BYTES, MAX_DATA_BYTES + 1, 0xFFFF_FFFF])
def test_parse_mem_write_at_the_limit(length: int) -> None:
    there = min(length, MAX_DATA_BYTES + 1)
    payload = memoryview(bytes(16) + length.to_bytes(4, "big") + bytes(there))
    if length > MAX_DATA_BYTES:
        with pytest.raises(BodyError, match="at most"):
            fastpath.parse_mem_write(payload)
    else:
        assert len(fastpath.parse_mem_write(payload)[2]) == length


@settings(max_examples=60, deadline=None)
@given(body=strategies.records(m.MemWrite), request_id=strategies.REQUEST_IDS, quiet=st.booleans())
def test_mem_write_prefix_equals_the_codec(body: m.MemWrite, request_id: int, quiet: bool) -> None:
    prefix = fastpath.mem_write_prefix(
        body.handle, body.offset, len(body.data), request_id=request_id, session_id=9, quiet=quiet
    )
    flags = Flag.QUIET if quiet else 0
    plain = build_frame(Opcode.MEM_WRITE, build_body(body), request_id=request_id, session_id=9, flags=flags)
    assert prefix + body.data == plain


@pytest.mark.parametrize(
    ("handle", "offset", "length"),
    [(0, 0, MAX_DATA_BYTES + 1), (-1, 0, 0), (0, -1, 0), (0, 1 << 64, 0), (0, 0, -1)],
)
def test_mem_write_prefix_refuses_what_does_not_fit(handle: int, offset: int, length: int) -> None:
    with pytest.raises(LocalProtocolError):
        fastpath.mem_write_prefix(handle, offset, length, request_id=1, session_id=1, quiet=False)


@settings(max_examples=60, deadline=None)
@given(body=strategies.records(m.MemRead), request_id=strategies.REQUEST_IDS, session_id=strategies.SESSION_IDS)
def test_mem_read_frame_equals_the_codec(body: m.MemRead, request_id: int, session_id: int) -> None:
    frame = fastpath.mem_read_frame(body.handle, body.offset, body.length, request_id=request_id, session_id=session_id)
    assert frame == build_frame(Opcode.MEM_READ, build_body(body), request_id=request_id, session_id=session_id)
    with pytest.raises(LocalProtocolError):
        fastpath.mem_read_frame(body.handle, -1, body.length, request_id=request_id, session_id=session_id)


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=80), request_id=strategies.REQUEST_IDS, session_id=strategies.SESSION_IDS)
def test_data_prefix_equals_the_codec(data: bytes, request_id: int, session_id: int) -> None:
    prefix = fastpath.data_prefix(len(data), request_id=request_id, session_id=session_id)
    payload = build_body(m.Data(data))
    flags = Flag.REPLY
    plain = build_frame(Opcode.MEM_READ, payload, request_id=request_id, session_id=session_id, flags=flags)
    assert prefix + data == plain


@settings(max_examples=100, deadline=None)
@given(kind=st.sampled_from(list(fastpath.LAYOUTS)), payload=st.binary(max_size=34))
def test_parse_fixed_equals_the_codec(kind: type[Any], payload: bytes) -> None:
    layout = fastpath.LAYOUTS[kind]
    try:
        body = parse_body(kind, payload)
    except BodyError:
        with pytest.raises(BodyError):
            fastpath.parse_fixed(layout, kind, memoryview(payload))
        return
    values = tuple(getattr(body, name) for name in body.__dataclass_fields__)
    assert fastpath.parse_fixed(layout, kind, memoryview(payload)) == values


def test_parse_fixed_of_exact_payloads() -> None:
    assert fastpath.parse_fixed(fastpath.HANDLE, m.Handle, memoryview(bytes(7) + b"\x09")) == (9,)
    payload = memoryview(build_body(m.MemRead(1, 2, 3)))
    assert fastpath.parse_fixed(fastpath.MEM_READ, m.MemRead, payload) == (1, 2, 3)


def test_a_field_of_no_fixed_size_has_no_struct() -> None:
    assert fastpath.fixed_struct(m.LeaseAlloc, "resource_type", "size_bytes").format == ">HQ"
    with pytest.raises(ValueError, match="not an integer of fixed size"):
        fastpath.fixed_struct(m.Launch, "module", "kernel")


def test_the_request_id_is_where_the_definition_has_it() -> None:
    before = sum(named.sizeof() for named in HEADER.subcons[:7])
    assert HEADER.subcons[7].name == "request_id"
    assert before == fastpath.REQUEST_ID_OFFSET


@settings(max_examples=20, deadline=None)
@given(size=st.integers(0, 2**64 - 1))
def test_an_allocations_size_is_the_codecs(size: int) -> None:
    payload = fastpath.MEM_ALLOC.pack(size)
    assert payload == build_body(m.MemAlloc(size))
    assert fastpath.parse_fixed(fastpath.MEM_ALLOC, m.MemAlloc, memoryview(payload)) == (size,)


@given(body=strategies.records(m.RegionRefusal), request_id=strategies.REQUEST_IDS, session_id=strategies.SESSION_IDS)
def test_region_refused_frame_equals_the_codec(body: m.RegionRefusal, request_id: int, session_id: int) -> None:
    plain = build_frame(
        Opcode.REGION_REFUSED, build_body(body), request_id=request_id, session_id=session_id, flags=Flag.QUIET
    )
    fields = (body.slot, body.number, body.kernel, body.position)
    assert fastpath.region_refused_frame(*fields, request_id=request_id, session_id=session_id) == plain
