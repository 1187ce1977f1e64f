"""`malloc` and `free` in kernels (CUDA C++ Programming Guide, "Dynamic Global Memory Allocation").

A module with a function that calls `malloc` gets an additional variable, the heap. Its size counts against the slice,
and it exists as long as the module. The heap's first word is a lock. The blocks follow. Each has a header with the
block's size in bytes, including the header, plus 1 while the block is in use. An allocation joins each free block with
the free blocks after it, and takes the first block that is large enough.

A kernel can overwrite the lock and the headers, like all of the module's memory. So a header is used only if its block
ends within the heap, and a search advances by at least 16 bytes in each step. If a kernel leaves the lock set, only the
kernels of this module wait.
"""

from typing import TYPE_CHECKING

from gpulease.daemon.ptx.limits import HEAP_BYTES
from gpulease.daemon.ptx.parse.syntax import CallSite, DeclaredVariable, Image, Space
from gpulease.daemon.ptx.translate.ir import Value

if TYPE_CHECKING:
    from gpulease.daemon.ptx.translate.thread import ThreadTranslator

HEAP = DeclaredVariable("heap of malloc", Space.GLOBAL, HEAP_BYTES, 256)
"""The heap's variable. No image can name it, because names contain no spaces."""

# The offset of the first block, the size of a header, and the size of the smallest block: a header and 16 bytes.
_BLOCKS_AT = 16
_HEADER_BYTES = 16
_LEAST_BYTES = 32

HEAP_IR = f"""
define internal void @heap_lock(i64 %heap) {{
entry:
  %lock = inttoptr i64 %heap to ptr
  br label %try
try:
  %held = atomicrmw xchg ptr %lock, i32 1 acquire
  %is.held = icmp ne i32 %held, 0
  br i1 %is.held, label %try, label %has
has:
  ret void
}}

define internal void @heap_unlock(i64 %heap) {{
  %lock = inttoptr i64 %heap to ptr
  store atomic i32 0, ptr %lock release, align 4
  ret void
}}

; The size and state at an offset; 0 for a header that makes no sense.
define internal i64 @heap_header(i64 %heap, i64 %at) {{
  %address = add i64 %heap, %at
  %place = inttoptr i64 %address to ptr
  %found = load i64, ptr %place
  %is.first = icmp eq i64 %at, {_BLOCKS_AT}
  %is.new = icmp eq i64 %found, 0
  %is.whole = and i1 %is.first, %is.new
  %header = select i1 %is.whole, i64 {HEAP_BYTES - _BLOCKS_AT}, i64 %found
  %size = and i64 %header, -16
  %left = sub i64 {HEAP_BYTES}, %at
  %is.within = icmp ule i64 %size, %left
  %is.some = icmp uge i64 %size, {_HEADER_BYTES}
  %is.sane = and i1 %is.within, %is.some
  %said = select i1 %is.sane, i64 %header, i64 0
  ret i64 %said
}}

define internal void @heap_mark(i64 %heap, i64 %at, i64 %header) {{
  %address = add i64 %heap, %at
  %place = inttoptr i64 %address to ptr
  store i64 %header, ptr %place
  ret void
}}

define internal i64 @heap_malloc(i64 %heap, i64 %bytes) noinline {{
entry:
  %is.huge = icmp ugt i64 %bytes, {HEAP_BYTES}
  br i1 %is.huge, label %none, label %begin
begin:
  %with.header = add i64 %bytes, {_HEADER_BYTES + 15}
  %rounded = and i64 %with.header, -16
  %is.small = icmp ult i64 %rounded, {_LEAST_BYTES}
  %need = select i1 %is.small, i64 {_LEAST_BYTES}, i64 %rounded
  call void @heap_lock(i64 %heap)
  br label %look
look:
  %at = phi i64 [ {_BLOCKS_AT}, %begin ], [ %used.next, %skip ], [ %free.next, %short ]
  %is.end = icmp uge i64 %at, {HEAP_BYTES}
  br i1 %is.end, label %fail, label %read
read:
  %header = call i64 @heap_header(i64 %heap, i64 %at)
  %is.bad = icmp eq i64 %header, 0
  br i1 %is.bad, label %fail, label %sort
sort:
  %size = and i64 %header, -16
  %state = and i64 %header, 1
  %is.used = icmp ne i64 %state, 0
  br i1 %is.used, label %skip, label %join
skip:
  %used.next = add i64 %at, %size
  br label %look
join:
  %total = phi i64 [ %size, %sort ], [ %joined, %joins ]
  %behind = add i64 %at, %total
  %is.last = icmp uge i64 %behind, {HEAP_BYTES}
  br i1 %is.last, label %sized, label %neighbour
neighbour:
  %other = call i64 @heap_header(i64 %heap, i64 %behind)
  %other.state = and i64 %other, 1
  %other.size = and i64 %other, -16
  %other.used = icmp ne i64 %other.state, 0
  %other.bad = icmp eq i64 %other, 0
  %stays = or i1 %other.used, %other.bad
  br i1 %stays, label %sized, label %joins
joins:
  %joined = add i64 %total, %other.size
  br label %join
sized:
  %fits = icmp uge i64 %total, %need
  br i1 %fits, label %take, label %short
short:
  call void @heap_mark(i64 %heap, i64 %at, i64 %total)
  %free.next = add i64 %at, %total
  br label %look
take:
  %rest = sub i64 %total, %need
  %splits = icmp uge i64 %rest, {_LEAST_BYTES}
  br i1 %splits, label %split, label %taken
split:
  %rest.at = add i64 %at, %need
  call void @heap_mark(i64 %heap, i64 %rest.at, i64 %rest)
  br label %taken
taken:
  %final = phi i64 [ %total, %take ], [ %need, %split ]
  %marked = or i64 %final, 1
  call void @heap_mark(i64 %heap, i64 %at, i64 %marked)
  call void @heap_unlock(i64 %heap)
  %block = add i64 %heap, %at
  %result = add i64 %block, {_HEADER_BYTES}
  ret i64 %result
fail:
  call void @heap_unlock(i64 %heap)
  ret i64 0
none:
  ret i64 0
}}

define internal i1 @heap_free(i64 %heap, i64 %address) noinline {{
entry:
  %is.null = icmp eq i64 %address, 0
  br i1 %is.null, label %nothing, label %look
look:
  %from = sub i64 %address, %heap
  %at = sub i64 %from, {_HEADER_BYTES}
  %is.late = icmp uge i64 %at, {HEAP_BYTES}
  %is.early = icmp ult i64 %at, {_BLOCKS_AT}
  %odd = and i64 %at, 15
  %is.odd = icmp ne i64 %odd, 0
  %is.out = or i1 %is.late, %is.early
  %is.none = or i1 %is.out, %is.odd
  br i1 %is.none, label %wrong, label %read
read:
  call void @heap_lock(i64 %heap)
  %header = call i64 @heap_header(i64 %heap, i64 %at)
  %low = and i64 %header, 15
  %is.used = icmp eq i64 %low, 1
  br i1 %is.used, label %give, label %refuse
give:
  %size = and i64 %header, -16
  call void @heap_mark(i64 %heap, i64 %at, i64 %size)
  call void @heap_unlock(i64 %heap)
  ret i1 true
refuse:
  call void @heap_unlock(i64 %heap)
  ret i1 false
nothing:
  ret i1 true
wrong:
  ret i1 false
}}
"""


def with_heap(image: Image) -> tuple[DeclaredVariable, ...]:
    """Return an image's variables, and also the heap if the image calls `malloc` and does not define it."""
    functions = (*image.functions, *image.subroutines)
    if any(function.name == "malloc" for function in functions):
        return image.variables
    sites = (i.operands[-1] for f in functions for i in f.instructions if i.opcode == "call" and i.operands)
    calls = any(isinstance(site, CallSite) and site.name == "malloc" for site in sites)
    return (*image.variables, HEAP) if calls else image.variables


def take(t: "ThreadTranslator", size: Value) -> Value:
    """Allocate `size` bytes, an i64. Returns the address; 0 if no block is large enough."""
    t.callees.allocates = True
    return t.ir.value("i64", f"call i64 @heap_malloc({t.address_of(HEAP, 0)}, {size})")


def give_back(t: "ThreadTranslator", address: Value) -> Value:
    """Free a block. Returns whether the address is 0 or that of a block in use."""
    # Without a heap, there are no blocks.
    if not t.has_variable(HEAP):
        return t.ir.compare("icmp eq", address, 0)
    t.callees.allocates = True
    return t.ir.value("i1", f"call i1 @heap_free({t.address_of(HEAP, 0)}, {address})")
