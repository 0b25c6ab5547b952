; Products of pairs of 16-bit integers, for `dot`. It is a template: $lanes is the number of words in a vector, of
; $factors factors; $name is that of the function.

; Return %sums plus, in each lane, the products of the pairs of %word and of that lane of %words. With AVX-512 VNNI, LLVM
; makes one instruction of it.
define hidden <$lanes x i32> @$name(<$lanes x i32> %sums, i32 %word, <$lanes x i32> %words) alwaysinline {
  %one = insertelement <$lanes x i32> poison, i32 %word, i64 0
  %all = shufflevector <$lanes x i32> %one, <$lanes x i32> poison, <$lanes x i32> zeroinitializer
  %a = bitcast <$lanes x i32> %all to <$factors x i16>
  %b = bitcast <$lanes x i32> %words to <$factors x i16>
  %products = call <$lanes x i32> @$pairs(<$factors x i16> %a, <$factors x i16> %b)
  %total = add <$lanes x i32> %sums, %products
  ret <$lanes x i32> %total
}

declare <$lanes x i32> @$pairs(<$factors x i16>, <$factors x i16>)
