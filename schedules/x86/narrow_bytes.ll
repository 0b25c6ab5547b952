; Narrowing of several vectors of finished integers, which bytes hold, to words of bytes in their order. It is a template,
; for `rounding.byte_joining`: halves are the lines that make vectors of 16 bits, low and high, of the arguments. The
; instructions work within lanes of 128 bits, and the last shuffle brings the words into their order.

define hidden <$quads x i32> @$name($arguments) alwaysinline {
$halves
  %bytes = call <$size x i8> @llvm.x86.$to_bytes(<$half x i16> %low, <$half x i16> %high)
  %parts = bitcast <$size x i8> %bytes to <$quads x i32>
  %words = shufflevector <$quads x i32> %parts, <$quads x i32> poison, <$quads x i32> <$order>
  ret <$quads x i32> %words
}

declare <$size x i8> @llvm.x86.$to_bytes(<$half x i16>, <$half x i16>)
