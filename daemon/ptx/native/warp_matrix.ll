; Matrices of a whole warp whose threads run together (translate/lane_matrix.py): products, and rows to and from memory.
;
; Word w of lane n's part of a matrix lies 128 w + 4 n bytes on (of f64: 256 w + 8 n), so the words of four lanes, a row
; of a tile (translate/fragments.py), lie side by side. matrix.ll says what a product is.

declare void @gpulease_multiply_floats(ptr, ptr, i64, i64, i32, ptr, ptr, i32, i32, i32, i32, i32, i1, i1)
declare void @gpulease_multiply_bytes(ptr, ptr, i64, i64, i32, ptr, ptr, i32, i32, i32, i1, i1, i1)
declare void @gpulease_multiply_doubles(ptr, ptr, i64, i64, i32, ptr, ptr, i32, i32, i32)
declare <8 x i32> @llvm.smax.v8i32(<8 x i32>, <8 x i32>)
declare <8 x i32> @llvm.smin.v8i32(<8 x i32>, <8 x i32>)
declare <16 x i16> @llvm.smax.v16i16(<16 x i16>, <16 x i16>)
declare i32 @llvm.vector.reduce.smax.v8i32(<8 x i32>)
declare i32 @llvm.vector.reduce.or.v8i32(<8 x i32>)
declare i32 @llvm.vector.reduce.or.v4i32(<4 x i32>)

; The lower or the upper elements of words as f32's bits; of tf32 there are but lower ones. Kinds: 0 f16, 1 bf16, 2 tf32.
define internal <8 x i32> @elements(<8 x i32> %words, i1 %upper, i32 %kind) alwaysinline {
entry:
  %raised = shl <8 x i32> %words, splat (i32 16)
  %placed = select i1 %upper, <8 x i32> %words, <8 x i32> %raised
  switch i32 %kind, label %f16 [ i32 1, label %bf16
                                 i32 2, label %tf32 ]
bf16:
  %short = and <8 x i32> %placed, splat (i32 -65536)
  ret <8 x i32> %short
tf32:
  %cut = and <8 x i32> %words, splat (i32 -8192)
  ret <8 x i32> %cut
f16:
  %moved = lshr <8 x i32> %placed, splat (i32 3)
  %magnitude = and <8 x i32> %moved, splat (i32 268427264)
  %float = bitcast <8 x i32> %magnitude to <8 x float>
  %scaled = fmul <8 x float> %float, splat (float 0x46F0000000000000)
  %number = bitcast <8 x float> %scaled to <8 x i32>
  %special = or <8 x i32> %magnitude, splat (i32 2139095040)
  %is.special = icmp uge <8 x i32> %magnitude, splat (i32 260046848)
  %bits = select <8 x i1> %is.special, <8 x i32> %special, <8 x i32> %number
  %sign = and <8 x i32> %placed, splat (i32 -2147483648)
  %signed = or <8 x i32> %bits, %sign
  ret <8 x i32> %signed
}

; Exponents, of subnormal numbers the least, and of zeros one so low that no sum with another comes to matter.
define internal <8 x i32> @exponents(<8 x i32> %bits, i32 %least) alwaysinline {
  %first = insertelement <8 x i32> poison, i32 %least, i64 0
  %leasts = shufflevector <8 x i32> %first, <8 x i32> poison, <8 x i32> zeroinitializer
  %doubled = shl <8 x i32> %bits, splat (i32 1)
  %field = lshr <8 x i32> %doubled, splat (i32 24)
  %exponent = sub <8 x i32> %field, splat (i32 127)
  %held = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %exponent, <8 x i32> %leasts)
  %is.zero = icmp eq <8 x i32> %doubled, zeroinitializer
  %result = select <8 x i1> %is.zero, <8 x i32> splat (i32 -1000), <8 x i32> %held
  ret <8 x i32> %result
}

; Two vectors of exponents as one of pairs.
define internal <8 x i32> @paired(<8 x i32> %low, <8 x i32> %high) alwaysinline {
  %cut = and <8 x i32> %low, splat (i32 65535)
  %raised = shl <8 x i32> %high, splat (i32 16)
  %result = or <8 x i32> %cut, %raised
  ret <8 x i32> %result
}

; A row of B, in eight columns: its numbers, and their exponents twice in a word. Gives the exponents.
define internal <8 x i32> @keep_row(<8 x i32> %words, i1 %upper, i32 %kind, i32 %least, ptr %values,
      ptr %exponents) alwaysinline {
  %bits = call <8 x i32> @elements(<8 x i32> %words, i1 %upper, i32 %kind)
  %exponent = call <8 x i32> @exponents(<8 x i32> %bits, i32 %least)
  %twice = call <8 x i32> @paired(<8 x i32> %exponent, <8 x i32> %exponent)
  store <8 x i32> %bits, ptr %values, align 32
  store <8 x i32> %twice, ptr %exponents, align 32
  ret <8 x i32> %exponent
}

; Four elements of two rows of A, of one row first: their numbers, and pairs of their exponents. Gives the exponents.
define internal <8 x i32> @keep_pair(<8 x i32> %words, i1 %upper, i32 %kind, i32 %least, ptr %values,
      ptr %exponents) alwaysinline {
  %bits = call <8 x i32> @elements(<8 x i32> %words, i1 %upper, i32 %kind)
  %exponent = call <8 x i32> @exponents(<8 x i32> %bits, i32 %least)
  %other = shufflevector <8 x i32> %exponent, <8 x i32> poison, <8 x i32> <i32 4, i32 5, i32 6, i32 7, i32 4,
      i32 5, i32 6, i32 7>
  %both = call <8 x i32> @paired(<8 x i32> %exponent, <8 x i32> %other)
  %pairs = shufflevector <8 x i32> %both, <8 x i32> poison, <4 x i32> <i32 0, i32 1, i32 2, i32 3>
  store <8 x i32> %bits, ptr %values, align 32
  store <4 x i32> %pairs, ptr %exponents, align 16
  ret <8 x i32> %exponent
}

; What numbers are multiplied by to have 25 places after the greatest exponent, and the other way round.
define internal <8 x float> @raising(<8 x i32> %top) alwaysinline {
  %places = sub <8 x i32> splat (i32 152), %top
  %placed = shl <8 x i32> %places, splat (i32 23)
  %result = bitcast <8 x i32> %placed to <8 x float>
  ret <8 x float> %result
}

define internal <8 x float> @lowering(<8 x i32> %top) alwaysinline {
  %places = add <8 x i32> %top, splat (i32 102)
  %placed = shl <8 x i32> %places, splat (i32 23)
  %result = bitcast <8 x i32> %placed to <8 x float>
  ret <8 x float> %result
}

; What a sum of products is with C, cut to f32.
define internal <8 x float> @completed(<8 x i32> %sum, <8 x float> %c, <8 x float> %scale,
      <8 x i32> %top) alwaysinline {
  %c.scaled = fmul <8 x float> %c, %scale
  %c.cut = fptosi <8 x float> %c.scaled to <8 x i32>
  %c.wide = sitofp <8 x i32> %c.cut to <8 x double>
  %wide = sitofp <8 x i32> %sum to <8 x double>
  %total = fadd <8 x double> %wide, %c.wide
  %unit = call <8 x float> @lowering(<8 x i32> %top)
  %unit.wide = fpext <8 x float> %unit to <8 x double>
  %exact = fmul <8 x double> %total, %unit.wide
  %bits = bitcast <8 x double> %exact to <8 x i64>
  %cut = and <8 x i64> %bits, splat (i64 -536870912)
  %cut.double = bitcast <8 x i64> %cut to <8 x double>
  %result = fptrunc <8 x double> %cut.double to <8 x float>
  ret <8 x float> %result
}

; Whether a greatest exponent is beyond what `multiply_quickly` can do; none but zeros are not.
define internal <8 x i32> @is_beyond(<8 x i32> %top) alwaysinline {
  %is.high = icmp sgt <8 x i32> %top, splat (i32 120)
  %is.low = icmp slt <8 x i32> %top, splat (i32 -90)
  %is.some = icmp sgt <8 x i32> %top, splat (i32 -400)
  %is.under = and <8 x i1> %is.low, %is.some
  %is.out = or <8 x i1> %is.high, %is.under
  %result = sext <8 x i1> %is.out to <8 x i32>
  ret <8 x i32> %result
}

define internal <8 x i32> @clamped(<8 x i32> %top) alwaysinline {
  %raised = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %top, <8 x i32> splat (i32 -90))
  %result = call <8 x i32> @llvm.smin.v8i32(<8 x i32> %raised, <8 x i32> splat (i32 120))
  ret <8 x i32> %result
}

; A 16 x 8 product of floats of 11 bits or fewer, eight columns at a time; false if some exponents are extreme or a number
; is not finite: then nothing is in D that counts. Between exponents of -90 and 120 every product is an f32 but for such
; as are cut to 0; scaled, it is under 2^27, so 16 are summed in 32 bits. Rows g and g + 8 are multiplied together. Where
; these are 0, as in a batch's unused rows, C is the result.
define internal i1 @multiply_quickly(ptr %a, ptr %b, ptr %c, ptr %d, i64 %chunks, i32 %kind) alwaysinline {
entry:
  %b.values = alloca [16 x <8 x i32>], align 32
  %b.exponents = alloca [16 x <8 x i32>], align 32
  %a.values = alloca [4 x <8 x i32>], align 32
  %a.exponents = alloca [4 x <4 x i32>], align 16
  %is.half = icmp eq i32 %kind, 0
  %least = select i1 %is.half, i32 -14, i32 -126
  %is.whole = icmp eq i32 %kind, 2
  %parts = select i1 %is.whole, i64 1, i64 2
  %fours = mul i64 %chunks, %parts
  br label %columns
columns:
  %b.chunk = phi i64 [ 0, %entry ], [ %b.chunk.next, %columns.done ]
  %b.top = phi <8 x i32> [ splat (i32 -1000), %entry ], [ %b.top.next, %columns.done ]
  %b.at = getelementptr <32 x i32>, ptr %b, i64 %b.chunk
  %b.words = load <32 x i32>, ptr %b.at, align 64
  %b.four = mul i64 %b.chunk, %parts
  %b.upper = add i64 %b.four, 1
  %b.lower.values = getelementptr [4 x <8 x i32>], ptr %b.values, i64 %b.four
  %b.lower.exponents = getelementptr [4 x <8 x i32>], ptr %b.exponents, i64 %b.four
  %b.words.0 = shufflevector <32 x i32> %b.words, <32 x i32> poison, <8 x i32> <i32 0, i32 4, i32 8, i32 12,
      i32 16, i32 20, i32 24, i32 28>
  %b.words.1 = shufflevector <32 x i32> %b.words, <32 x i32> poison, <8 x i32> <i32 1, i32 5, i32 9, i32 13,
      i32 17, i32 21, i32 25, i32 29>
  %b.words.2 = shufflevector <32 x i32> %b.words, <32 x i32> poison, <8 x i32> <i32 2, i32 6, i32 10, i32 14,
      i32 18, i32 22, i32 26, i32 30>
  %b.words.3 = shufflevector <32 x i32> %b.words, <32 x i32> poison, <8 x i32> <i32 3, i32 7, i32 11, i32 15,
      i32 19, i32 23, i32 27, i32 31>
  %b.values.0 = getelementptr <8 x i32>, ptr %b.lower.values, i64 0
  %b.exponents.0 = getelementptr <8 x i32>, ptr %b.lower.exponents, i64 0
  %b.exponent.0 = call <8 x i32> @keep_row(<8 x i32> %b.words.0, i1 false, i32 %kind, i32 %least, ptr %b.values.0,
      ptr %b.exponents.0)
  %b.top.0 = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %b.top, <8 x i32> %b.exponent.0)
  %b.values.1 = getelementptr <8 x i32>, ptr %b.lower.values, i64 1
  %b.exponents.1 = getelementptr <8 x i32>, ptr %b.lower.exponents, i64 1
  %b.exponent.1 = call <8 x i32> @keep_row(<8 x i32> %b.words.1, i1 false, i32 %kind, i32 %least, ptr %b.values.1,
      ptr %b.exponents.1)
  %b.top.1 = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %b.top.0, <8 x i32> %b.exponent.1)
  %b.values.2 = getelementptr <8 x i32>, ptr %b.lower.values, i64 2
  %b.exponents.2 = getelementptr <8 x i32>, ptr %b.lower.exponents, i64 2
  %b.exponent.2 = call <8 x i32> @keep_row(<8 x i32> %b.words.2, i1 false, i32 %kind, i32 %least, ptr %b.values.2,
      ptr %b.exponents.2)
  %b.top.2 = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %b.top.1, <8 x i32> %b.exponent.2)
  %b.values.3 = getelementptr <8 x i32>, ptr %b.lower.values, i64 3
  %b.exponents.3 = getelementptr <8 x i32>, ptr %b.lower.exponents, i64 3
  %b.exponent.3 = call <8 x i32> @keep_row(<8 x i32> %b.words.3, i1 false, i32 %kind, i32 %least, ptr %b.values.3,
      ptr %b.exponents.3)
  %b.top.3 = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %b.top.2, <8 x i32> %b.exponent.3)
  br i1 %is.whole, label %columns.done, label %columns.upper
columns.upper:
  %b.upper.values = getelementptr [4 x <8 x i32>], ptr %b.values, i64 %b.upper
  %b.upper.exponents = getelementptr [4 x <8 x i32>], ptr %b.exponents, i64 %b.upper
  %b.values.4 = getelementptr <8 x i32>, ptr %b.upper.values, i64 0
  %b.exponents.4 = getelementptr <8 x i32>, ptr %b.upper.exponents, i64 0
  %b.exponent.4 = call <8 x i32> @keep_row(<8 x i32> %b.words.0, i1 true, i32 %kind, i32 %least, ptr %b.values.4,
      ptr %b.exponents.4)
  %b.top.4 = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %b.top.3, <8 x i32> %b.exponent.4)
  %b.values.5 = getelementptr <8 x i32>, ptr %b.upper.values, i64 1
  %b.exponents.5 = getelementptr <8 x i32>, ptr %b.upper.exponents, i64 1
  %b.exponent.5 = call <8 x i32> @keep_row(<8 x i32> %b.words.1, i1 true, i32 %kind, i32 %least, ptr %b.values.5,
      ptr %b.exponents.5)
  %b.top.5 = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %b.top.4, <8 x i32> %b.exponent.5)
  %b.values.6 = getelementptr <8 x i32>, ptr %b.upper.values, i64 2
  %b.exponents.6 = getelementptr <8 x i32>, ptr %b.upper.exponents, i64 2
  %b.exponent.6 = call <8 x i32> @keep_row(<8 x i32> %b.words.2, i1 true, i32 %kind, i32 %least, ptr %b.values.6,
      ptr %b.exponents.6)
  %b.top.6 = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %b.top.5, <8 x i32> %b.exponent.6)
  %b.values.7 = getelementptr <8 x i32>, ptr %b.upper.values, i64 3
  %b.exponents.7 = getelementptr <8 x i32>, ptr %b.upper.exponents, i64 3
  %b.exponent.7 = call <8 x i32> @keep_row(<8 x i32> %b.words.3, i1 true, i32 %kind, i32 %least, ptr %b.values.7,
      ptr %b.exponents.7)
  %b.top.7 = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %b.top.6, <8 x i32> %b.exponent.7)
  br label %columns.done
columns.done:
  %b.top.next = phi <8 x i32> [ %b.top.3, %columns ], [ %b.top.7, %columns.upper ]
  %b.chunk.next = add i64 %b.chunk, 1
  %more.columns = icmp ult i64 %b.chunk.next, %chunks
  br i1 %more.columns, label %columns, label %kept
kept:
  %b.greatest = call i32 @llvm.vector.reduce.smax.v8i32(<8 x i32> %b.top.next)
  %b.is.finite = icmp ult i32 %b.greatest, 128
  %b.is.zero = icmp slt i32 %b.greatest, 0
  %b.is.fine = or i1 %b.is.finite, %b.is.zero
  br i1 %b.is.fine, label %rows, label %refused
rows:
  %g = phi i64 [ 0, %kept ], [ %g.next, %stored ]
  %beyond = phi <8 x i32> [ zeroinitializer, %kept ], [ %beyond.next, %stored ]
  %row.distance = shl i64 %g, 4
  %c.0.at = getelementptr i8, ptr %c, i64 %row.distance
  %c.1.at = getelementptr i8, ptr %c.0.at, i64 128
  %c.2.at = getelementptr i8, ptr %c.0.at, i64 256
  %c.3.at = getelementptr i8, ptr %c.0.at, i64 384
  %c.0 = load <4 x float>, ptr %c.0.at, align 16
  %c.1 = load <4 x float>, ptr %c.1.at, align 16
  %c.2 = load <4 x float>, ptr %c.2.at, align 16
  %c.3 = load <4 x float>, ptr %c.3.at, align 16
  %c.low = shufflevector <4 x float> %c.0, <4 x float> %c.1, <8 x i32> <i32 0, i32 4, i32 1, i32 5, i32 2, i32 6,
      i32 3, i32 7>
  %c.high = shufflevector <4 x float> %c.2, <4 x float> %c.3, <8 x i32> <i32 0, i32 4, i32 1, i32 5, i32 2, i32 6,
      i32 3, i32 7>
  %c.low.bits = bitcast <8 x float> %c.low to <8 x i32>
  %c.high.bits = bitcast <8 x float> %c.high to <8 x i32>
  %c.low.exponents = call <8 x i32> @exponents(<8 x i32> %c.low.bits, i32 -126)
  %c.high.exponents = call <8 x i32> @exponents(<8 x i32> %c.high.bits, i32 -126)
  %a.first = getelementptr i8, ptr %a, i64 %row.distance
  br label %look
look:
  %look.chunk = phi i64 [ 0, %rows ], [ %look.next, %look ]
  %seen = phi <4 x i32> [ zeroinitializer, %rows ], [ %seen.next, %look ]
  %look.at = getelementptr [256 x i8], ptr %a.first, i64 %look.chunk
  %look.other = getelementptr i8, ptr %look.at, i64 128
  %look.low = load <4 x i32>, ptr %look.at, align 16
  %look.high = load <4 x i32>, ptr %look.other, align 16
  %look.both = or <4 x i32> %look.low, %look.high
  %seen.next = or <4 x i32> %seen, %look.both
  %look.next = add i64 %look.chunk, 1
  %more.look = icmp ult i64 %look.next, %chunks
  br i1 %more.look, label %look, label %looked
looked:
  %seen.bits = call i32 @llvm.vector.reduce.or.v4i32(<4 x i32> %seen.next)
  %is.zero = icmp eq i32 %seen.bits, 0
  br i1 %is.zero, label %zero, label %some
zero:
  %plain.low = fadd <8 x float> %c.low, zeroinitializer
  %plain.high = fadd <8 x float> %c.high, zeroinitializer
  %c.most = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %c.low.exponents, <8 x i32> %c.high.exponents)
  %c.is.special = icmp eq <8 x i32> %c.most, splat (i32 128)
  %c.beyond = sext <8 x i1> %c.is.special to <8 x i32>
  br label %stored
some:
  br label %unpack
unpack:
  %a.chunk = phi i64 [ 0, %some ], [ %a.chunk.next, %unpacked ]
  %a.top = phi <8 x i32> [ splat (i32 -1000), %some ], [ %a.top.next, %unpacked ]
  %a.at = getelementptr [256 x i8], ptr %a.first, i64 %a.chunk
  %a.other = getelementptr i8, ptr %a.at, i64 128
  %a.low = load <4 x i32>, ptr %a.at, align 16
  %a.high = load <4 x i32>, ptr %a.other, align 16
  %a.words = shufflevector <4 x i32> %a.low, <4 x i32> %a.high, <8 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4,
      i32 5, i32 6, i32 7>
  %a.four = mul i64 %a.chunk, %parts
  %a.lower.values = getelementptr <8 x i32>, ptr %a.values, i64 %a.four
  %a.lower.exponents = getelementptr <4 x i32>, ptr %a.exponents, i64 %a.four
  %a.lower = call <8 x i32> @keep_pair(<8 x i32> %a.words, i1 false, i32 %kind, i32 %least, ptr %a.lower.values,
      ptr %a.lower.exponents)
  %a.top.lower = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %a.top, <8 x i32> %a.lower)
  br i1 %is.whole, label %unpacked, label %unpack.upper
unpack.upper:
  %a.upper.values = getelementptr <8 x i32>, ptr %a.lower.values, i64 1
  %a.upper.exponents = getelementptr <4 x i32>, ptr %a.lower.exponents, i64 1
  %a.upper = call <8 x i32> @keep_pair(<8 x i32> %a.words, i1 true, i32 %kind, i32 %least, ptr %a.upper.values,
      ptr %a.upper.exponents)
  %a.top.upper = call <8 x i32> @llvm.smax.v8i32(<8 x i32> %a.top.lower, <8 x i32> %a.upper)
  br label %unpacked
unpacked:
  %a.top.next = phi <8 x i32> [ %a.top.lower, %unpack ], [ %a.top.upper, %unpack.upper ]
  %a.chunk.next = add i64 %a.chunk, 1
  %more.unpack = icmp ult i64 %a.chunk.next, %chunks
  br i1 %more.unpack, label %unpack, label %prepared
prepared:
  %a.is.special = icmp eq <8 x i32> %a.top.next, splat (i32 128)
  %a.beyond = sext <8 x i1> %a.is.special to <8 x i32>
  %c.pairs = call <8 x i32> @paired(<8 x i32> %c.low.exponents, <8 x i32> %c.high.exponents)
  %c.tops = bitcast <8 x i32> %c.pairs to <16 x i16>
  br label %survey
survey:
  %f = phi i64 [ 0, %prepared ], [ %f.next, %survey ]
  %tops = phi <16 x i16> [ %c.tops, %prepared ], [ %tops.3, %survey ]
  %survey.a = getelementptr <4 x i32>, ptr %a.exponents, i64 %f
  %survey.b = getelementptr [4 x <8 x i32>], ptr %b.exponents, i64 %f
  %survey.a.0.at = getelementptr i32, ptr %survey.a, i64 0
  %survey.a.0 = load i32, ptr %survey.a.0.at, align 4
  %survey.a.0.one = insertelement <8 x i32> poison, i32 %survey.a.0, i64 0
  %survey.a.0.all = shufflevector <8 x i32> %survey.a.0.one, <8 x i32> poison, <8 x i32> zeroinitializer
  %survey.a.0.pairs = bitcast <8 x i32> %survey.a.0.all to <16 x i16>
  %survey.b.0.at = getelementptr <8 x i32>, ptr %survey.b, i64 0
  %survey.b.0 = load <16 x i16>, ptr %survey.b.0.at, align 32
  %exponent.0 = add <16 x i16> %survey.a.0.pairs, %survey.b.0
  %tops.0 = call <16 x i16> @llvm.smax.v16i16(<16 x i16> %tops, <16 x i16> %exponent.0)
  %survey.a.1.at = getelementptr i32, ptr %survey.a, i64 1
  %survey.a.1 = load i32, ptr %survey.a.1.at, align 4
  %survey.a.1.one = insertelement <8 x i32> poison, i32 %survey.a.1, i64 0
  %survey.a.1.all = shufflevector <8 x i32> %survey.a.1.one, <8 x i32> poison, <8 x i32> zeroinitializer
  %survey.a.1.pairs = bitcast <8 x i32> %survey.a.1.all to <16 x i16>
  %survey.b.1.at = getelementptr <8 x i32>, ptr %survey.b, i64 1
  %survey.b.1 = load <16 x i16>, ptr %survey.b.1.at, align 32
  %exponent.1 = add <16 x i16> %survey.a.1.pairs, %survey.b.1
  %tops.1 = call <16 x i16> @llvm.smax.v16i16(<16 x i16> %tops.0, <16 x i16> %exponent.1)
  %survey.a.2.at = getelementptr i32, ptr %survey.a, i64 2
  %survey.a.2 = load i32, ptr %survey.a.2.at, align 4
  %survey.a.2.one = insertelement <8 x i32> poison, i32 %survey.a.2, i64 0
  %survey.a.2.all = shufflevector <8 x i32> %survey.a.2.one, <8 x i32> poison, <8 x i32> zeroinitializer
  %survey.a.2.pairs = bitcast <8 x i32> %survey.a.2.all to <16 x i16>
  %survey.b.2.at = getelementptr <8 x i32>, ptr %survey.b, i64 2
  %survey.b.2 = load <16 x i16>, ptr %survey.b.2.at, align 32
  %exponent.2 = add <16 x i16> %survey.a.2.pairs, %survey.b.2
  %tops.2 = call <16 x i16> @llvm.smax.v16i16(<16 x i16> %tops.1, <16 x i16> %exponent.2)
  %survey.a.3.at = getelementptr i32, ptr %survey.a, i64 3
  %survey.a.3 = load i32, ptr %survey.a.3.at, align 4
  %survey.a.3.one = insertelement <8 x i32> poison, i32 %survey.a.3, i64 0
  %survey.a.3.all = shufflevector <8 x i32> %survey.a.3.one, <8 x i32> poison, <8 x i32> zeroinitializer
  %survey.a.3.pairs = bitcast <8 x i32> %survey.a.3.all to <16 x i16>
  %survey.b.3.at = getelementptr <8 x i32>, ptr %survey.b, i64 3
  %survey.b.3 = load <16 x i16>, ptr %survey.b.3.at, align 32
  %exponent.3 = add <16 x i16> %survey.a.3.pairs, %survey.b.3
  %tops.3 = call <16 x i16> @llvm.smax.v16i16(<16 x i16> %tops.2, <16 x i16> %exponent.3)
  %f.next = add i64 %f, 1
  %more.survey = icmp ult i64 %f.next, %fours
  br i1 %more.survey, label %survey, label %surveyed
surveyed:
  %pairs = bitcast <16 x i16> %tops.3 to <8 x i32>
  %pairs.raised = shl <8 x i32> %pairs, splat (i32 16)
  %top.low = ashr <8 x i32> %pairs.raised, splat (i32 16)
  %top.high = ashr <8 x i32> %pairs, splat (i32 16)
  %beyond.low = call <8 x i32> @is_beyond(<8 x i32> %top.low)
  %beyond.high = call <8 x i32> @is_beyond(<8 x i32> %top.high)
  %beyond.both = or <8 x i32> %beyond.low, %beyond.high
  %beyond.any = or <8 x i32> %beyond.both, %a.beyond
  %held.low = call <8 x i32> @clamped(<8 x i32> %top.low)
  %held.high = call <8 x i32> @clamped(<8 x i32> %top.high)
  %scale.low = call <8 x float> @raising(<8 x i32> %held.low)
  %scale.high = call <8 x float> @raising(<8 x i32> %held.high)
  br label %sum
sum:
  %s = phi i64 [ 0, %surveyed ], [ %s.next, %sum ]
  %sum.low = phi <8 x i32> [ zeroinitializer, %surveyed ], [ %sum.low.3, %sum ]
  %sum.high = phi <8 x i32> [ zeroinitializer, %surveyed ], [ %sum.high.3, %sum ]
  %sum.a = getelementptr <8 x float>, ptr %a.values, i64 %s
  %sum.b = getelementptr [4 x <8 x float>], ptr %b.values, i64 %s
  %sum.b.0.at = getelementptr <8 x float>, ptr %sum.b, i64 0
  %b.0 = load <8 x float>, ptr %sum.b.0.at, align 32
  %a.low.0.at = getelementptr float, ptr %sum.a, i64 0
  %a.low.0.number = load float, ptr %a.low.0.at, align 4
  %a.low.0.one = insertelement <8 x float> poison, float %a.low.0.number, i64 0
  %a.low.0 = shufflevector <8 x float> %a.low.0.one, <8 x float> poison, <8 x i32> zeroinitializer
  %product.low.0 = fmul <8 x float> %a.low.0, %b.0
  %scaled.low.0 = fmul <8 x float> %product.low.0, %scale.low
  %cut.low.0 = fptosi <8 x float> %scaled.low.0 to <8 x i32>
  %sum.low.0 = add <8 x i32> %sum.low, %cut.low.0
  %a.high.0.at = getelementptr float, ptr %sum.a, i64 4
  %a.high.0.number = load float, ptr %a.high.0.at, align 4
  %a.high.0.one = insertelement <8 x float> poison, float %a.high.0.number, i64 0
  %a.high.0 = shufflevector <8 x float> %a.high.0.one, <8 x float> poison, <8 x i32> zeroinitializer
  %product.high.0 = fmul <8 x float> %a.high.0, %b.0
  %scaled.high.0 = fmul <8 x float> %product.high.0, %scale.high
  %cut.high.0 = fptosi <8 x float> %scaled.high.0 to <8 x i32>
  %sum.high.0 = add <8 x i32> %sum.high, %cut.high.0
  %sum.b.1.at = getelementptr <8 x float>, ptr %sum.b, i64 1
  %b.1 = load <8 x float>, ptr %sum.b.1.at, align 32
  %a.low.1.at = getelementptr float, ptr %sum.a, i64 1
  %a.low.1.number = load float, ptr %a.low.1.at, align 4
  %a.low.1.one = insertelement <8 x float> poison, float %a.low.1.number, i64 0
  %a.low.1 = shufflevector <8 x float> %a.low.1.one, <8 x float> poison, <8 x i32> zeroinitializer
  %product.low.1 = fmul <8 x float> %a.low.1, %b.1
  %scaled.low.1 = fmul <8 x float> %product.low.1, %scale.low
  %cut.low.1 = fptosi <8 x float> %scaled.low.1 to <8 x i32>
  %sum.low.1 = add <8 x i32> %sum.low.0, %cut.low.1
  %a.high.1.at = getelementptr float, ptr %sum.a, i64 5
  %a.high.1.number = load float, ptr %a.high.1.at, align 4
  %a.high.1.one = insertelement <8 x float> poison, float %a.high.1.number, i64 0
  %a.high.1 = shufflevector <8 x float> %a.high.1.one, <8 x float> poison, <8 x i32> zeroinitializer
  %product.high.1 = fmul <8 x float> %a.high.1, %b.1
  %scaled.high.1 = fmul <8 x float> %product.high.1, %scale.high
  %cut.high.1 = fptosi <8 x float> %scaled.high.1 to <8 x i32>
  %sum.high.1 = add <8 x i32> %sum.high.0, %cut.high.1
  %sum.b.2.at = getelementptr <8 x float>, ptr %sum.b, i64 2
  %b.2 = load <8 x float>, ptr %sum.b.2.at, align 32
  %a.low.2.at = getelementptr float, ptr %sum.a, i64 2
  %a.low.2.number = load float, ptr %a.low.2.at, align 4
  %a.low.2.one = insertelement <8 x float> poison, float %a.low.2.number, i64 0
  %a.low.2 = shufflevector <8 x float> %a.low.2.one, <8 x float> poison, <8 x i32> zeroinitializer
  %product.low.2 = fmul <8 x float> %a.low.2, %b.2
  %scaled.low.2 = fmul <8 x float> %product.low.2, %scale.low
  %cut.low.2 = fptosi <8 x float> %scaled.low.2 to <8 x i32>
  %sum.low.2 = add <8 x i32> %sum.low.1, %cut.low.2
  %a.high.2.at = getelementptr float, ptr %sum.a, i64 6
  %a.high.2.number = load float, ptr %a.high.2.at, align 4
  %a.high.2.one = insertelement <8 x float> poison, float %a.high.2.number, i64 0
  %a.high.2 = shufflevector <8 x float> %a.high.2.one, <8 x float> poison, <8 x i32> zeroinitializer
  %product.high.2 = fmul <8 x float> %a.high.2, %b.2
  %scaled.high.2 = fmul <8 x float> %product.high.2, %scale.high
  %cut.high.2 = fptosi <8 x float> %scaled.high.2 to <8 x i32>
  %sum.high.2 = add <8 x i32> %sum.high.1, %cut.high.2
  %sum.b.3.at = getelementptr <8 x float>, ptr %sum.b, i64 3
  %b.3 = load <8 x float>, ptr %sum.b.3.at, align 32
  %a.low.3.at = getelementptr float, ptr %sum.a, i64 3
  %a.low.3.number = load float, ptr %a.low.3.at, align 4
  %a.low.3.one = insertelement <8 x float> poison, float %a.low.3.number, i64 0
  %a.low.3 = shufflevector <8 x float> %a.low.3.one, <8 x float> poison, <8 x i32> zeroinitializer
  %product.low.3 = fmul <8 x float> %a.low.3, %b.3
  %scaled.low.3 = fmul <8 x float> %product.low.3, %scale.low
  %cut.low.3 = fptosi <8 x float> %scaled.low.3 to <8 x i32>
  %sum.low.3 = add <8 x i32> %sum.low.2, %cut.low.3
  %a.high.3.at = getelementptr float, ptr %sum.a, i64 7
  %a.high.3.number = load float, ptr %a.high.3.at, align 4
  %a.high.3.one = insertelement <8 x float> poison, float %a.high.3.number, i64 0
  %a.high.3 = shufflevector <8 x float> %a.high.3.one, <8 x float> poison, <8 x i32> zeroinitializer
  %product.high.3 = fmul <8 x float> %a.high.3, %b.3
  %scaled.high.3 = fmul <8 x float> %product.high.3, %scale.high
  %cut.high.3 = fptosi <8 x float> %scaled.high.3 to <8 x i32>
  %sum.high.3 = add <8 x i32> %sum.high.2, %cut.high.3
  %s.next = add i64 %s, 1
  %more.sum = icmp ult i64 %s.next, %fours
  br i1 %more.sum, label %sum, label %summed
summed:
  %result.low = call <8 x float> @completed(<8 x i32> %sum.low.3, <8 x float> %c.low, <8 x float> %scale.low,
      <8 x i32> %held.low)
  %result.high = call <8 x float> @completed(<8 x i32> %sum.high.3, <8 x float> %c.high, <8 x float> %scale.high,
      <8 x i32> %held.high)
  br label %stored
stored:
  %low = phi <8 x float> [ %plain.low, %zero ], [ %result.low, %summed ]
  %high = phi <8 x float> [ %plain.high, %zero ], [ %result.high, %summed ]
  %beyond.here = phi <8 x i32> [ %c.beyond, %zero ], [ %beyond.any, %summed ]
  %beyond.next = or <8 x i32> %beyond, %beyond.here
  %d.0 = shufflevector <8 x float> %low, <8 x float> poison, <4 x i32> <i32 0, i32 2, i32 4, i32 6>
  %d.1 = shufflevector <8 x float> %low, <8 x float> poison, <4 x i32> <i32 1, i32 3, i32 5, i32 7>
  %d.2 = shufflevector <8 x float> %high, <8 x float> poison, <4 x i32> <i32 0, i32 2, i32 4, i32 6>
  %d.3 = shufflevector <8 x float> %high, <8 x float> poison, <4 x i32> <i32 1, i32 3, i32 5, i32 7>
  %d.0.at = getelementptr i8, ptr %d, i64 %row.distance
  %d.1.at = getelementptr i8, ptr %d.0.at, i64 128
  %d.2.at = getelementptr i8, ptr %d.0.at, i64 256
  %d.3.at = getelementptr i8, ptr %d.0.at, i64 384
  store <4 x float> %d.0, ptr %d.0.at, align 16
  store <4 x float> %d.1, ptr %d.1.at, align 16
  store <4 x float> %d.2, ptr %d.2.at, align 16
  store <4 x float> %d.3, ptr %d.3.at, align 16
  %g.next = add i64 %g, 1
  %more.rows = icmp ult i64 %g.next, 8
  br i1 %more.rows, label %rows, label %finished
finished:
  %beyond.bits = call i32 @llvm.vector.reduce.or.v8i32(<8 x i32> %beyond.next)
  %is.done = icmp eq i32 %beyond.bits, 0
  ret i1 %is.done
refused:
  ret i1 false
}

; Floats: D = AB + C. `d` overlaps nothing.
define void @gpulease_warp_floats(ptr noalias %a, ptr noalias %b, ptr noalias %c, ptr noalias %d, i32 %rows,
    i32 %columns, i32 %chunks, i32 %a.kind, i32 %b.kind, i1 %c.is.half, i1 %d.is.half) {
entry:
  %count = zext i32 %chunks to i64
  %some.half = or i1 %c.is.half, %d.is.half
  br i1 %some.half, label %slow, label %floats
floats:
  switch i32 %a.kind, label %slow [ i32 0, label %f16
                                    i32 1, label %bf16
                                    i32 2, label %tf32 ]
f16:
  %f16.done = call i1 @multiply_quickly(ptr %a, ptr %b, ptr %c, ptr %d, i64 %count, i32 0)
  br i1 %f16.done, label %done, label %slow
bf16:
  %bf16.done = call i1 @multiply_quickly(ptr %a, ptr %b, ptr %c, ptr %d, i64 %count, i32 1)
  br i1 %bf16.done, label %done, label %slow
tf32:
  %tf32.done = call i1 @multiply_quickly(ptr %a, ptr %b, ptr %c, ptr %d, i64 %count, i32 2)
  br i1 %tf32.done, label %done, label %slow
slow:
  br label %lane
lane:
  %n = phi i32 [ 0, %slow ], [ %n.next, %lane ]
  %n.wide = zext i32 %n to i64
  %c.at = getelementptr i32, ptr %c, i64 %n.wide
  %d.at = getelementptr i32, ptr %d, i64 %n.wide
  call void @gpulease_multiply_floats(ptr %a, ptr %b, i64 4, i64 128, i32 %n, ptr %c.at, ptr %d.at, i32 %rows,
      i32 %columns, i32 %chunks, i32 %a.kind, i32 %b.kind, i1 %c.is.half, i1 %d.is.half)
  %n.next = add i32 %n, 1
  %more = icmp ult i32 %n.next, 32
  br i1 %more, label %lane, label %done
done:
  ret void
}

define void @gpulease_warp_bytes(ptr noalias %a, ptr noalias %b, ptr noalias %c, ptr noalias %d, i32 %rows,
    i32 %columns, i32 %chunks, i1 %a.is.signed, i1 %b.is.signed, i1 %saturates) {
entry:
  br label %lane
lane:
  %n = phi i32 [ 0, %entry ], [ %n.next, %lane ]
  %n.wide = zext i32 %n to i64
  %c.at = getelementptr i32, ptr %c, i64 %n.wide
  %d.at = getelementptr i32, ptr %d, i64 %n.wide
  call void @gpulease_multiply_bytes(ptr %a, ptr %b, i64 4, i64 128, i32 %n, ptr %c.at, ptr %d.at, i32 %rows,
      i32 %columns, i32 %chunks, i1 %a.is.signed, i1 %b.is.signed, i1 %saturates)
  %n.next = add i32 %n, 1
  %more = icmp ult i32 %n.next, 32
  br i1 %more, label %lane, label %done
done:
  ret void
}

define void @gpulease_warp_doubles(ptr noalias %a, ptr noalias %b, ptr noalias %c, ptr noalias %d, i32 %rows,
    i32 %columns, i32 %chunks) {
entry:
  br label %lane
lane:
  %n = phi i32 [ 0, %entry ], [ %n.next, %lane ]
  %n.wide = zext i32 %n to i64
  %c.at = getelementptr double, ptr %c, i64 %n.wide
  %d.at = getelementptr double, ptr %d, i64 %n.wide
  call void @gpulease_multiply_doubles(ptr %a, ptr %b, i64 8, i64 256, i32 %n, ptr %c.at, ptr %d.at, i32 %rows,
      i32 %columns, i32 %chunks)
  %n.next = add i32 %n, 1
  %more = icmp ult i32 %n.next, 32
  br i1 %more, label %lane, label %done
done:
  ret void
}

; A matrix of 8 x 8 halves turned over.
define internal void @turn(ptr %from, ptr %into) alwaysinline {
  %at.0 = getelementptr i8, ptr %from, i64 0
  %s0.0 = load <8 x i16>, ptr %at.0, align 16
  %at.1 = getelementptr i8, ptr %from, i64 16
  %s0.1 = load <8 x i16>, ptr %at.1, align 16
  %at.2 = getelementptr i8, ptr %from, i64 32
  %s0.2 = load <8 x i16>, ptr %at.2, align 16
  %at.3 = getelementptr i8, ptr %from, i64 48
  %s0.3 = load <8 x i16>, ptr %at.3, align 16
  %at.4 = getelementptr i8, ptr %from, i64 64
  %s0.4 = load <8 x i16>, ptr %at.4, align 16
  %at.5 = getelementptr i8, ptr %from, i64 80
  %s0.5 = load <8 x i16>, ptr %at.5, align 16
  %at.6 = getelementptr i8, ptr %from, i64 96
  %s0.6 = load <8 x i16>, ptr %at.6, align 16
  %at.7 = getelementptr i8, ptr %from, i64 112
  %s0.7 = load <8 x i16>, ptr %at.7, align 16
  %s1.0 = shufflevector <8 x i16> %s0.0, <8 x i16> %s0.4, <8 x i32> <i32 0, i32 8, i32 1, i32 9, i32 2, i32 10,
      i32 3, i32 11>
  %s1.1 = shufflevector <8 x i16> %s0.0, <8 x i16> %s0.4, <8 x i32> <i32 4, i32 12, i32 5, i32 13, i32 6, i32 14,
      i32 7, i32 15>
  %s1.2 = shufflevector <8 x i16> %s0.1, <8 x i16> %s0.5, <8 x i32> <i32 0, i32 8, i32 1, i32 9, i32 2, i32 10,
      i32 3, i32 11>
  %s1.3 = shufflevector <8 x i16> %s0.1, <8 x i16> %s0.5, <8 x i32> <i32 4, i32 12, i32 5, i32 13, i32 6, i32 14,
      i32 7, i32 15>
  %s1.4 = shufflevector <8 x i16> %s0.2, <8 x i16> %s0.6, <8 x i32> <i32 0, i32 8, i32 1, i32 9, i32 2, i32 10,
      i32 3, i32 11>
  %s1.5 = shufflevector <8 x i16> %s0.2, <8 x i16> %s0.6, <8 x i32> <i32 4, i32 12, i32 5, i32 13, i32 6, i32 14,
      i32 7, i32 15>
  %s1.6 = shufflevector <8 x i16> %s0.3, <8 x i16> %s0.7, <8 x i32> <i32 0, i32 8, i32 1, i32 9, i32 2, i32 10,
      i32 3, i32 11>
  %s1.7 = shufflevector <8 x i16> %s0.3, <8 x i16> %s0.7, <8 x i32> <i32 4, i32 12, i32 5, i32 13, i32 6, i32 14,
      i32 7, i32 15>
  %s2.0 = shufflevector <8 x i16> %s1.0, <8 x i16> %s1.4, <8 x i32> <i32 0, i32 8, i32 1, i32 9, i32 2, i32 10,
      i32 3, i32 11>
  %s2.1 = shufflevector <8 x i16> %s1.0, <8 x i16> %s1.4, <8 x i32> <i32 4, i32 12, i32 5, i32 13, i32 6, i32 14,
      i32 7, i32 15>
  %s2.2 = shufflevector <8 x i16> %s1.1, <8 x i16> %s1.5, <8 x i32> <i32 0, i32 8, i32 1, i32 9, i32 2, i32 10,
      i32 3, i32 11>
  %s2.3 = shufflevector <8 x i16> %s1.1, <8 x i16> %s1.5, <8 x i32> <i32 4, i32 12, i32 5, i32 13, i32 6, i32 14,
      i32 7, i32 15>
  %s2.4 = shufflevector <8 x i16> %s1.2, <8 x i16> %s1.6, <8 x i32> <i32 0, i32 8, i32 1, i32 9, i32 2, i32 10,
      i32 3, i32 11>
  %s2.5 = shufflevector <8 x i16> %s1.2, <8 x i16> %s1.6, <8 x i32> <i32 4, i32 12, i32 5, i32 13, i32 6, i32 14,
      i32 7, i32 15>
  %s2.6 = shufflevector <8 x i16> %s1.3, <8 x i16> %s1.7, <8 x i32> <i32 0, i32 8, i32 1, i32 9, i32 2, i32 10,
      i32 3, i32 11>
  %s2.7 = shufflevector <8 x i16> %s1.3, <8 x i16> %s1.7, <8 x i32> <i32 4, i32 12, i32 5, i32 13, i32 6, i32 14,
      i32 7, i32 15>
  %s3.0 = shufflevector <8 x i16> %s2.0, <8 x i16> %s2.4, <8 x i32> <i32 0, i32 8, i32 1, i32 9, i32 2, i32 10,
      i32 3, i32 11>
  %s3.1 = shufflevector <8 x i16> %s2.0, <8 x i16> %s2.4, <8 x i32> <i32 4, i32 12, i32 5, i32 13, i32 6, i32 14,
      i32 7, i32 15>
  %s3.2 = shufflevector <8 x i16> %s2.1, <8 x i16> %s2.5, <8 x i32> <i32 0, i32 8, i32 1, i32 9, i32 2, i32 10,
      i32 3, i32 11>
  %s3.3 = shufflevector <8 x i16> %s2.1, <8 x i16> %s2.5, <8 x i32> <i32 4, i32 12, i32 5, i32 13, i32 6, i32 14,
      i32 7, i32 15>
  %s3.4 = shufflevector <8 x i16> %s2.2, <8 x i16> %s2.6, <8 x i32> <i32 0, i32 8, i32 1, i32 9, i32 2, i32 10,
      i32 3, i32 11>
  %s3.5 = shufflevector <8 x i16> %s2.2, <8 x i16> %s2.6, <8 x i32> <i32 4, i32 12, i32 5, i32 13, i32 6, i32 14,
      i32 7, i32 15>
  %s3.6 = shufflevector <8 x i16> %s2.3, <8 x i16> %s2.7, <8 x i32> <i32 0, i32 8, i32 1, i32 9, i32 2, i32 10,
      i32 3, i32 11>
  %s3.7 = shufflevector <8 x i16> %s2.3, <8 x i16> %s2.7, <8 x i32> <i32 4, i32 12, i32 5, i32 13, i32 6, i32 14,
      i32 7, i32 15>
  %into.0 = getelementptr i8, ptr %into, i64 0
  store <8 x i16> %s3.0, ptr %into.0, align 16
  %into.1 = getelementptr i8, ptr %into, i64 16
  store <8 x i16> %s3.1, ptr %into.1, align 16
  %into.2 = getelementptr i8, ptr %into, i64 32
  store <8 x i16> %s3.2, ptr %into.2, align 16
  %into.3 = getelementptr i8, ptr %into, i64 48
  store <8 x i16> %s3.3, ptr %into.3, align 16
  %into.4 = getelementptr i8, ptr %into, i64 64
  store <8 x i16> %s3.4, ptr %into.4, align 16
  %into.5 = getelementptr i8, ptr %into, i64 80
  store <8 x i16> %s3.5, ptr %into.5, align 16
  %into.6 = getelementptr i8, ptr %into, i64 96
  store <8 x i16> %s3.6, ptr %into.6, align 16
  %into.7 = getelementptr i8, ptr %into, i64 112
  store <8 x i16> %s3.7, ptr %into.7, align 16
  ret void
}

define void @gpulease_turn_matrix(ptr noalias %from, ptr noalias %into) {
  call void @turn(ptr %from, ptr %into)
  ret void
}

; Rows of 16 bytes from where each lane's offset says, one after the other.
define void @gpulease_load_rows(ptr %base, ptr noalias %offsets, ptr noalias %into, i64 %matrices, i1 %turned) {
entry:
  %room = alloca [4 x [128 x i8]], align 64
  %to = select i1 %turned, ptr %room, ptr %into
  %rows = shl i64 %matrices, 3
  br label %row
row:
  %n = phi i64 [ 0, %entry ], [ %n.next, %row ]
  %offset.at = getelementptr i64, ptr %offsets, i64 %n
  %offset = load i64, ptr %offset.at
  %from = getelementptr i8, ptr %base, i64 %offset
  %words = load <4 x i32>, ptr %from, align 16
  %at = getelementptr <4 x i32>, ptr %to, i64 %n
  store <4 x i32> %words, ptr %at, align 16
  %n.next = add i64 %n, 1
  %more = icmp ult i64 %n.next, %rows
  br i1 %more, label %row, label %loaded
loaded:
  br i1 %turned, label %matrix, label %done
matrix:
  %m = phi i64 [ 0, %loaded ], [ %m.next, %matrix ]
  %m.from = getelementptr [128 x i8], ptr %room, i64 %m
  %m.into = getelementptr [128 x i8], ptr %into, i64 %m
  call void @turn(ptr %m.from, ptr %m.into)
  %m.next = add i64 %m, 1
  %more.matrices = icmp ult i64 %m.next, %matrices
  br i1 %more.matrices, label %matrix, label %done
done:
  ret void
}

; The other way round.
define void @gpulease_store_rows(ptr %base, ptr noalias %offsets, ptr noalias %from, i64 %matrices, i1 %turned) {
entry:
  %room = alloca [4 x [128 x i8]], align 64
  %source = select i1 %turned, ptr %room, ptr %from
  %rows = shl i64 %matrices, 3
  br i1 %turned, label %matrix, label %row
matrix:
  %m = phi i64 [ 0, %entry ], [ %m.next, %matrix ]
  %m.from = getelementptr [128 x i8], ptr %from, i64 %m
  %m.into = getelementptr [128 x i8], ptr %room, i64 %m
  call void @turn(ptr %m.from, ptr %m.into)
  %m.next = add i64 %m, 1
  %more.matrices = icmp ult i64 %m.next, %matrices
  br i1 %more.matrices, label %matrix, label %row
row:
  %n = phi i64 [ 0, %entry ], [ 0, %matrix ], [ %n.next, %row ]
  %at = getelementptr <4 x i32>, ptr %source, i64 %n
  %words = load <4 x i32>, ptr %at, align 16
  %offset.at = getelementptr i64, ptr %offsets, i64 %n
  %offset = load i64, ptr %offset.at
  %into = getelementptr i8, ptr %base, i64 %offset
  store <4 x i32> %words, ptr %into, align 16
  %n.next = add i64 %n, 1
  %more = icmp ult i64 %n.next, %rows
  br i1 %more, label %row, label %done
done:
  ret void
}
