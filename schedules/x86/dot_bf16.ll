; Products of pairs of bfloat16, and their sums in bfloat16, for `dot`. It is a template: $lanes is the number of words in
; a vector, of $factors factors, and $bits its size; $name is that of the function of products.

; Return %sums plus, in each lane, the products of the pairs of %word and of that lane of %words.
define hidden <$lanes x float> @$name(<$lanes x float> %sums, i32 %word, <$lanes x i32> %words) alwaysinline {
  %one = insertelement <$lanes x i32> poison, i32 %word, i64 0
  %all = shufflevector <$lanes x i32> %one, <$lanes x i32> poison, <$lanes x i32> zeroinitializer
  %a = bitcast <$lanes x i32> %all to <$factors x bfloat>
  %b = bitcast <$lanes x i32> %words to <$factors x bfloat>
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
