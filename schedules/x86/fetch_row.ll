; Prefetches of a row of data, for `row_prefetching.fetch_ahead` and `col2im_rows`.

; Ask for the %bytes from %first on.
define hidden i32 @tvm_deconv_fetch_row(ptr %first, i32 %bytes) alwaysinline {
entry:
  br label %line

line:
  %done = phi i32 [ 0, %entry ], [ %next, %line ]
  %at = getelementptr i8, ptr %first, i32 %done
  call void @llvm.prefetch.p0(ptr %at, i32 0, i32 3, i32 1)
  %next = add i32 %done, 64
  %more = icmp ult i32 %next, %bytes
  br i1 %more, label %line, label %end

end:
  ret i32 0
}

declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
