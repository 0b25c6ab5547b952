; Products of pairs of bfloat16, and their sums in bfloat16, for `dot`. It is a template: $lanes is the number of words in
; a vector, of $factors factors, and $bits its size; $name is that of the function of products.

; Return %sums plus, in each lane, the products of the pairs of that lane of %first and of %second.
define hidden <$lanes x float> @$name(<$lanes x float> %sums, <$lanes x i32> %first, <$lanes x i32> %second) alwaysinline {
  %a = bitcast <$lanes x i32> %first to <$factors x bfloat>
  %b = bitcast <$lanes x i32> %second to <$factors x bfloat>
  %total = call <$lanes x float> @llvm.x86.avx512bf16.dpbf16ps.$bits(<$lanes x float> %sums, <$factors x bfloat> %a, <$factors x bfloat> %b)
  ret <$lanes x float> %total
}

declare <$lanes x float> @llvm.x86.avx512bf16.dpbf16ps.$bits(<$lanes x float>, <$factors x bfloat>, <$factors x bfloat>)

; Return %sums, rounded to nearest even; denormal ones become zeros.
define hidden <$lanes x i16> @tvm_deconv_round_bf16_x$lanes(<$lanes x float> %sums) alwaysinline {
  %rounded = call <$lanes x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.$bits(<$lanes x float> %sums)
  %stored = bitcast <$lanes x bfloat> %rounded to <$lanes x i16>
  ret <$lanes x i16> %stored
}

declare <$lanes x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.$bits(<$lanes x float>)
