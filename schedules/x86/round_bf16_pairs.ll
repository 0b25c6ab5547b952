; Rounding of two vectors of 256 bits to one of bfloat16, with the function of `round_bf16.ll`. It is a template: $exempt is
; true if a NaN is one of bfloat16, which needs no care.

; Return %sums, rounded to nearest even. NaN is rare: one comparison looks at both vectors, and then all are rounded apart.
define hidden <16 x i16> @tvm_deconv_round_pairs(<16 x float> %sums) alwaysinline {
  %bits = bitcast <16 x float> %sums to <16 x i32>
  %high = lshr <16 x i32> %bits, splat (i32 16)
  %odd = and <16 x i32> %high, splat (i32 1)
  %half = add <16 x i32> %bits, splat (i32 32767)
  %raised = add <16 x i32> %half, %odd
  %upper = lshr <16 x i32> %raised, splat (i32 16)
  %usual = trunc <16 x i32> %upper to <16 x i16>
  %first = shufflevector <16 x float> %sums, <16 x float> poison, <8 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7>
  %second = shufflevector <16 x float> %sums, <16 x float> poison, <8 x i32> <i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15>
  %nan = fcmp uno <8 x float> %first, %second
  %any = bitcast <8 x i1> %nan to i8
  %none = icmp eq i8 %any, 0
  %certain = or i1 %none, $exempt
  br i1 %certain, label %done, label %some, !prof !5

some:
  %exact = call <16 x i16> @tvm_deconv_round_integers_x16(<16 x float> %sums)
  br label %done

done:
  %rounded = phi <16 x i16> [ %usual, %0 ], [ %exact, %some ]
  ret <16 x i16> %rounded
}

!5 = !{!"branch_weights", i32 1048576, i32 1}
