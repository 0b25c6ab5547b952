; Rounding of two vectors of sums to words of bfloat16 by integer arithmetic. It is a template: $lanes is the number of
; sums in a vector, and $double in two; $blended are the numbers of every other lane of two vectors of $double, in turns.

; Return the words of %even and %odd, rounded to nearest even. The upper and the lower halves of both sums are blended
; to where they belong. An upper half goes up from a lower one of 0x8000 on; that of an even one is a step less before, so
; that ties go to even. NaN must be those of bfloat16.
define hidden <$lanes x i32> @tvm_deconv_join_integers_x$lanes(<$lanes x float> %even, <$lanes x float> %odd) alwaysinline {
  %bits.even = bitcast <$lanes x float> %even to <$lanes x i32>
  %bits.odd = bitcast <$lanes x float> %odd to <$lanes x i32>
  %high.even = lshr <$lanes x i32> %bits.even, splat (i32 16)
  %low.odd = shl <$lanes x i32> %bits.odd, splat (i32 16)
  %halves.even = bitcast <$lanes x i32> %bits.even to <$double x i16>
  %halves.odd = bitcast <$lanes x i32> %bits.odd to <$double x i16>
  %highs.even = bitcast <$lanes x i32> %high.even to <$double x i16>
  %lows.odd = bitcast <$lanes x i32> %low.odd to <$double x i16>
  %high = shufflevector <$double x i16> %highs.even, <$double x i16> %halves.odd, <$double x i32> <$blended>
  %low = shufflevector <$double x i16> %halves.even, <$double x i16> %lows.odd, <$double x i32> <$blended>
  %not.high = xor <$double x i16> %high, splat (i16 -1)
  %even.last = and <$double x i16> %not.high, splat (i16 1)
  %lower = call <$double x i16> @llvm.usub.sat.v${double}i16(<$double x i16> %low, <$double x i16> %even.last)
  %carry = ashr <$double x i16> %lower, splat (i16 15)
  %rounded = sub <$double x i16> %high, %carry
  %words = bitcast <$double x i16> %rounded to <$lanes x i32>
  ret <$lanes x i32> %words
}

declare <$double x i16> @llvm.usub.sat.v${double}i16(<$double x i16>, <$double x i16>)
