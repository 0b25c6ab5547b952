; Rounding of sums to bfloat16 by AVX-512 BF16, also where the instruction makes zeros of what is not zero; with the
; function of `round_bf16.ll`. It is a template: $lanes is the number of sums in a vector, and $bits its size.

; Return %sums, rounded to nearest even. Denormal ones are rare: then all are rounded as integers.
define hidden <$lanes x i16> @tvm_deconv_round_exactly_x$lanes(<$lanes x float> %sums) alwaysinline {
  %converted = call <$lanes x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.$bits(<$lanes x float> %sums)
  %usual = bitcast <$lanes x bfloat> %converted to <$lanes x i16>
  %denormal = call <$lanes x i1> @llvm.x86.avx512.fpclass.ps.$bits(<$lanes x float> %sums, i32 32)
  %any = bitcast <$lanes x i1> %denormal to i$lanes
  %none = icmp eq i$lanes %any, 0
  br i1 %none, label %done, label %some, !prof !4

some:
  %exact = call <$lanes x i16> @tvm_deconv_round_integers_x$lanes(<$lanes x float> %sums)
  br label %done

done:
  %rounded = phi <$lanes x i16> [ %usual, %0 ], [ %exact, %some ]
  ret <$lanes x i16> %rounded
}

declare <$lanes x bfloat> @llvm.x86.avx512bf16.cvtneps2bf16.$bits(<$lanes x float>)
declare <$lanes x i1> @llvm.x86.avx512.fpclass.ps.$bits(<$lanes x float>, i32)

!4 = !{!"branch_weights", i32 1048576, i32 1}
