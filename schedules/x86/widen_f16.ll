; Elements of float16 as float32, for `widen_row.ll`.

define hidden <8 x float> @tvm_deconv_wide_vector(<8 x half> %narrow) alwaysinline {
  %wide = fpext <8 x half> %narrow to <8 x float>
  ret <8 x float> %wide
}

define hidden float @tvm_deconv_wide(half %narrow) alwaysinline {
  %wide = fpext half %narrow to float
  ret float %wide
}
