; Narrowing of 32 finished outputs to bfloat16, for `convert_row.ll`; $round rounds 16 of them.

define hidden <32 x i16> @tvm_deconv_narrow(<32 x float> %sums) alwaysinline {
  %low = shufflevector <32 x float> %sums, <32 x float> poison, <16 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7, i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15>
  %high = shufflevector <32 x float> %sums, <32 x float> poison, <16 x i32> <i32 16, i32 17, i32 18, i32 19, i32 20, i32 21, i32 22, i32 23, i32 24, i32 25, i32 26, i32 27, i32 28, i32 29, i32 30, i32 31>
  %first = call <16 x i16> @$round(<16 x float> %low)
  %second = call <16 x i16> @$round(<16 x float> %high)
  %stored = shufflevector <16 x i16> %first, <16 x i16> %second, <32 x i32> <i32 0, i32 1, i32 2, i32 3, i32 4, i32 5, i32 6, i32 7, i32 8, i32 9, i32 10, i32 11, i32 12, i32 13, i32 14, i32 15, i32 16, i32 17, i32 18, i32 19, i32 20, i32 21, i32 22, i32 23, i32 24, i32 25, i32 26, i32 27, i32 28, i32 29, i32 30, i32 31>
  ret <32 x i16> %stored
}
