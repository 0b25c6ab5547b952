// Hopper's instructions that generated kernels use, beside those of `warp.h`.
#pragma once
#include "warp.h"
#include <cuda.h>

#pragma GCC visibility push(hidden)
unsigned __cvta_generic_to_shared(const void* at);
void tvm_deconv_init(void* barrier, int arrivals);
void tvm_deconv_expect(void* at, int bytes);
void tvm_deconv_arrive(void* at);
void tvm_deconv_arrive_at(void* at, int block);
void tvm_deconv_take(float* to, const void* at, int block);
void tvm_deconv_meet2();
void tvm_deconv_meet4();
void tvm_deconv_meet8();
void tvm_deconv_wait_phase(void* at, int parity);
void tvm_deconv_publish();
void tvm_deconv_load_box2(void* to, unsigned long long map, void* b, int x, int y);
void tvm_deconv_load_box5(void* to, unsigned long long map, void* b, int c, int w, int h, int d, int n);
void tvm_deconv_load_box2_to(void* to, unsigned long long map, void* b, int x, int y, int blocks);
void tvm_deconv_load_box5_to(void* to, unsigned long long map, void* b, int c, int w, int h, int d, int n, int blocks);
void tvm_deconv_wgmma_fence();
void tvm_deconv_wgmma_commit();
void tvm_deconv_wgmma_wait0();
void tvm_deconv_wgmma_wait1();
void tvm_deconv_wgmma_wait2();
#define SHIM_WGMMA(name, columns, suffix, transposed) \
  void tvm_deconv_wgmma_##name##_n##columns##suffix( \
      float* c, const void* a, const void* b, int leading, int stride, int swizzle);
#define SHIM_WGMMAS_OF(columns) \
  SHIM_WGMMA(f16, columns, , false) SHIM_WGMMA(f16, columns, _rows, true) \
  SHIM_WGMMA(bf16, columns, , false) SHIM_WGMMA(bf16, columns, _rows, true)
#define SHIM_WGMMAS SHIM_WGMMAS_OF(16) SHIM_WGMMAS_OF(32) SHIM_WGMMAS_OF(64) SHIM_WGMMAS_OF(128) SHIM_WGMMAS_OF(256)
SHIM_WGMMAS
#undef SHIM_WGMMA
#define SHIM_WGMMA_TF32(columns) \
  void tvm_deconv_wgmma_tf32_n##columns(float* c, const void* registers, const void* b); \
  void tvm_deconv_wgmma_tf32_n##columns##_first(float* c, const void* registers, const void* b);
SHIM_WGMMA_TF32(16)
SHIM_WGMMA_TF32(32)
SHIM_WGMMA_TF32(64)
SHIM_WGMMA_TF32(128)
SHIM_WGMMA_TF32(256)
#undef SHIM_WGMMA_TF32
#define SHIM_WGMMA_REGISTERS(name, columns) \
  void tvm_deconv_wgmma_##name##_n##columns##_registers(float* c, const void* registers, const void* b);
#define SHIM_WGMMAS_OF_REGISTERS(columns) SHIM_WGMMA_REGISTERS(f16, columns) SHIM_WGMMA_REGISTERS(bf16, columns)
#define SHIM_WGMMAS_REGISTERS \
  SHIM_WGMMAS_OF_REGISTERS(16) SHIM_WGMMAS_OF_REGISTERS(32) SHIM_WGMMAS_OF_REGISTERS(64) SHIM_WGMMAS_OF_REGISTERS(96) \
  SHIM_WGMMAS_OF_REGISTERS(128) SHIM_WGMMAS_OF_REGISTERS(192) SHIM_WGMMAS_OF_REGISTERS(256)
SHIM_WGMMAS_REGISTERS
#undef SHIM_WGMMA_REGISTERS
#pragma GCC visibility pop
