; Rounding of two vectors of sums to words of bfloat16 by integer arithmetic, with the function of `round_bf16.ll`. It is
; a template: $lanes is the number of sums in a vector, of $double in two, and $alternating the numbers of the lanes of
; both in turns; $blended are those of every other lane of two vectors of $double, in turns. $exempt is true if a NaN is
; one of bfloat16, which needs no care.

; Return the words of %even and %odd, rounded to nearest even. The upper and the lower halves of both sums are blended
; to where they belong; an upper half goes up from a lower one of 0x8001 on, or of 0x8000 if it is odd. NaN is rare: one
; comparison looks at both vectors, and then all are rounded apart.
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
  %last = and <$double x i16> %high, splat (i16 1)
  %least = sub <$double x i16> splat (i16 -32767), %last
  %up = icmp uge <$double x i16> %low, %least
  %carry = sext <$double x i1> %up to <$double x i16>
  %rounded = sub <$double x i16> %high, %carry
  %usual = bitcast <$double x i16> %rounded to <$lanes x i32>
  %nan = fcmp uno <$lanes x float> %even, %odd
  %any = bitcast <$lanes x i1> %nan to i$lanes
  %none = icmp eq i$lanes %any, 0
  %certain = or i1 %none, $exempt
  br i1 %certain, label %done, label %some, !prof !7

some:
  %first = call <$lanes x i16> @tvm_deconv_round_integers_x$lanes(<$lanes x float> %even)
  %second = call <$lanes x i16> @tvm_deconv_round_integers_x$lanes(<$lanes x float> %odd)
  %shorts = shufflevector <$lanes x i16> %first, <$lanes x i16> %second, <$double x i32> <$alternating>
  %exact = bitcast <$double x i16> %shorts to <$lanes x i32>
  br label %done

done:
  %words = phi <$lanes x i32> [ %usual, %0 ], [ %exact, %some ]
  ret <$lanes x i32> %words
}

!7 = !{!"branch_weights", i32 1048576, i32 1}
