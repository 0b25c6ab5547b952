; Narrowing of several vectors of integers, plus a zero point, to words of bytes in their order, saturated. It is a template,
; for `rounding.byte_joining`: halves are the lines that make vectors of 16 bits, low and high, of the arguments. The
; instructions work within lanes of 128 bits, and the last shuffle brings the words into their order.

define hidden <$quads x i32> @$name($arguments, i32 %zero) alwaysinline {
  %short = trunc i32 %zero to i16
  %one.zero = insertelement <$words x i16> poison, i16 %short, i64 0
  %zeros = shufflevector <$words x i16> %one.zero, <$words x i16> poison, <$words x i32> zeroinitializer
$halves
  %bytes = call <$size x i8> @llvm.x86.$to_bytes(<$half x i16> %low, <$half x i16> %high)
  %parts = bitcast <$size x i8> %bytes to <$quads x i32>
  %words = shufflevector <$quads x i32> %parts, <$quads x i32> poison, <$quads x i32> <$order>
  ret <$quads x i32> %words
}

declare <$size x i8> @llvm.x86.$to_bytes(<$half x i16>, <$half x i16>)
