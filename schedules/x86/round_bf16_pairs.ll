; Rounding of two vectors of 256 bits to one of bfloat16.

; Return %sums, rounded to nearest even. NaN must be those of bfloat16.
define hidden <16 x i16> @tvm_deconv_round_pairs(<16 x float> %sums) alwaysinline {
  %bits = bitcast <16 x float> %sums to <16 x i32>
  %high = lshr <16 x i32> %bits, splat (i32 16)
  %odd = and <16 x i32> %high, splat (i32 1)
  %half = add <16 x i32> %bits, splat (i32 32767)
  %raised = add <16 x i32> %half, %odd
  %upper = lshr <16 x i32> %raised, splat (i32 16)
  %rounded = trunc <16 x i32> %upper to <16 x i16>
  ret <16 x i16> %rounded
}
