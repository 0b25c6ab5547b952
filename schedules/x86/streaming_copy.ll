; Copies past the caches, for `stores.lower_streaming_stores` and `col2im_rows`. A line of the caches is 64 bytes.

; Copy %length bytes from any address to any other. Whole lines of %to are stored past the caches; the bytes before the
; first whole line and after the last are stored as usual. They share their lines with the neighbouring rows. The line
; in which the next row ends is asked for, if that row follows this one and ends within a line.
define hidden i32 @tvm_deconv_stream(ptr noalias %to, ptr noalias %from, i32 %length) {
entry:
  %bytes = zext i32 %length to i64
  %address = ptrtoint ptr %to to i64
  %twice = shl i64 %bytes, 1
  %following = add i64 %address, %twice
  %part = and i64 %following, 63
  %whole = icmp eq i64 %part, 0
  %ending = getelementptr i8, ptr %to, i64 %twice
  %fetched = select i1 %whole, ptr %from, ptr %ending
  call void @llvm.prefetch.p0(ptr %fetched, i32 1, i32 3, i32 1)
  %negative = sub i64 0, %address
  %gap = and i64 %negative, 63
  %short = icmp ult i64 %gap, %bytes
  %head = select i1 %short, i64 %gap, i64 %bytes
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %head, i1 false)
  %left = sub i64 %bytes, %head
  %lines = and i64 %left, -64
  %end = add i64 %head, %lines
  %any = icmp ne i64 %lines, 0
  br i1 %any, label %line, label %rest
line:
  %at = phi i64 [ %head, %entry ], [ %next, %line ]
  %source = getelementptr i8, ptr %from, i64 %at
  %target = getelementptr i8, ptr %to, i64 %at
  %value = load <16 x i32>, ptr %source, align 1
  store <16 x i32> %value, ptr %target, align 64, !nontemporal !0
  %next = add i64 %at, 64
  %more = icmp ult i64 %next, %end
  br i1 %more, label %line, label %rest
rest:
  %last = getelementptr i8, ptr %from, i64 %end
  %behind = getelementptr i8, ptr %to, i64 %end
  %tail = sub i64 %bytes, %end
  call void @llvm.memcpy.p0.p0.i64(ptr %behind, ptr %last, i64 %tail, i1 false)
  ret i32 0
}

; Complete all stores past the caches before any later store.
define hidden i32 @tvm_deconv_fence() {
  call void @llvm.x86.sse.sfence()
  ret i32 0
}

declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare void @llvm.x86.sse.sfence()
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
!0 = !{i32 1}
