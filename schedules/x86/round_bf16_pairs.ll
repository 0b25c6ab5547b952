; Rounding of two vectors of 256 bits to one of bfloat16, by `join_bf16.ll`, which precedes it.

; Return %sums, rounded to nearest even. NaN must be those of bfloat16.
define hidden <16 x i16> @tvm_deconv_round_pairs(<16 x float> %sums) alwaysinline {
  %first = shufflevector <16 x float> %sums, <16 x float> poison, <8 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7>
  %second = shufflevector <16 x float> %sums, <16 x float> poison, <8 x i32> <i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15>
  %words = call <8 x i32> @tvm_deconv_join_integers_x8(<8 x float> %first, <8 x float> %second)
  %halves = bitcast <8 x i32> %words to <16 x i16>
  %rounded = shufflevector <16 x i16> %halves, <16 x i16> poison, <16 x i32> <i32 0, i32 2, i32 4, i32 6, i32 8, i32 10, i32 12, i32 14, i32 1, i32 3, i32 5, i32 7, i32 9, i32 11, i32 13, i32 15>
  ret <16 x i16> %rounded
}
