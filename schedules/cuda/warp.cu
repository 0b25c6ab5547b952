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
__device__ __forceinline__ void tvm_deconv_mma_${name}(${number}* c, const void* registers_a, const void* registers_b) {
  const unsigned* a = (const unsigned*)registers_a;
  const unsigned* b = (const unsigned*)registers_b;
  asm volatile("mma.sync.aligned.m16n8k${terms}.row.col.${sum}.${a}.${b}.${sum} "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+${register}"(c[0]), "+${register}"(c[1]), "+${register}"(c[2]), "+${register}"(c[3])
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
__device__ __forceinline__ void tvm_deconv_copy${size}${suffix}(void* to, const void* from, bool exists) {
  unsigned address = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("cp.async.${cache}.shared.global [%0], [%1], ${size}, %2;"
               :: "r"(address), "l"(from), "r"(exists ? ${size} : 0) : "memory");
}

// ---- copy_or_fill
__device__ __forceinline__ void tvm_deconv_copy${size}${suffix}(void* to, const void* from, bool exists, unsigned fill) {
  unsigned address = (unsigned)__cvta_generic_to_shared(to);
  asm volatile("{\n\t.reg .pred there;\n\tsetp.ne.u32 there, %2, 0;\n\t"
               "@there cp.async.${cache}.shared.global [%0], [%1], ${size};\n\t"
               "@!there st.shared${vector}.u32 [%0], ${words};\n\t}"
               :: "r"(address), "l"(from), "r"((unsigned)exists), "r"(fill) : "memory");
}

// ---- copy_by_elements
__device__ __forceinline__ void tvm_deconv_copy${size}_by${each}(
    void* to, const void* from, bool exists, unsigned fill) {
  union { ${whole} whole; ${element} each[${count}]; } v;
  for (int i = 0; i < ${count}; ++i) v.each[i] = exists ? ((const ${element}*)from)[i] : (${element})fill;
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

// ---- forget
__device__ __forceinline__ void tvm_deconv_forget(int& thread) {
  asm volatile("" : "+r"(thread));
  __builtin_assume(thread >= 0 && thread < 1024);
}

// ---- init
__device__ __forceinline__ void tvm_deconv_init(void* barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;\n\tfence.mbarrier_init.release.cluster;"
               :: "r"((unsigned)__cvta_generic_to_shared(barrier)), "r"(arrivals) : "memory");
}

// ---- arrive
__device__ __forceinline__ void tvm_deconv_arrive(void* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];"
               :: "r"((unsigned)__cvta_generic_to_shared(barrier)) : "memory");
}

// ---- arrive_at
__device__ __forceinline__ void tvm_deconv_arrive_at(void* barrier, int block) {
  asm volatile("{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %0, %1;\n\t"
               "mbarrier.arrive.shared::cluster.b64 _, [there];\n\t}"
               :: "r"((unsigned)__cvta_generic_to_shared(barrier)), "r"(block) : "memory");
}

// ---- take
__device__ __forceinline__ void tvm_deconv_take(float* to, const void* at, int block) {
  asm volatile("{\n\t.reg .b32 there;\n\tmapa.shared::cluster.u32 there, %4, %5;\n\t"
               "ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [there];\n\t}"
               : "=f"(to[0]), "=f"(to[1]), "=f"(to[2]), "=f"(to[3])
               : "r"((unsigned)__cvta_generic_to_shared(at)), "r"(block) : "memory");
}

// ---- meet
__device__ __forceinline__ void tvm_deconv_meet${blocks}() {
  asm volatile("barrier.cluster.arrive.release;\n\tbarrier.cluster.wait.acquire;" ::: "memory");
}

// ---- expect
__device__ __forceinline__ void tvm_deconv_expect(void* barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"((unsigned)__cvta_generic_to_shared(barrier)), "r"(bytes) : "memory");
}

// ---- wait_phase
__device__ __forceinline__ void tvm_deconv_wait_phase(void* barrier, int parity) {
  asm volatile("{\n\t.reg .pred done;\nAGAIN:\n\t"
               "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t@!done bra AGAIN;\n\t}"
               :: "r"((unsigned)__cvta_generic_to_shared(barrier)), "r"(parity) : "memory");
}

// ---- publish
__device__ __forceinline__ void tvm_deconv_publish() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// ---- load_box
__device__ __forceinline__ void tvm_deconv_load_box${rank}${suffix}(void* to, unsigned long long map, void* barrier, ${coordinates}) {
  asm volatile("cp.async.bulk.tensor.${rank}d.shared::cluster.global.mbarrier::complete_tx::bytes${modifier} "
               "[%0], [%1, {${places}}], [%2]${mask};"
               :: "r"((unsigned)__cvta_generic_to_shared(to)), "l"(map),
                  "r"((unsigned)__cvta_generic_to_shared(barrier)), ${operands} : "memory");
}

// ---- wgmma_fence
__device__ __forceinline__ void tvm_deconv_wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

// ---- wgmma_commit
__device__ __forceinline__ void tvm_deconv_wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

// ---- wgmma_wait
__device__ __forceinline__ void tvm_deconv_wgmma_wait${left}() {
  asm volatile("wgmma.wait_group.sync.aligned ${left};" ::: "memory");
}

// ---- wgmma
__device__ __forceinline__ unsigned long long tvm_deconv_operand(const void* at, int leading, int stride, int swizzle) {
  unsigned address = (unsigned)__cvta_generic_to_shared(at);
  return (address & 0x3ffff) >> 4 | (unsigned long long)leading << 16 | (unsigned long long)stride << 32 |
         (unsigned long long)swizzle << 62;
}
__device__ __forceinline__ void tvm_deconv_wgmma_${name}_n${columns}${suffix}(
    float* c, const void* a, const void* b, int leading, int stride, int swizzle) {
  unsigned long long of_a = tvm_deconv_operand(a, leading, stride, swizzle), of_b = tvm_deconv_operand(b, 1, 64, 1);
  asm volatile("wgmma.mma_async.sync.aligned.m64n${columns}k16.f32.${name}.${name} {${places}}, "
               "%${first}, %${second}, 1, 1, 1, ${transposed}, 0;"
               : ${sums} : "l"(of_a), "l"(of_b));
}

// ---- wgmma_registers
__device__ __forceinline__ void tvm_deconv_wgmma_${name}_n${columns}${suffix}(float* c, const void* registers, const void* b) {
  unsigned address = (unsigned)__cvta_generic_to_shared(b);
  unsigned long long of_b = (address & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
  const unsigned* a = (const unsigned*)registers;
  asm volatile("wgmma.mma_async.sync.aligned.m64n${columns}k${terms}.f32.${name}.${name} {${places}}, "
               "{%${first}, %${second}, %${third}, %${fourth}}, %${fifth}, ${added}, 1, 1${transposed};"
               : ${sums} : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(of_b));
}

// ---- encode
static CUresult tvm_deconv_encode(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* extents,
    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave interleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill) {
  using Encode = decltype(&cuTensorMapEncodeTiled);
  static const Encode encode = [] {
    void* found = nullptr;
    cudaDriverEntryPointQueryResult status;
    cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &found, 12000, cudaEnableDefault, &status);
    return (Encode)found;
  }();
  if (!encode) return CUDA_ERROR_NOT_SUPPORTED;
  return encode(map, type, rank, address, extents, strides, box, steps, interleave, swizzle, promotion, fill);
}
