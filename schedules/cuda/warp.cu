// Templates of device functions for instructions that TVM has no function for. `warp.py` fills in what follows a dollar
// sign, and says what each does. A line with dashes names the function below it.

// ---- ldmatrix
__device__ __forceinline__ void tvm_deconv_ldmatrix_x${count}${suffix}(void* registers, const void* row) {
  unsigned* r = (unsigned*)registers;
  unsigned address = (unsigned)__cvta_generic_to_shared(row);
  asm volatile("ldmatrix.sync.aligned.m8n8.x${count}${modifier}.shared.b16 {${places}}, [%${count}];"
               : ${outputs} : "r"(address) : "memory");
}

// ---- mma
__device__ __forceinline__ void tvm_deconv_mma_${name}(float* c, const void* registers_a, const void* registers_b) {
  const unsigned* a = (const unsigned*)registers_a;
  const unsigned* b = (const unsigned*)registers_b;
  asm volatile("mma.sync.aligned.m16n8k${terms}.row.col.f32.${name}.${name}.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// ---- tf32
__device__ __forceinline__ float tvm_deconv_tf32(float value) {
  unsigned rounded;
  asm volatile("cvt.rna.tf32.f32 %0, %1;" : "=r"(rounded) : "f"(value));
  return __uint_as_float(rounded);
}

// ---- high
__device__ __forceinline__ float tvm_deconv_high(float value) {
  unsigned bits = __float_as_uint(value), rounded = (bits + 0x1000u) & 0xffffe000u;
  return __uint_as_float(fabsf(value) < 3.4011e38f ? rounded : bits & 0xbf800000u);
}

// ---- low
__device__ __forceinline__ float tvm_deconv_low(float value, float high) {
  return __uint_as_float(__float_as_uint(value - high) & 0xffffe000u);
}

// ---- copy
__device__ __forceinline__ void tvm_deconv_copy${size}(void* to, const void* from, bool exists) {
  unsigned address = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.${cache}.shared.global [%0], [%1], ${size}, %2;"
               :: "r"(address), "l"(from), "r"(exists ? ${size} : 0) : "memory");
}

// ---- copy_by_elements
__device__ __forceinline__ void tvm_deconv_copy${size}_by${each}(void* to, const void* from, bool exists) {
  union { ${whole} whole; ${element} each[${count}]; } v;
  for (int i = 0; i < ${count}; ++i) v.each[i] = exists ? ((const ${element}*)from)[i] : (${element})0;
  *(${whole}*)to = v.whole;
}

// ---- commit
__device__ __forceinline__ void tvm_deconv_commit() {
  asm volatile("cp.async.commit_group;" ::: "memory");
}

// ---- wait
__device__ __forceinline__ void tvm_deconv_wait${left}() {
  asm volatile("cp.async.wait_group ${left};" ::: "memory");
}
