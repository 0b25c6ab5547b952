; Stores of one vector past the caches, for `register_epilogue`. It is a template: $vector is the type of a vector and
; $bytes its size. `streaming_copy.ll` precedes it and defines !0.

; Store %value at %to, a multiple of its size. By its TBAA metadata, in the terms of TVM's own, the store changes the
; output alone; LLVM then keeps the accumulators in registers around it.
define hidden i32 @tvm_deconv_store(ptr %to, $vector %value) alwaysinline {
  store $vector %value, ptr %to, align $bytes, !nontemporal !0, !tbaa !1
  ret i32 0
}

; Return the bytes by which %to exceeds a multiple of the size of a vector.
define hidden i32 @tvm_deconv_misalignment(ptr %to) alwaysinline {
  %address = ptrtoint ptr %to to i64
  %low = trunc i64 %address to i32
  %excess = urem i32 %low, $bytes
  ret i32 %excess
}

!1 = !{!2, !2, i64 0}
!2 = !{!"tvm_deconv_output", !3, i64 0}
!3 = !{!"tvm-tbaa"}
