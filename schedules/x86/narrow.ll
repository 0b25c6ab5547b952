; Narrowing of finished outputs by a conversion of LLVM's, for `convert_row.ll`. It is a template: $line is their number,
; $sum their type, $narrow that of the output, $stored its bits, and $cast the conversion.

define hidden <$line x $stored> @tvm_deconv_narrow(<$line x $sum> %sums) alwaysinline {
  %narrow = $cast <$line x $sum> %sums to <$line x $narrow>
  %stored = bitcast <$line x $narrow> %narrow to <$line x $stored>
  ret <$line x $stored> %stored
}
