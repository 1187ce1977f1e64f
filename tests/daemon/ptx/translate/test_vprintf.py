"""printf and assert in kernels: what is printed, and that nothing else is read."""

import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpulease.daemon.drivers.interface import ImageRejected, KernelFault
from gpulease.daemon.ptx.context import CpuContext
from gpulease.daemon.ptx.limits import MAX_PRINT_BYTES, MAX_PRINT_TEXT, MAX_PRINT_WIDTH
from gpulease.daemon.ptx.printf import render

IMAGE = b"""
.version 8.0
.target sm_75
.address_size 64
.extern .func (.param .b32 r) vprintf(.param .b64 format, .param .b64 values);
.extern .func __assertfail(.param .b64 m, .param .b64 f, .param .b32 l, .param .b64 n, .param .b64 s);
.entry show(.param .u64 format, .param .u64 values, .param .u64 result)
{
    .reg .b64 %d<4>; .reg .b32 %r1;
    ld.param.u64 %d1, [format]; ld.param.u64 %d2, [values]; ld.param.u64 %d3, [result];
    .param .b64 a; .param .b64 b; .param .b32 c;
    st.param.b64 [a], %d1; st.param.b64 [b], %d2;
    call (c), vprintf, (a, b);
    ld.param.b32 %r1, [c];
    st.global.u32 [%d3], %r1;
}
.entry check(.param .u64 message, .param .u64 file, .param .u64 function)
{
    .reg .b64 %d1; .reg .b32 %r1; .reg .pred %p;
    .param .b64 a, b, d, e; .param .b32 c;
    mov.u32 %r1, %tid.x; setp.lt.u32 %p, %r1, 3; @%p exit;
    ld.param.u64 %d1, [message]; st.param.b64 [a], %d1;
    ld.param.u64 %d1, [file]; st.param.b64 [b], %d1;
    st.param.b32 [c], 77;
    ld.param.u64 %d1, [function]; st.param.b64 [d], %d1;
    st.param.b64 [e], 1;
    call.uni __assertfail, (a, b, c, d, e);
}
""".replace(b".param .b64 a, b, d, e;", b".param .b64 a; .param .b64 b; .param .b64 d; .param .b64 e;")


class Printer:
    """Runs printf on a format and values, which lie in device memory."""

    def __init__(self, context: CpuContext) -> None:
        self.context = context
        self.kernels = context.module_load(IMAGE).kernels
        self.format = context.mem_alloc(8192)
        self.values = context.mem_alloc(256)
        self.result = context.mem_alloc(4)
        self.texts: list[tuple[str, str]] = []
        context.printed = lambda kernel, text: self.texts.append((kernel, text))

    def queue(self, form: bytes, values: bytes = b"", *, threads: int = 1) -> None:
        """Write and launch."""
        self.context.mem_write(self.format, memoryview(form + b"\0"))
        if values:
            self.context.mem_write(self.values, memoryview(values))
        self.launch(self.format, self.values, threads=threads)

    def launch(self, form: int, values: int, *, threads: int = 1) -> None:
        params = struct.pack("<QQQ", form % 2**64, values % 2**64, self.result)
        self.context.launch(self.kernels["show"], (1, 1, 1), (threads, 1, 1), 0, params, 1)

    def run(self, form: bytes, values: bytes = b"") -> str:
        self.queue(form, values)
        self.context.sync()
        return "".join(text for _, text in self.texts)

    @property
    def count(self) -> int:
        into = bytearray(4)
        self.context.mem_read(self.result, memoryview(into))
        return int.from_bytes(into, "little", signed=True)


@pytest.fixture
def printer(context: CpuContext) -> Printer:
    return Printer(context)


def test_each_value_lies_at_a_multiple_of_its_size(printer: Printer) -> None:
    values = struct.pack("<ixxxxdiixxxxxxxxq", -5, 1.5, 7, 8, 1 << 40).replace(b"\x08\0\0\0" + bytes(8), b"\x08\0\0\0")
    assert printer.run(b"%d %.2f %d %d %lld!\n", values) == f"-5 1.50 7 8 {1 << 40}!\n"
    assert printer.count == 5
    assert printer.texts[0][0] == "show"


@pytest.mark.parametrize(
    ("form", "values", "text"),
    [
        (b"plain", b"", "plain"),
        (b"100%%", b"", "100%"),
        (b"%5d|%-5d|%05d|%+d", struct.pack("<4i", 1, 2, 3, 4), "    1|2    |00003|+4"),
        (b"%i %u %x %X %o", struct.pack("<5i", -1, -1, -1, 255, 8), "-1 4294967295 ffffffff FF 10"),
        (b"%#x %#o %.3d", struct.pack("<3i", 255, 8, 5), "0xff 010 005"),
        (b"%hd %hu %hhd %hhx", struct.pack("<4i", 0x18000, 0x18000, 0x180, 0x1FF), "-32768 32768 -128 ff"),
        (b"%ld %llu %zu", struct.pack("<qQQ", -(2**63), 2**64 - 1, 9), f"{-(2**63)} {2**64 - 1} 9"),
        (b"%c%c|%3c|%-3c|", struct.pack("<4i", 65, 66, 67, 68), "AB|  C|D  |"),
        (b"%f %e %g %G", struct.pack("<4d", 1.5, 12345.678, 1e-5, 1e20), "1.500000 1.234568e+04 1e-05 1E+20"),
        (b"%a %A", struct.pack("<2d", 1.5, 0.1), "0x1.8p+0 0X1.999999999999AP-4"),
        (b"%f %F %5.1f|", struct.pack("<3d", float("inf"), float("-inf"), 2.25), "inf -INF   2.2|"),
        (b"%p", struct.pack("<Q", 0x1234), "0x1234"),
        (b"%*d|%-*d|%.*f", struct.pack("<5ixxxxd", 4, 1, -4, 2, 1, 2.55), "   1|2   |2.5"),
        (b"%s", struct.pack("<Q", 0), "(null)"),
        (b"%y%d", struct.pack("<i", 6), "%y6"),
        (b"%n%d", struct.pack("<Qi", 5, 6), "6"),
        (b"tail %", b"", "tail "),
        (b"\xff\xc3\xa4", b"", "\ufffdä"),
        (b"%2000000000d", struct.pack("<i", 1), "1".rjust(MAX_PRINT_WIDTH)),
    ],
    ids=lambda v: v.decode("latin-1") if isinstance(v, bytes) else None,
)
def test_formats(printer: Printer, form: bytes, values: bytes, text: str) -> None:
    assert printer.run(form, values) == text


def test_strings_are_copied_when_they_are_printed(printer: Printer) -> None:
    string = printer.context.mem_alloc(16)
    printer.context.mem_write(string, memoryview(b"hello\0 more"))
    printer.queue(b"<%s|%7s|%-7s|%.2s>", struct.pack("<4Q", *[string] * 4))
    printer.context.mem_write(string, memoryview(b"other\0"))
    assert printer.texts == [("show", "<hello|  hello|hello  |he>")]


def test_lines_of_one_kernel_come_together_and_in_order(printer: Printer) -> None:
    printer.queue(b"x", threads=3)
    printer.queue(b"\n")
    assert "".join(text for _, text in printer.texts) == "xxx"
    printer.context.sync()
    assert printer.texts == [("show", "xxx"), ("show", "\n")]


@pytest.mark.parametrize("form", [0, -1, 2**47, 8])
def test_a_format_outside_of_memory_faults(printer: Printer, form: int) -> None:
    printer.launch(form, printer.values)
    with pytest.raises(KernelFault, match=f"illegal address {form % 2**64:#x}") as caught:
        printer.context.sync()
    assert caught.value.address == form % 2**64
    assert printer.run(b"next") == "next"


def test_values_and_strings_outside_of_memory_fault(printer: Printer) -> None:
    printer.context.mem_write(printer.format, memoryview(b"%d\0"))
    printer.launch(printer.format, 64)
    with pytest.raises(KernelFault, match="illegal address"):
        printer.context.sync()
    string = printer.context.mem_alloc(4)
    printer.context.mem_write(string, memoryview(b"abcd"))
    printer.queue(b"%s", struct.pack("<Q", string))
    with pytest.raises(KernelFault, match="illegal address") as caught:
        printer.context.sync()
    assert caught.value.address == string + 4
    assert printer.texts == []


def test_long_texts_are_cut(printer: Printer) -> None:
    string = printer.context.mem_alloc(MAX_PRINT_TEXT + 100)
    printer.context.mem_write(string, memoryview(b"a" * (MAX_PRINT_TEXT + 100)))
    assert printer.run(b"%s", struct.pack("<Q", string)) == "a" * MAX_PRINT_TEXT
    printer.texts.clear()
    printer.context.mem_write(printer.format, memoryview(b"b" * 8192))
    printer.launch(printer.format, 0)
    printer.context.sync()
    assert printer.texts == [("show", "b" * MAX_PRINT_TEXT)]


def test_what_does_not_fit_is_dropped_and_counted(printer: Printer) -> None:
    printer.queue(b"x" * 4000, threads=300)
    printer.context.sync()
    text = printer.texts[0][1]
    kept = MAX_PRINT_BYTES // 4016
    assert text.startswith("x" * 4000 * kept + "...")
    assert f"{300 - kept} calls of printf did not fit" in text
    printer.texts.clear()
    assert printer.run(b"again") == "again"


def test_wide_fields_do_not_grow_the_text_without_bound(printer: Printer) -> None:
    printer.queue(b"%999d" * 10, bytes(40), threads=1000)
    printer.context.sync()
    assert len(printer.texts[0][1]) < MAX_PRINT_BYTES + 20_000


def test_output_goes_to_standard_output(context: CpuContext, capfd: pytest.CaptureFixture[str]) -> None:
    sink = context.printed
    printer = Printer(context)
    context.printed = sink
    printer.queue(b"one\ntwo")
    context.sync()
    assert capfd.readouterr() == ("one\ntwo", "")


def test_a_failed_assertion_says_what_and_where(printer: Printer) -> None:
    texts = [printer.context.mem_alloc(n) for n in (8, 8, 4)]
    for address, text in zip(texts, (b"x < 3\0", b"a.cu\0", b"main"), strict=True):
        printer.context.mem_write(address, memoryview(text))
    kernel = printer.kernels["check"]
    printer.context.launch(kernel, (1, 1, 1), (8, 1, 1), 0, struct.pack("<3Q", *texts), 1)
    with pytest.raises(KernelFault, match=r"assertion failed: a.cu:77: main: x < 3, by thread \(3,0,0\)"):
        printer.context.sync()
    printer.context.launch(kernel, (1, 1, 1), (8, 1, 1), 0, struct.pack("<3Q", 0, 2**63, 2**64 - 1), 1)
    with pytest.raises(KernelFault, match="assertion failed: :77: : ,"):
        printer.context.sync()


def test_other_declarations_of_printf_are_refused(context: CpuContext) -> None:
    for declared in (".func vprintf(.param .b64 f)", ".func vprintf(.param .b64 f, .param .b64 v)"):
        arguments = "a" if "v)" not in declared else "a, a"
        text = f""".version 8.0\n.target sm_75\n.extern {declared};
        .entry k() {{ .param .b64 a; call vprintf, ({arguments}); }}"""
        with pytest.raises(ImageRejected, match="vprintf is declared with"):
            context.module_load(text.encode())


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.sampled_from([b"%", b"l", b"*", b".", b"-", b"0", b"9", b"s", b"d", b"f", b"c", b"h", b"p", b"x", b"y"])
    ),
    st.binary(min_size=64, max_size=64),
)
def test_any_format_prints_or_faults(printer: Printer, form: list[bytes], values: bytes) -> None:
    printer.queue(b"".join(form), values)
    printer.context._stream.wait()
    error = printer.context.fault()
    assert error is None or "address" in str(error)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=100))
def test_any_record_renders(record: bytes) -> None:
    render(record + bytes(200))
