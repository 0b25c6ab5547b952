; Narrowing of vectors of $lanes finished integers, $arguments, which bytes hold, to words of bytes in their order. It is
; a template, for `rounding.byte_joining`: the instructions $to_words and $to_bytes work within lanes of 128 bits, and
; $order brings what they make into its order.

define hidden <$quads x i32> @$name($arguments) alwaysinline {
$halves
  %bytes = call <$size x i8> @llvm.x86.$to_bytes(<$half x i16> %low, <$half x i16> %high)
  %parts = bitcast <$size x i8> %bytes to <$quads x i32>
  %words = shufflevector <$quads x i32> %parts, <$quads x i32> poison, <$quads x i32> <$order>
  ret <$quads x i32> %words
}

declare <$double x i16> @llvm.x86.$to_words(<$lanes x i32>, <$lanes x i32>)
declare <$size x i8> @llvm.x86.$to_bytes(<$half x i16>, <$half x i16>)
