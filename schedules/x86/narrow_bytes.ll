; Rounding of several vectors of real numbers to words of bytes in their order, saturated, for `rounding.byte_joining`. It
; is a template: integers are the lines that make vectors of integers of the arguments, the bits of float32, and halves
; those that make vectors of 16 bits of these, low and high. What is too large for 32 bits would become the least integer,
; and is bounded before; what is too small becomes that. The instructions work within lanes of 128 bits, and the last
; shuffle brings the words into their order.

define hidden <$quads x i32> @$name($arguments, i32 %zero) alwaysinline {
  %most = sub i32 $most, %zero
  %bound = sitofp i32 %most to float
  %one.bound = insertelement <$lanes x float> poison, float %bound, i64 0
  %bounds = shufflevector <$lanes x float> %one.bound, <$lanes x float> poison, <$lanes x i32> zeroinitializer
  %short = trunc i32 %zero to i16
  %one.zero = insertelement <$words x i16> poison, i16 %short, i64 0
  %zeros = shufflevector <$words x i16> %one.zero, <$words x i16> poison, <$words x i32> zeroinitializer
$integers
$halves
  %bytes = call <$size x i8> @llvm.x86.$to_bytes(<$half x i16> %low, <$half x i16> %high)
  %parts = bitcast <$size x i8> %bytes to <$quads x i32>
  %words = shufflevector <$quads x i32> %parts, <$quads x i32> poison, <$quads x i32> <$order>
  ret <$quads x i32> %words
}

declare <$size x i8> @llvm.x86.$to_bytes(<$half x i16>, <$half x i16>)
