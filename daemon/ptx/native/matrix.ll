; Products of matrices that a warp's lanes hold in parts: what one lane gets. translate/fragments.py says who holds what.
;
; `a.all` and `b.all` are where lane 0 has the words of its parts of A and of B; each further lane has them `stride` bytes
; on, each further word lies `word` bytes on. `c.first` is where the lane itself has its part of C. `rows` and `columns`
; count eights of rows of A and of columns of B, `chunks` how many words (of f64: numbers) of A's row a lane has. The
; lane's part of the result is stored to `into`, laid out as that of C.
;
; Floats are added as an H100's tensor cores do (M. Fasi et al., "Numerical behavior of NVIDIA tensor cores", 2021, and
; P. Xie et al., "MMA-Sim", 2025): products are exact, all terms are cut, towards zero, to 25 binary places after the
; greatest exponent, and their exact sum is cut to f32 or rounded to f16. A term's exponent is the sum of its factors',
; and -126 for one that is 0; zeros lose their sign. Floats of 8 bits become f16 first.

declare i32 @llvm.smax.i32(i32, i32)
declare double @llvm.fabs.f64(double)
declare double @llvm.fma.f64(double, double, double)

; An element of a word as an f32's bits. Kinds: 0 f16, 1 bf16, 2 tf32, 3 e4m3, 4 e5m2.
define internal i32 @element(i32 %word, i32 %shift, i32 %kind) alwaysinline {
entry:
  %part = lshr i32 %word, %shift
  switch i32 %kind, label %f16 [ i32 1, label %bf16
                                 i32 2, label %tf32
                                 i32 3, label %e4m3
                                 i32 4, label %e5m2 ]
bf16:
  %raised = shl i32 %part, 16
  ret i32 %raised
tf32:
  %short = and i32 %part, -8192
  ret i32 %short
e4m3:
  %fourth = and i32 %part, 127
  %fourth.placed = shl i32 %fourth, 20
  %fourth.float = bitcast i32 %fourth.placed to float
  %fourth.scaled = fmul float %fourth.float, 0x4770000000000000
  %fourth.number = bitcast float %fourth.scaled to i32
  %fourth.is.nan = icmp eq i32 %fourth, 127
  %fourth.bits = select i1 %fourth.is.nan, i32 2147483647, i32 %fourth.number
  %fourth.top = shl i32 %part, 24
  %fourth.sign = and i32 %fourth.top, -2147483648
  %fourth.signed = or i32 %fourth.bits, %fourth.sign
  ret i32 %fourth.signed
e5m2:
  %fifth = shl i32 %part, 8
  br label %f16
f16:
  %half = phi i32 [ %part, %entry ], [ %fifth, %e5m2 ]
  %magnitude = and i32 %half, 32767
  %placed = shl i32 %magnitude, 13
  %float = bitcast i32 %placed to float
  %scaled = fmul float %float, 0x46F0000000000000
  %number = bitcast float %scaled to i32
  %special = or i32 %placed, 2139095040
  %is.special = icmp uge i32 %magnitude, 31744
  %bits = select i1 %is.special, i32 %special, i32 %number
  %top = shl i32 %half, 16
  %sign = and i32 %top, -2147483648
  %signed = or i32 %bits, %sign
  ret i32 %signed
}

; A number's exponent, or if it is subnormal the least its kind has.
define internal i32 @exponent_of(i32 %bits, i32 %least) alwaysinline {
  %moved = lshr i32 %bits, 23
  %field = and i32 %moved, 255
  %exponent = sub i32 %field, 127
  %result = call i32 @llvm.smax.i32(i32 %exponent, i32 %least)
  ret i32 %result
}

define internal i32 @least_exponent(i32 %kind) alwaysinline {
  %is.half = icmp eq i32 %kind, 0
  %is.byte = icmp ugt i32 %kind, 2
  %is.short = or i1 %is.half, %is.byte
  %least = select i1 %is.short, i32 -14, i32 -126
  ret i32 %least
}

; How many elements of a kind a word has.
define internal i32 @elements_in(i32 %kind) alwaysinline {
  %is.tf32 = icmp eq i32 %kind, 2
  %is.byte = icmp ugt i32 %kind, 2
  %halves = select i1 %is.tf32, i32 1, i32 2
  %count = select i1 %is.byte, i32 4, i32 %halves
  ret i32 %count
}

; A row of A or a column of B, out of the words of four lanes: its numbers and their exponents. Of bytes the lower two
; of all words come first, then the upper two.
define internal void @unpack(ptr %first, i64 %stride, i64 %step, i32 %chunks, i32 %kind, ptr %values, ptr %exponents) {
entry:
  %count = call i32 @elements_in(i32 %kind)
  %width = udiv i32 32, %count
  %is.byte = icmp ugt i32 %kind, 2
  %end = select i1 %is.byte, i32 16, i32 32
  call void @unpack_part(ptr %first, i64 %stride, i64 %step, i32 %chunks, i32 %kind, ptr %values, ptr %exponents,
      i32 %width, i32 0, i32 %end)
  br i1 %is.byte, label %upper, label %done
upper:
  %lower = shl i32 %chunks, 3
  %lower.wide = zext i32 %lower to i64
  %upper.values = getelementptr double, ptr %values, i64 %lower.wide
  %upper.exponents = getelementptr i32, ptr %exponents, i64 %lower.wide
  call void @unpack_part(ptr %first, i64 %stride, i64 %step, i32 %chunks, i32 %kind, ptr %upper.values,
      ptr %upper.exponents, i32 8, i32 16, i32 32)
  br label %done
done:
  ret void
}

; The elements of some bits of each word.
define internal void @unpack_part(ptr %first, i64 %stride, i64 %step, i32 %chunks, i32 %kind, ptr %values,
    ptr %exponents, i32 %width, i32 %begin, i32 %end) {
entry:
  %least = call i32 @least_exponent(i32 %kind)
  br label %chunk
chunk:
  %number = phi i32 [ 0, %entry ], [ %number.next, %chunk.done ]
  %place = phi i64 [ 0, %entry ], [ %place.chunk, %chunk.done ]
  %start = phi ptr [ %first, %entry ], [ %start.next, %chunk.done ]
  br label %lane
lane:
  %lane.number = phi i32 [ 0, %chunk ], [ %lane.next, %lane.done ]
  %place.lane = phi i64 [ %place, %chunk ], [ %place.next, %lane.done ]
  %at = phi ptr [ %start, %chunk ], [ %at.next, %lane.done ]
  %word = load i32, ptr %at
  br label %each
each:
  %shift = phi i32 [ %begin, %lane ], [ %shift.next, %each ]
  %into = phi i64 [ %place.lane, %lane ], [ %place.next, %each ]
  %bits = call i32 @element(i32 %word, i32 %shift, i32 %kind)
  %float = bitcast i32 %bits to float
  %value = fpext float %float to double
  %exponent = call i32 @exponent_of(i32 %bits, i32 %least)
  %value.at = getelementptr double, ptr %values, i64 %into
  store double %value, ptr %value.at
  %exponent.at = getelementptr i32, ptr %exponents, i64 %into
  store i32 %exponent, ptr %exponent.at
  %place.next = add i64 %into, 1
  %shift.next = add i32 %shift, %width
  %more = icmp ult i32 %shift.next, %end
  br i1 %more, label %each, label %lane.done
lane.done:
  %lane.next = add i32 %lane.number, 1
  %at.next = getelementptr i8, ptr %at, i64 %stride
  %more.lanes = icmp ult i32 %lane.next, 4
  br i1 %more.lanes, label %lane, label %chunk.done
chunk.done:
  %place.chunk = phi i64 [ %place.next, %lane.done ]
  %number.next = add i32 %number, 1
  %start.next = getelementptr i8, ptr %start, i64 %step
  %more.chunks = icmp ult i32 %number.next, %chunks
  br i1 %more.chunks, label %chunk, label %done
done:
  ret void
}

; 2 to a power.
define internal double @power(i32 %exponent) alwaysinline {
  %biased = add i32 %exponent, 1023
  %wide = zext i32 %biased to i64
  %placed = shl i64 %wide, 52
  %result = bitcast i64 %placed to double
  ret double %result
}

; A row times a column, and what is added to it.
define internal double @dot(ptr %a, ptr %a.exponents, ptr %b, ptr %b.exponents, i64 %count, double %c, i32 %c.exponent) {
entry:
  %c.is.zero = fcmp oeq double %c, 0.0
  %c.top = select i1 %c.is.zero, i32 -126, i32 %c.exponent
  br label %survey
survey:
  %n = phi i64 [ 0, %entry ], [ %n.next, %survey ]
  %top = phi i32 [ %c.top, %entry ], [ %top.next, %survey ]
  %plain = phi double [ %c, %entry ], [ %plain.next, %survey ]
  %a.at = getelementptr double, ptr %a, i64 %n
  %b.at = getelementptr double, ptr %b, i64 %n
  %ae.at = getelementptr i32, ptr %a.exponents, i64 %n
  %be.at = getelementptr i32, ptr %b.exponents, i64 %n
  %left = load double, ptr %a.at
  %right = load double, ptr %b.at
  %ae = load i32, ptr %ae.at
  %be = load i32, ptr %be.at
  %product = fmul double %left, %right
  %plain.next = fadd reassoc double %plain, %product
  %exponent.sum = add i32 %ae, %be
  %is.zero = fcmp oeq double %product, 0.0
  %exponent = select i1 %is.zero, i32 -126, i32 %exponent.sum
  %top.next = call i32 @llvm.smax.i32(i32 %top, i32 %exponent)
  %n.next = add i64 %n, 1
  %more = icmp ult i64 %n.next, %count
  br i1 %more, label %survey, label %aligned
aligned:
  %places = sub i32 25, %top.next
  %scale = call double @power(i32 %places)
  %c.scaled = fmul double %c, %scale
  %c.cut = fptosi double %c.scaled to i64
  br label %sum
sum:
  %m = phi i64 [ 0, %aligned ], [ %m.next, %sum ]
  %total = phi i64 [ %c.cut, %aligned ], [ %total.next, %sum ]
  %a.place = getelementptr double, ptr %a, i64 %m
  %b.place = getelementptr double, ptr %b, i64 %m
  %l = load double, ptr %a.place
  %r = load double, ptr %b.place
  %p = fmul double %l, %r
  %p.scaled = fmul double %p, %scale
  %p.cut = fptosi double %p.scaled to i32
  %p.wide = sext i32 %p.cut to i64
  %total.next = add i64 %total, %p.wide
  %m.next = add i64 %m, 1
  %more.terms = icmp ult i64 %m.next, %count
  br i1 %more.terms, label %sum, label %summed
summed:
  %back = sub i32 %top.next, 25
  %unit = call double @power(i32 %back)
  %whole = sitofp i64 %total.next to double
  %exact = fmul double %whole, %unit
  %size = call double @llvm.fabs.f64(double %plain.next)
  %is.finite = fcmp olt double %size, 0x7FF0000000000000
  %result = select i1 %is.finite, double %exact, double %plain.next
  ret double %result
}

; To f32, towards zero but for infinity from 2^128 on.
define internal i32 @cut_to_f32(double %value) {
  %nearest = fptrunc double %value to float
  %bits = bitcast float %nearest to i32
  %back = fpext float %nearest to double
  %size = call double @llvm.fabs.f64(double %value)
  %back.size = call double @llvm.fabs.f64(double %back)
  %is.above = fcmp ogt double %back.size, %size
  %is.finite = fcmp olt double %size, 0x47F0000000000000
  %steps = and i1 %is.above, %is.finite
  %below = sub i32 %bits, 1
  %cut = select i1 %steps, i32 %below, i32 %bits
  %magnitude = and i32 %cut, 2147483647
  %is.zero = icmp eq i32 %magnitude, 0
  %number = select i1 %is.zero, i32 0, i32 %cut
  %is.nan = fcmp uno double %value, %value
  %result = select i1 %is.nan, i32 2147483647, i32 %number
  ret i32 %result
}

; To f16, to nearest even.
define internal i16 @round_to_f16(double %value) {
  %bits = bitcast double %value to i64
  %size = call double @llvm.fabs.f64(double %value)
  %size.bits = bitcast double %size to i64
  %field = lshr i64 %size.bits, 52
  %is.low = icmp ult i64 %field, 1009
  %raised = select i1 %is.low, i64 1009, i64 %field
  %is.high = icmp ugt i64 %raised, 1040
  %exponent = select i1 %is.high, i64 1040, i64 %raised
  %rounder.field = add i64 %exponent, 42
  %rounder.bits = shl i64 %rounder.field, 52
  %rounder = bitcast i64 %rounder.bits to double
  %added = fadd double %size, %rounder
  %nearest = fsub double %added, %rounder
  %nearest.bits = bitcast double %nearest to i64
  %rebiased = sub i64 %nearest.bits, 4539628424389459968
  %normal = lshr i64 %rebiased, 42
  %counted = fadd double %nearest, 0x41B0000000000000
  %counted.bits = bitcast double %counted to i64
  %subnormal = and i64 %counted.bits, 2047
  %is.small = fcmp olt double %nearest, 0x3F10000000000000
  %finite = select i1 %is.small, i64 %subnormal, i64 %normal
  %is.past = fcmp ogt double %nearest, 6.550400e+04
  %magnitude = select i1 %is.past, i64 31744, i64 %finite
  %sign.moved = lshr i64 %bits, 48
  %sign = and i64 %sign.moved, 32768
  %signed = or i64 %magnitude, %sign
  %is.zero = icmp eq i64 %magnitude, 0
  %number = select i1 %is.zero, i64 0, i64 %signed
  %is.nan = fcmp uno double %value, %value
  %chosen = select i1 %is.nan, i64 32767, i64 %number
  %result = trunc i64 %chosen to i16
  ret i16 %result
}

; The same of bytes: an H100 takes two steps of half the terms, the first from 0, and adds C to what has been cut to f32.
define internal double @dot_bytes(ptr %a, ptr %a.exponents, ptr %b, ptr %b.exponents, i64 %count, double %c) {
  %half = lshr i64 %count, 1
  %lower = call double @dot(ptr %a, ptr %a.exponents, ptr %b, ptr %b.exponents, i64 %half, double 0.0, i32 -126)
  %lower.bits = call i32 @cut_to_f32(double %lower)
  %lower.float = bitcast i32 %lower.bits to float
  %lower.cut = fpext float %lower.float to double
  %lower.exponent = call i32 @exponent_of(i32 %lower.bits, i32 -126)
  %a.upper = getelementptr double, ptr %a, i64 %half
  %b.upper = getelementptr double, ptr %b, i64 %half
  %ae.upper = getelementptr i32, ptr %a.exponents, i64 %half
  %be.upper = getelementptr i32, ptr %b.exponents, i64 %half
  %both = call double @dot(ptr %a.upper, ptr %ae.upper, ptr %b.upper, ptr %be.upper, i64 %half, double %lower.cut,
      i32 %lower.exponent)
  %both.bits = call i32 @cut_to_f32(double %both)
  %both.float = bitcast i32 %both.bits to float
  %c.float = fptrunc double %c to float
  %sum = fadd float %both.float, %c.float
  %result = fpext float %sum to double
  ret double %result
}

; `c.is.half` and `d.is.half`: C or the result is f16, not f32.
define void @gpulease_multiply_floats(ptr %a.all, ptr %b.all, i64 %stride, i64 %word, i32 %lane, ptr %c.first, ptr %into,
    i32 %rows, i32 %columns,
    i32 %chunks, i32 %a.kind, i32 %b.kind, i1 %c.is.half, i1 %d.is.half) {
entry:
  %a.values = alloca [64 x double], align 64
  %a.exponents = alloca [64 x i32], align 64
  %b.values = alloca [32 x double], align 64
  %b.exponents = alloca [32 x i32], align 64
  %is.byte = icmp ugt i32 %a.kind, 2
  %elements = call i32 @elements_in(i32 %a.kind)
  %words = shl i32 %chunks, 2
  %count = mul i32 %words, %elements
  %length = zext i32 %count to i64
  %group = and i32 %lane, 28
  %group.wide = zext i32 %group to i64
  %group.distance = mul i64 %group.wide, %stride
  %a.first = getelementptr i8, ptr %a.all, i64 %group.distance
  %a.step.words = zext i32 %rows to i64
  %a.step = mul i64 %a.step.words, %word
  br label %row
row:
  %x = phi i64 [ 0, %entry ], [ %x.next, %row ]
  %row.distance = mul i64 %x, %word
  %row.at = getelementptr i8, ptr %a.first, i64 %row.distance
  %row.start = mul i64 %x, %length
  %row.values = getelementptr double, ptr %a.values, i64 %row.start
  %row.exponents = getelementptr i32, ptr %a.exponents, i64 %row.start
  call void @unpack(ptr %row.at, i64 %stride, i64 %a.step, i32 %chunks, i32 %a.kind, ptr %row.values,
      ptr %row.exponents)
  %x.next = add i64 %x, 1
  %more.rows = icmp ult i64 %x.next, %a.step.words
  br i1 %more.rows, label %row, label %prepared
prepared:
  %pair = and i32 %lane, 3
  %even.lane = shl i32 %pair, 3
  %all.columns = shl i32 %columns, 1
  br label %column
column:
  %y = phi i32 [ 0, %prepared ], [ %y.next, %column.done ]
  %odd = and i32 %y, 1
  %tile = lshr i32 %y, 1
  %odd.lane = shl i32 %odd, 2
  %b.lane = or i32 %even.lane, %odd.lane
  %b.lane.wide = zext i32 %b.lane to i64
  %b.distance = mul i64 %b.lane.wide, %stride
  %b.start = getelementptr i8, ptr %b.all, i64 %b.distance
  %b.word = mul i32 %tile, %chunks
  %b.word.index = zext i32 %b.word to i64
  %b.word.distance = mul i64 %b.word.index, %word
  %b.at = getelementptr i8, ptr %b.start, i64 %b.word.distance
  call void @unpack(ptr %b.at, i64 %stride, i64 %word, i32 %chunks, i32 %b.kind, ptr %b.values, ptr %b.exponents)
  %tile.element = mul i32 %tile, %rows
  br label %output
output:
  %z = phi i32 [ 0, %column ], [ %z.next, %stored ]
  %number.pair = add i32 %tile.element, %z
  %number.even = shl i32 %number.pair, 1
  %number = or i32 %number.even, %odd
  %number.wide = zext i32 %number to i64
  %number.distance = mul i64 %number.wide, %word
  %half.pair = zext i32 %number.pair to i64
  %half.pair.distance = mul i64 %half.pair, %word
  %half.part = shl i32 %odd, 1
  %half.part.wide = zext i32 %half.part to i64
  %half.distance = add i64 %half.pair.distance, %half.part.wide
  br i1 %c.is.half, label %c.half, label %c.float
c.half:
  %half.at = getelementptr i8, ptr %c.first, i64 %half.distance
  %half = load i16, ptr %half.at
  %half.wide = zext i16 %half to i32
  %half.bits = call i32 @element(i32 %half.wide, i32 0, i32 0)
  br label %c.loaded
c.float:
  %float.at = getelementptr i8, ptr %c.first, i64 %number.distance
  %float.bits = load i32, ptr %float.at
  br label %c.loaded
c.loaded:
  %c.bits = phi i32 [ %half.bits, %c.half ], [ %float.bits, %c.float ]
  %c.least = phi i32 [ -14, %c.half ], [ -126, %c.float ]
  %c.number = bitcast i32 %c.bits to float
  %c = fpext float %c.number to double
  %c.exponent = call i32 @exponent_of(i32 %c.bits, i32 %c.least)
  %z.wide = zext i32 %z to i64
  %used.start = mul i64 %z.wide, %length
  %used.values = getelementptr double, ptr %a.values, i64 %used.start
  %used.exponents = getelementptr i32, ptr %a.exponents, i64 %used.start
  br i1 %is.byte, label %of.bytes, label %of.words
of.bytes:
  %bytes.value = call double @dot_bytes(ptr %used.values, ptr %used.exponents, ptr %b.values, ptr %b.exponents,
      i64 %length, double %c)
  br label %added
of.words:
  %words.value = call double @dot(ptr %used.values, ptr %used.exponents, ptr %b.values, ptr %b.exponents, i64 %length,
      double %c, i32 %c.exponent)
  br label %added
added:
  %value = phi double [ %bytes.value, %of.bytes ], [ %words.value, %of.words ]
  br i1 %d.is.half, label %d.half, label %d.float
d.half:
  %d.half.bits = call i16 @round_to_f16(double %value)
  %d.half.at = getelementptr i8, ptr %into, i64 %half.distance
  store i16 %d.half.bits, ptr %d.half.at
  br label %stored
d.float:
  %d.float.bits = call i32 @cut_to_f32(double %value)
  %d.float.at = getelementptr i8, ptr %into, i64 %number.distance
  store i32 %d.float.bits, ptr %d.float.at
  br label %stored
stored:
  %z.next = add i32 %z, 1
  %more.outputs = icmp ult i32 %z.next, %rows
  br i1 %more.outputs, label %output, label %column.done
column.done:
  %y.next = add i32 %y, 1
  %more.columns = icmp ult i32 %y.next, %all.columns
  br i1 %more.columns, label %column, label %done
done:
  ret void
}

; The products of two words' bytes, added up.
define internal i32 @bytes(i32 %a, i32 %b, i1 %a.is.signed, i1 %b.is.signed) alwaysinline {
  %a.parts = bitcast i32 %a to <4 x i8>
  %b.parts = bitcast i32 %b to <4 x i8>
  %a.signed = sext <4 x i8> %a.parts to <4 x i32>
  %a.unsigned = zext <4 x i8> %a.parts to <4 x i32>
  %b.signed = sext <4 x i8> %b.parts to <4 x i32>
  %b.unsigned = zext <4 x i8> %b.parts to <4 x i32>
  %a.wide = select i1 %a.is.signed, <4 x i32> %a.signed, <4 x i32> %a.unsigned
  %b.wide = select i1 %b.is.signed, <4 x i32> %b.signed, <4 x i32> %b.unsigned
  %products = mul <4 x i32> %a.wide, %b.wide
  %sum = call i32 @llvm.vector.reduce.add.v4i32(<4 x i32> %products)
  ret i32 %sum
}
declare i32 @llvm.vector.reduce.add.v4i32(<4 x i32>)
declare i64 @llvm.smin.i64(i64, i64)
declare i64 @llvm.smax.i64(i64, i64)

; Bytes to s32: sums wrap, or stop at the ends.
define void @gpulease_multiply_bytes(ptr %a.all, ptr %b.all, i64 %stride, i64 %word, i32 %lane, ptr %c.first, ptr %into,
    i32 %rows, i32 %columns,
    i32 %chunks, i1 %a.is.signed, i1 %b.is.signed, i1 %saturates) {
entry:
  %group = and i32 %lane, 28
  %group.wide = zext i32 %group to i64
  %group.distance = mul i64 %group.wide, %stride
  %a.first = getelementptr i8, ptr %a.all, i64 %group.distance
  %pair = and i32 %lane, 3
  %even.lane = shl i32 %pair, 3
  %pairs = mul i32 %rows, %columns
  %count = shl i32 %pairs, 1
  br label %output
output:
  %number = phi i32 [ 0, %entry ], [ %number.next, %stored ]
  %odd = and i32 %number, 1
  %both = lshr i32 %number, 1
  %x = urem i32 %both, %rows
  %tile = udiv i32 %both, %rows
  %odd.lane = shl i32 %odd, 2
  %b.lane = or i32 %even.lane, %odd.lane
  %b.lane.wide = zext i32 %b.lane to i64
  %b.distance = mul i64 %b.lane.wide, %stride
  %b.start = getelementptr i8, ptr %b.all, i64 %b.distance
  %b.word = mul i32 %tile, %chunks
  %number.wide = zext i32 %number to i64
  %number.distance = mul i64 %number.wide, %word
  %c.at = getelementptr i8, ptr %c.first, i64 %number.distance
  %c = load i32, ptr %c.at
  %c.wide = sext i32 %c to i64
  br label %chunk
chunk:
  %k = phi i32 [ 0, %output ], [ %k.next, %chunk.done ]
  %sum = phi i64 [ %c.wide, %output ], [ %sum.next, %chunk.done ]
  %a.column = mul i32 %k, %rows
  %a.index = add i32 %a.column, %x
  %b.index = add i32 %b.word, %k
  %a.index.wide = zext i32 %a.index to i64
  %b.index.wide = zext i32 %b.index to i64
  %a.distance = mul i64 %a.index.wide, %word
  %b.index.distance = mul i64 %b.index.wide, %word
  %a.place = getelementptr i8, ptr %a.first, i64 %a.distance
  %b.place = getelementptr i8, ptr %b.start, i64 %b.index.distance
  br label %four
four:
  %n = phi i32 [ 0, %chunk ], [ %n.next, %four ]
  %sofar = phi i64 [ %sum, %chunk ], [ %sum.next, %four ]
  %a.at = phi ptr [ %a.place, %chunk ], [ %a.next, %four ]
  %b.at = phi ptr [ %b.place, %chunk ], [ %b.next, %four ]
  %a = load i32, ptr %a.at
  %b = load i32, ptr %b.at
  %product = call i32 @bytes(i32 %a, i32 %b, i1 %a.is.signed, i1 %b.is.signed)
  %product.wide = sext i32 %product to i64
  %sum.next = add i64 %sofar, %product.wide
  %a.next = getelementptr i8, ptr %a.at, i64 %stride
  %b.next = getelementptr i8, ptr %b.at, i64 %stride
  %n.next = add i32 %n, 1
  %more = icmp ult i32 %n.next, 4
  br i1 %more, label %four, label %chunk.done
chunk.done:
  %k.next = add i32 %k, 1
  %more.chunks = icmp ult i32 %k.next, %chunks
  br i1 %more.chunks, label %chunk, label %stored
stored:
  %floor = call i64 @llvm.smax.i64(i64 %sum.next, i64 -2147483648)
  %held = call i64 @llvm.smin.i64(i64 %floor, i64 2147483647)
  %total = select i1 %saturates, i64 %held, i64 %sum.next
  %result = trunc i64 %total to i32
  %into.at = getelementptr i8, ptr %into, i64 %number.distance
  store i32 %result, ptr %into.at
  %number.next = add i32 %number, 1
  %more.outputs = icmp ult i32 %number.next, %count
  br i1 %more.outputs, label %output, label %done
done:
  ret void
}

; f64: fused multiplications and additions in the order of the row.
define void @gpulease_multiply_doubles(ptr %a.all, ptr %b.all, i64 %stride, i64 %word, i32 %lane, ptr %c.first, ptr %into,
    i32 %rows, i32 %columns,
    i32 %chunks) {
entry:
  %group = and i32 %lane, 28
  %group.wide = zext i32 %group to i64
  %group.distance = mul i64 %group.wide, %stride
  %a.first = getelementptr i8, ptr %a.all, i64 %group.distance
  %pair = and i32 %lane, 3
  %even.lane = shl i32 %pair, 3
  %pairs = mul i32 %rows, %columns
  %count = shl i32 %pairs, 1
  br label %output
output:
  %number = phi i32 [ 0, %entry ], [ %number.next, %stored ]
  %odd = and i32 %number, 1
  %both = lshr i32 %number, 1
  %x = urem i32 %both, %rows
  %tile = udiv i32 %both, %rows
  %odd.lane = shl i32 %odd, 2
  %b.lane = or i32 %even.lane, %odd.lane
  %b.lane.wide = zext i32 %b.lane to i64
  %b.distance = mul i64 %b.lane.wide, %stride
  %b.start = getelementptr i8, ptr %b.all, i64 %b.distance
  %b.word = mul i32 %tile, %chunks
  %number.wide = zext i32 %number to i64
  %number.distance = mul i64 %number.wide, %word
  %c.at = getelementptr i8, ptr %c.first, i64 %number.distance
  %c = load double, ptr %c.at
  br label %chunk
chunk:
  %k = phi i32 [ 0, %output ], [ %k.next, %chunk.done ]
  %sum = phi double [ %c, %output ], [ %sum.next, %chunk.done ]
  %a.column = mul i32 %k, %rows
  %a.index = add i32 %a.column, %x
  %b.index = add i32 %b.word, %k
  %a.index.wide = zext i32 %a.index to i64
  %b.index.wide = zext i32 %b.index to i64
  %a.distance = mul i64 %a.index.wide, %word
  %b.index.distance = mul i64 %b.index.wide, %word
  %a.place = getelementptr i8, ptr %a.first, i64 %a.distance
  %b.place = getelementptr i8, ptr %b.start, i64 %b.index.distance
  br label %four
four:
  %n = phi i32 [ 0, %chunk ], [ %n.next, %four ]
  %sofar = phi double [ %sum, %chunk ], [ %sum.next, %four ]
  %a.at = phi ptr [ %a.place, %chunk ], [ %a.next, %four ]
  %b.at = phi ptr [ %b.place, %chunk ], [ %b.next, %four ]
  %a = load double, ptr %a.at
  %b = load double, ptr %b.at
  %sum.next = call double @llvm.fma.f64(double %a, double %b, double %sofar)
  %a.next = getelementptr i8, ptr %a.at, i64 %stride
  %b.next = getelementptr i8, ptr %b.at, i64 %stride
  %n.next = add i32 %n, 1
  %more = icmp ult i32 %n.next, 4
  br i1 %more, label %four, label %chunk.done
chunk.done:
  %k.next = add i32 %k, 1
  %more.chunks = icmp ult i32 %k.next, %chunks
  br i1 %more.chunks, label %chunk, label %stored
stored:
  %into.at = getelementptr i8, ptr %into, i64 %number.distance
  store double %sum.next, ptr %into.at
  %number.next = add i32 %number, 1
  %more.outputs = icmp ult i32 %number.next, %count
  br i1 %more.outputs, label %output, label %done
done:
  ret void
}
