; Copies of rows that are converted on their way, for `conversions`. It is a template: $line elements of type $stored, of
; $size bytes, are a line of the caches. tvm_deconv_narrow, which precedes it, makes them of those of type $sum. Lines are
; stored by $store: at multiples of 64 bytes if $past is 63, and anywhere if it is 0.

; Convert %count elements from any address to any other. If whole lines go past the caches, the part before the first and
; that after the last are stored as usual; else the last line may overlap the one before. Inlined, the function would count
; in memory where its caller has no registers left.
define hidden i32 @tvm_deconv_convert(ptr noalias %to, ptr noalias %from, i32 %count) noinline {
entry:
  %whole = alloca <$line x $sum>, align 64
  %part = alloca <$line x $stored>, align 64
  %elements = zext i32 %count to i64
  %several = icmp uge i64 %elements, $line
  br i1 %several, label %row, label %few
few:
  %read = mul i32 %count, 4
  call void @llvm.memcpy.p0.p0.i32(ptr %whole, ptr %from, i32 %read, i1 false)
  %few.sums = load <$line x $sum>, ptr %whole, align 64
  %few.stored = call <$line x $stored> @tvm_deconv_narrow(<$line x $sum> %few.sums)
  store <$line x $stored> %few.stored, ptr %part, align 64
  %written = mul i32 %count, $size
  call void @llvm.memcpy.p0.p0.i32(ptr %to, ptr %part, i32 %written, i1 false)
  ret i32 0
row:
  %address = ptrtoint ptr %to to i64
  %negative = sub i64 0, %address
  %gap = and i64 %negative, $past
  %begin = udiv i64 %gap, $size
  %aligned = icmp eq i64 %gap, 0
  br i1 %aligned, label %lines, label %head
head:
  %head.sums = load <$line x $sum>, ptr %from, align 4
  %head.stored = call <$line x $stored> @tvm_deconv_narrow(<$line x $sum> %head.sums)
  store <$line x $stored> %head.stored, ptr %part, align 64
  %before = trunc i64 %gap to i32
  call void @llvm.memcpy.p0.p0.i32(ptr %to, ptr %part, i32 %before, i1 false)
  br label %lines
lines:
  %end = sub i64 %elements, $line
  %some = icmp ule i64 %begin, %end
  br i1 %some, label %line, label %rest
line:
  %at = phi i64 [ %begin, %lines ], [ %next, %line ]
  %source = getelementptr $sum, ptr %from, i64 %at
  %target = getelementptr $stored, ptr %to, i64 %at
  %sums = load <$line x $sum>, ptr %source, align 4
  %stored = call <$line x $stored> @tvm_deconv_narrow(<$line x $sum> %sums)
  store <$line x $stored> %stored, ptr %target, $store
  %next = add i64 %at, $line
  %more = icmp ule i64 %next, %end
  br i1 %more, label %line, label %rest
rest:
  %done = phi i64 [ %begin, %lines ], [ %next, %line ]
  %left = sub i64 %elements, %done
  %nothing = icmp eq i64 %left, 0
  br i1 %nothing, label %all, label %tail
tail:
  %last = getelementptr $sum, ptr %from, i64 %end
  %tail.sums = load <$line x $sum>, ptr %last, align 4
  %tail.stored = call <$line x $stored> @tvm_deconv_narrow(<$line x $sum> %tail.sums)
  %overlaps = icmp eq i64 $past, 0
  br i1 %overlaps, label %over, label %apart
over:
  %final = getelementptr $stored, ptr %to, i64 %end
  store <$line x $stored> %tail.stored, ptr %final, align $size
  br label %all
apart:
  store <$line x $stored> %tail.stored, ptr %part, align 64
  %skipped = sub i64 $line, %left
  %first = getelementptr $stored, ptr %part, i64 %skipped
  %behind = getelementptr $stored, ptr %to, i64 %done
  %few.left = trunc i64 %left to i32
  %after = mul i32 %few.left, $size
  call void @llvm.memcpy.p0.p0.i32(ptr %behind, ptr %first, i32 %after, i1 false)
  br label %all
all:
  ret i32 0
}

declare void @llvm.memcpy.p0.p0.i32(ptr, ptr, i32, i1)
