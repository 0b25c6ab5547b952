; Elements of bfloat16 as float32, for `widen_row.ll`.

define hidden <8 x float> @tvm_deconv_wide_vector(<8 x i16> %narrow) alwaysinline {
  %bits = zext <8 x i16> %narrow to <8 x i32>
  %upper = shl <8 x i32> %bits, <i32 16, i32 16, i32 16, i32 16, i32 16, i32 16, i32 16, i32 16>
  %wide = bitcast <8 x i32> %upper to <8 x float>
  ret <8 x float> %wide
}

define hidden float @tvm_deconv_wide(i16 %narrow) alwaysinline {
  %bits = zext i16 %narrow to i32
  %upper = shl i32 %bits, 16
  %wide = bitcast i32 %upper to float
  ret float %wide
}
