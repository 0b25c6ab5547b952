; Rounding of two vectors of sums to words of bfloat16 by integer arithmetic, with the function of `round_bf16.ll`. It is
; a template: $lanes is the number of sums in a vector, of $double in two, and $alternating the numbers of the lanes of
; both in turns. $exempt is true if a NaN is one of bfloat16, which needs no care.

; Return the words of %even and %odd, rounded to nearest even. Their halves are where they belong without a shuffle. NaN is
; rare: one comparison looks at both vectors, and then all are rounded apart.
define hidden <$lanes x i32> @tvm_deconv_join_integers_x$lanes(<$lanes x float> %even, <$lanes x float> %odd) alwaysinline {
  %bits.even = bitcast <$lanes x float> %even to <$lanes x i32>
  %bits.odd = bitcast <$lanes x float> %odd to <$lanes x i32>
  %high.even = lshr <$lanes x i32> %bits.even, splat (i32 16)
  %high.odd = lshr <$lanes x i32> %bits.odd, splat (i32 16)
  %last.even = and <$lanes x i32> %high.even, splat (i32 1)
  %last.odd = and <$lanes x i32> %high.odd, splat (i32 1)
  %half.even = add <$lanes x i32> %bits.even, splat (i32 32767)
  %half.odd = add <$lanes x i32> %bits.odd, splat (i32 32767)
  %raised.even = add <$lanes x i32> %half.even, %last.even
  %raised.odd = add <$lanes x i32> %half.odd, %last.odd
  %lower = lshr <$lanes x i32> %raised.even, splat (i32 16)
  %upper = and <$lanes x i32> %raised.odd, splat (i32 -65536)
  %usual = or <$lanes x i32> %lower, %upper
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
