; Stores of the part of a vector that lies within a row, for `register_parts`. It is a template: $type is the type of an
; element and $lanes their number, $numbers those of all lanes.

; Store those lanes of %value whose number, counted from %first, lies within a %row of %extent elements. By its TBAA
; metadata, in the terms of TVM's own, the store changes the output alone.
define hidden i32 @tvm_deconv_store_part(ptr %row, i32 %first, i32 %extent, <$lanes x $type> %value) alwaysinline {
  %first.0 = insertelement <$lanes x i32> poison, i32 %first, i64 0
  %firsts = shufflevector <$lanes x i32> %first.0, <$lanes x i32> poison, <$lanes x i32> zeroinitializer
  %extent.0 = insertelement <$lanes x i32> poison, i32 %extent, i64 0
  %extents = shufflevector <$lanes x i32> %extent.0, <$lanes x i32> poison, <$lanes x i32> zeroinitializer
  %places = add <$lanes x i32> %firsts, <$numbers>
  %mask = icmp ult <$lanes x i32> %places, %extents ; places in front of the row are large numbers
  %offset = sext i32 %first to i64
  %to = getelementptr $type, ptr %row, i64 %offset
  call void @llvm.masked.store.v${lanes}${short}.p0(<$lanes x $type> %value, ptr %to, i32 $bytes, <$lanes x i1> %mask), !tbaa !11
  ret i32 0
}

declare void @llvm.masked.store.v${lanes}${short}.p0(<$lanes x $type>, ptr, i32, <$lanes x i1>)

!11 = !{!12, !12, i64 0}
!12 = !{!"tvm_deconv_output", !13, i64 0}
!13 = !{!"tvm-tbaa"}
