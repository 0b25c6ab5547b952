; Products of pairs of 16-bit integers, for `dot`. It is a template: $lanes is the number of words in a vector, of
; $factors factors; $name is that of the function.

; Return %sums plus, in each lane, the products of the pairs of that lane of %first and of %second. With AVX-512 VNNI, LLVM
; makes one instruction of it.
define hidden <$lanes x i32> @$name(<$lanes x i32> %sums, <$lanes x i32> %first, <$lanes x i32> %second) alwaysinline {
  %a = bitcast <$lanes x i32> %first to <$factors x i16>
  %b = bitcast <$lanes x i32> %second to <$factors x i16>
  %products = call <$lanes x i32> @$pairs(<$factors x i16> %a, <$factors x i16> %b)
  %total = add <$lanes x i32> %sums, %products
  ret <$lanes x i32> %total
}

declare <$lanes x i32> @$pairs(<$factors x i16>, <$factors x i16>)
