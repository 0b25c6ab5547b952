; Copies of rows whose length a call decides, for `stores.lower_row_copies` and `col2im_rows`. A vector is 64 bytes.

; Copy %length bytes. The last vector ends with them, and may write again what the one before it wrote.
define hidden i32 @tvm_deconv_copy(ptr noalias %to, ptr noalias %from, i32 %length) {
entry:
  %bytes = zext i32 %length to i64
  %long = icmp uge i64 %bytes, 64
  br i1 %long, label %begin, label %short
begin:
  %last = sub i64 %bytes, 64
  br label %vector
vector:
  %at = phi i64 [ 0, %begin ], [ %next, %vector ]
  %source = getelementptr i8, ptr %from, i64 %at
  %target = getelementptr i8, ptr %to, i64 %at
  %value = load <16 x i32>, ptr %source, align 1
  store <16 x i32> %value, ptr %target, align 1
  %next = add i64 %at, 64
  %more = icmp ult i64 %next, %last
  br i1 %more, label %vector, label %end
end:
  %final.source = getelementptr i8, ptr %from, i64 %last
  %final.target = getelementptr i8, ptr %to, i64 %last
  %final = load <16 x i32>, ptr %final.source, align 1
  store <16 x i32> %final, ptr %final.target, align 1
  ret i32 0
short:
  call void @llvm.memcpy.p0.p0.i64(ptr %to, ptr %from, i64 %bytes, i1 false)
  ret i32 0
}

; Fill a row with %zeros bytes of zeros, %length bytes from %from, and zeros up to its end.
; The row begins at %to; its last element begins at %last and has %size bytes.
; Vectors inside of the data are plain loads and stores; masked ones are slow, and only fill the edges.
define hidden i32 @tvm_deconv_row(ptr noalias %to, ptr %last, ptr noalias %from, i32 %zeros, i32 %length, i32 %size) {
entry:
  %first = ptrtoint ptr %to to i64
  %final = ptrtoint ptr %last to i64
  %distance = sub i64 %final, %first
  %short = trunc i64 %distance to i32
  %whole = add i32 %short, %size
  %end = add i32 %zeros, %length
  %before = zext i32 %zeros to i64
  %back = sub i64 0, %before
  %origin = getelementptr i8, ptr %from, i64 %back
  %wholes.0 = insertelement <16 x i32> poison, i32 %whole, i32 0
  %wholes = shufflevector <16 x i32> %wholes.0, <16 x i32> poison, <16 x i32> zeroinitializer
  %begins.0 = insertelement <16 x i32> poison, i32 %zeros, i32 0
  %begins = shufflevector <16 x i32> %begins.0, <16 x i32> poison, <16 x i32> zeroinitializer
  %ends.0 = insertelement <16 x i32> poison, i32 %end, i32 0
  %ends = shufflevector <16 x i32> %ends.0, <16 x i32> poison, <16 x i32> zeroinitializer
  br label %vector
vector:
  %at = phi i32 [ 0, %entry ], [ %next, %stored ]
  %next = add i32 %at, 64
  %offset = zext i32 %at to i64
  %target = getelementptr i8, ptr %to, i64 %offset
  %source = getelementptr i8, ptr %origin, i64 %offset
  %begun = icmp uge i32 %at, %zeros
  %fits = icmp ule i32 %next, %end
  %inside = and i1 %begun, %fits
  br i1 %inside, label %copy, label %edge
copy:
  %value = load <16 x i32>, ptr %source, align 1
  store <16 x i32> %value, ptr %target, align 1
  br label %stored
edge:
  %number.0 = insertelement <16 x i32> poison, i32 %at, i32 0
  %number = shufflevector <16 x i32> %number.0, <16 x i32> poison, <16 x i32> zeroinitializer
  %lanes = add <16 x i32> %number, <i32 0, i32 4, i32 8, i32 12, i32 16, i32 20, i32 24, i32 28, i32 32, i32 36, i32 40, i32 44, i32 48, i32 52, i32 56, i32 60>
  %exists = icmp ult <16 x i32> %lanes, %wholes
  %after = icmp uge <16 x i32> %lanes, %begins
  %ahead = icmp ult <16 x i32> %lanes, %ends
  %taken = and <16 x i1> %after, %ahead
  %open = icmp ult i32 %at, %end
  %reached = icmp ugt i32 %next, %zeros
  %some = and i1 %open, %reached
  br i1 %some, label %part, label %store
part:
  %loaded = call <16 x i32> @llvm.masked.load.v16i32.p0(
    ptr %source, i32 1, <16 x i1> %taken, <16 x i32> zeroinitializer)
  br label %store
store:
  %left = phi <16 x i32> [ %loaded, %part ], [ zeroinitializer, %edge ]
  call void @llvm.masked.store.v16i32.p0(<16 x i32> %left, ptr %target, i32 1, <16 x i1> %exists)
  br label %stored
stored:
  %more = icmp ult i32 %next, %whole
  br i1 %more, label %vector, label %done
done:
  ret i32 0
}

declare void @llvm.memcpy.p0.p0.i64(ptr, ptr, i64, i1)
declare <16 x i32> @llvm.masked.load.v16i32.p0(ptr, i32, <16 x i1>, <16 x i32>)
declare void @llvm.masked.store.v16i32.p0(<16 x i32>, ptr, i32, <16 x i1>)
