; Rounding of a vector of 256 bits of sums to bfloat16.

; Return %sums, rounded to nearest even. NaN must be those of bfloat16. The last bit that stays, as the sign of another
; vector, chooses what is added: an instruction less than to add that bit. Two more bring the upper halves together. LLVM
; would make eight instructions of these five.
define hidden <8 x i16> @tvm_deconv_round_vector_x8(<8 x float> %sums) alwaysinline {
  %bits = bitcast <8 x float> %sums to <8 x i32>
  %last = shl <8 x i32> %bits, splat (i32 15)
  %added = call <8 x i32> asm "vblendvps $3, $2, $1, $0", "=x,x,x,x"(<8 x i32> splat (i32 32767), <8 x i32> splat (i32 32768), <8 x i32> %last)
  %raised = add <8 x i32> %bits, %added
  %upper = call <4 x i64> asm "vpshufb $2, $1, $0", "=x,x,x"(<8 x i32> %raised, <32 x i8> <i8 2, i8 3, i8 6, i8 7, i8 10, i8 11, i8 14, i8 15, i8 -1, i8 -1, i8 -1, i8 -1, i8 -1, i8 -1, i8 -1, i8 -1, i8 2, i8 3, i8 6, i8 7, i8 10, i8 11, i8 14, i8 15, i8 -1, i8 -1, i8 -1, i8 -1, i8 -1, i8 -1, i8 -1, i8 -1>)
  %low = shufflevector <4 x i64> %upper, <4 x i64> poison, <2 x i32> <i32 0, i32 2>
  %rounded = bitcast <2 x i64> %low to <8 x i16>
  ret <8 x i16> %rounded
}
