; Rounding of sums to bfloat16 by integer arithmetic. It is a template: $lanes is the number of sums in a vector.

; Return %sums, rounded to nearest even; NaN stays NaN. That it is selected last keeps LLVM from narrowing and storing in
; one instruction, which takes AVX-512 longer than two.
define hidden <$lanes x i16> @tvm_deconv_round_integers_x$lanes(<$lanes x float> %sums) alwaysinline {
  %bits = bitcast <$lanes x float> %sums to <$lanes x i32>
  %high = lshr <$lanes x i32> %bits, splat (i32 16)
  %odd = and <$lanes x i32> %high, splat (i32 1)
  %half = add <$lanes x i32> %bits, splat (i32 32767)
  %raised = add <$lanes x i32> %half, %odd
  %upper = lshr <$lanes x i32> %raised, splat (i32 16)
  %short = trunc <$lanes x i32> %upper to <$lanes x i16>
  %nan = fcmp uno <$lanes x float> %sums, zeroinitializer
  %rounded = select <$lanes x i1> %nan, <$lanes x i16> splat (i16 32704), <$lanes x i16> %short
  ret <$lanes x i16> %rounded
}
