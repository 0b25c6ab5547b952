; Rounding of two vectors of sums to words of bfloat16 by AVX-512 BF16, also where the instruction makes zeros of what is
; not zero; with the function of `round_bf16.ll`. It is a template: $lanes is the number of sums in a vector, of $double
; in two, $bits its size, and $alternating the numbers of the lanes of both in turns.

; Return the words of %even and %odd, rounded to nearest even. Denormal sums are rare: then all are rounded as integers.
define hidden <$lanes x i32> @tvm_deconv_join_exactly_x$lanes(<$lanes x float> %even, <$lanes x float> %odd) alwaysinline {
  %converted = call <$double x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.$bits(<$lanes x float> %odd, <$lanes x float> %even)
  %both = bitcast <$double x bfloat> %converted to <$double x i16>
  %usual = shufflevector <$double x i16> %both, <$double x i16> poison, <$double x i32> <$alternating>
  %denormal.even = call <$lanes x i1> @llvm.x86.avx512.fpclass.ps.$bits(<$lanes x float> %even, i32 32)
  %denormal.odd = call <$lanes x i1> @llvm.x86.avx512.fpclass.ps.$bits(<$lanes x float> %odd, i32 32)
  %denormal = or <$lanes x i1> %denormal.even, %denormal.odd
  %any = bitcast <$lanes x i1> %denormal to i$lanes
  %none = icmp eq i$lanes %any, 0
  br i1 %none, label %done, label %some, !prof !6

some:
  %first = call <$lanes x i16> @tvm_deconv_round_integers_x$lanes(<$lanes x float> %even)
  %second = call <$lanes x i16> @tvm_deconv_round_integers_x$lanes(<$lanes x float> %odd)
  %exact = shufflevector <$lanes x i16> %first, <$lanes x i16> %second, <$double x i32> <$alternating>
  br label %done

done:
  %rounded = phi <$double x i16> [ %usual, %0 ], [ %exact, %some ]
  %words = bitcast <$double x i16> %rounded to <$lanes x i32>
  ret <$lanes x i32> %words
}

declare <$double x bfloat> @llvm.x86.avx512bf16.cvtne2ps2bf16.$bits(<$lanes x float>, <$lanes x float>)
declare <$lanes x i1> @llvm.x86.avx512.fpclass.ps.$bits(<$lanes x float>, i32)

!6 = !{!"branch_weights", i32 1048576, i32 1}
