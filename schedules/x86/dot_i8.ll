; Products of unsigned and signed bytes by VNNI, for `dot`. It is a template: $lanes is the number of words in a
; vector, of $factors factors, and $bits its size; $name is that of the function, and of its factors %a and %b the
; bytes of $unsigned are unsigned and those of $signed signed.

; Return %sums plus, in each lane, the products of the bytes of that lane of %first and of %second.
define hidden <$lanes x i32> @$name(<$lanes x i32> %sums, <$lanes x i32> %first, <$lanes x i32> %second) alwaysinline {
  %a = bitcast <$lanes x i32> %first to <$factors x i8>
  %b = bitcast <$lanes x i32> %second to <$factors x i8>
  %total = call <$lanes x i32> @llvm.x86.avx512.vpdpbusd.$bits(<$lanes x i32> %sums, <$factors x i8> $unsigned, <$factors x i8> $signed)
  ret <$lanes x i32> %total
}

declare <$lanes x i32> @llvm.x86.avx512.vpdpbusd.$bits(<$lanes x i32>, <$factors x i8>, <$factors x i8>)
