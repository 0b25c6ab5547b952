; Rows of elements of 16 bits that become float32 with zeros around them, for `row_widening`. It is a template: $stored is
; the type of elements. tvm_deconv_wide_vector and tvm_deconv_wide, which precede it, make float32 of eight and of one.

; Fill a row of %length elements with %zeros zeros, %count elements from %from, and zeros up to its end.
; The row begins at %to; the call names its last element, %last, for TVM alone. Vectors of zeros reach into the part of the
; elements, which follow, and the last vector of these may write again what the one before it wrote.
define hidden i32 @tvm_deconv_widen(ptr noalias %to, ptr %last, ptr noalias %from, i32 %zeros, i32 %count, i32 %length) noinline {
entry:
  %before = zext i32 %zeros to i64
  %elements = zext i32 %count to i64
  %size = zext i32 %length to i64
  %end = add i64 %before, %elements
  %begin = getelementptr float, ptr %to, i64 %before
  %wide.row = icmp uge i64 %size, 8
  br i1 %wide.row, label %edges, label %few.zeros
edges:
  %final = sub i64 %size, 8
  %some.before = icmp ne i64 %before, 0
  br i1 %some.before, label %head, label %behind
head:
  %head.at = phi i64 [ 0, %edges ], [ %head.next, %head ]
  %head.place = call i64 @llvm.umin.i64(i64 %head.at, i64 %final)
  %head.to = getelementptr float, ptr %to, i64 %head.place
  store <8 x float> zeroinitializer, ptr %head.to, align 4
  %head.next = add i64 %head.at, 8
  %head.more = icmp ult i64 %head.next, %before
  br i1 %head.more, label %head, label %behind
behind:
  %some.behind = icmp ult i64 %end, %size
  br i1 %some.behind, label %tail, label %data
tail:
  %tail.at = phi i64 [ %end, %behind ], [ %tail.next, %tail ]
  %tail.place = call i64 @llvm.umin.i64(i64 %tail.at, i64 %final)
  %tail.to = getelementptr float, ptr %to, i64 %tail.place
  store <8 x float> zeroinitializer, ptr %tail.to, align 4
  %tail.next = add i64 %tail.at, 8
  %tail.more = icmp ult i64 %tail.next, %size
  br i1 %tail.more, label %tail, label %data
few.zeros:
  %zero.at = phi i64 [ 0, %entry ], [ %zero.next, %few.zero ]
  %zero.more = icmp ult i64 %zero.at, %size
  br i1 %zero.more, label %few.zero, label %data
few.zero:
  %zero.to = getelementptr float, ptr %to, i64 %zero.at
  store float 0.0, ptr %zero.to, align 4
  %zero.next = add i64 %zero.at, 1
  br label %few.zeros
data:
  %vectors = icmp uge i64 %elements, 8
  br i1 %vectors, label %vector.begin, label %few.begin
vector.begin:
  %rest = sub i64 %elements, 8
  br label %vector
vector:
  %at = phi i64 [ 0, %vector.begin ], [ %next, %vector ]
  %place = call i64 @llvm.umin.i64(i64 %at, i64 %rest)
  %source = getelementptr $stored, ptr %from, i64 %place
  %target = getelementptr float, ptr %begin, i64 %place
  %vector.narrow = load <8 x $stored>, ptr %source, align 2
  %vector.wide = call <8 x float> @tvm_deconv_wide_vector(<8 x $stored> %vector.narrow)
  store <8 x float> %vector.wide, ptr %target, align 4
  %next = add i64 %at, 8
  %more = icmp ult i64 %next, %elements
  br i1 %more, label %vector, label %done
few.begin:
  br label %few
few:
  %few.at = phi i64 [ 0, %few.begin ], [ %few.next, %element ]
  %few.more = icmp ult i64 %few.at, %elements
  br i1 %few.more, label %element, label %done
element:
  %few.source = getelementptr $stored, ptr %from, i64 %few.at
  %few.target = getelementptr float, ptr %begin, i64 %few.at
  %few.narrow = load $stored, ptr %few.source, align 2
  %few.wide = call float @tvm_deconv_wide($stored %few.narrow)
  store float %few.wide, ptr %few.target, align 4
  %few.next = add i64 %few.at, 1
  br label %few
done:
  ret i32 0
}

declare i64 @llvm.umin.i64(i64, i64)
