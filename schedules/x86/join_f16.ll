; Rounding of two vectors of sums to words of float16. It is a template: $lanes is the number of sums in a vector, of
; $double in two, and $alternating the numbers of the lanes of both in turns.

; Return the words of %even and %odd, rounded to nearest even.
define hidden <$lanes x i32> @tvm_deconv_join_f16_x$lanes(<$lanes x float> %even, <$lanes x float> %odd) alwaysinline {
  %first = fptrunc <$lanes x float> %even to <$lanes x half>
  %second = fptrunc <$lanes x float> %odd to <$lanes x half>
  %halves = shufflevector <$lanes x half> %first, <$lanes x half> %second, <$double x i32> <$alternating>
  %words = bitcast <$double x half> %halves to <$lanes x i32>
  ret <$lanes x i32> %words
}
