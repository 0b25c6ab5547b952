; Stores of the part of a vector that lies within a row, for `register_parts`. It is a template: $type is the type of an
; element and $lanes their number, less than the bits of a number of $wide.

; Store those lanes of %value whose number, counted from %first, lies within a %row of %extent elements. By its TBAA
; metadata, in the terms of TVM's own, the store changes the output alone.
define hidden i32 @tvm_deconv_store_part(ptr %row, i32 %first, i32 %extent, <$lanes x $type> %value) alwaysinline {
  %before = sub i32 0, %first
  %left = sub i32 %extent, %first
  %begin.0 = call i32 @llvm.smax.i32(i32 %before, i32 0)
  %begin = call i32 @llvm.smin.i32(i32 %begin.0, i32 $lanes)
  %end.0 = call i32 @llvm.smax.i32(i32 %left, i32 0)
  %end = call i32 @llvm.smin.i32(i32 %end.0, i32 $lanes)
  %begin.wide = zext i32 %begin to i$wide
  %end.wide = zext i32 %end to i$wide
  %from = shl i$wide -1, %begin.wide
  %behind = shl i$wide -1, %end.wide
  %until = xor i$wide %behind, -1
  %taken = and i$wide %from, %until
  %bits = trunc i$wide %taken to i$lanes
  %mask = bitcast i$lanes %bits to <$lanes x i1>
  %offset = sext i32 %first to i64
  %to = getelementptr $type, ptr %row, i64 %offset
  call void @llvm.masked.store.v${lanes}${short}.p0(<$lanes x $type> %value, ptr %to, i32 $bytes, <$lanes x i1> %mask), !tbaa !11
  ret i32 0
}

declare void @llvm.masked.store.v${lanes}${short}.p0(<$lanes x $type>, ptr, i32, <$lanes x i1>)
declare i32 @llvm.smax.i32(i32, i32)
declare i32 @llvm.smin.i32(i32, i32)

!11 = !{!12, !12, i64 0}
!12 = !{!"tvm_deconv_output", !13, i64 0}
!13 = !{!"tvm-tbaa"}
