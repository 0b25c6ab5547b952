; Rounding of two vectors of sums to words of bfloat16 by AVX-512 BF16, for sums whose denormal ones may become zeros. It is
; a template: $lanes is the number of sums in a vector, of $double in two, $bits its size, and $alternating the numbers of
; the lanes of both in turns.

; Return the words of %even and %odd, rounded to nearest even.
define hidden <$lanes x i32> @tvm_deconv_join_flushed_x$lanes(<$lanes x float> %even, <$lanes x float> %odd) alwaysinline {
  %converted = call <$double x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.$bits(<$lanes x float> %odd, <$lanes x float> %even)
  %both = bitcast <$double x bfloat> %converted to <$double x i16>
  %shorts = shufflevector <$double x i16> %both, <$double x i16> poison, <$double x i32> <$alternating>
  %words = bitcast <$double x i16> %shorts to <$lanes x i32>
  ret <$lanes x i32> %words
}

declare <$double x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.$bits(<$lanes x float>, <$lanes x float>)
