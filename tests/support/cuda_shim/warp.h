// The instructions of warps that generated kernels use, and copies that run along.
#pragma once
#include "cuda_runtime.h"

#pragma GCC visibility push(hidden)
void tvm_deconv_mma_tf32(float* c, const void* registers_a, const void* registers_b);
float tvm_deconv_tf32(float value);
void tvm_deconv_ldmatrix_x4(void* r, const void* row);
void tvm_deconv_ldmatrix_x4_trans(void* r, const void* row);
void tvm_deconv_ldmatrix_x2_trans(void* r, const void* row);
void tvm_deconv_ldmatrix_x2(void* r, const void* row);
void tvm_deconv_mma_f16(float* c, const void* a, const void* b);
void tvm_deconv_mma_bf16(float* c, const void* a, const void* b);
void tvm_deconv_mma_s8(int* c, const void* a, const void* b);
void tvm_deconv_mma_u8(int* c, const void* a, const void* b);
void tvm_deconv_mma_u8_s8(int* c, const void* a, const void* b);
void tvm_deconv_copy4(void* to, const void* from, bool exists);
void tvm_deconv_copy8(void* to, const void* from, bool exists);
void tvm_deconv_copy16(void* to, const void* from, bool exists);
void tvm_deconv_copy4_again(void* to, const void* from, bool exists);
void tvm_deconv_copy8_again(void* to, const void* from, bool exists);
void tvm_deconv_copy16_again(void* to, const void* from, bool exists);
void tvm_deconv_copy4_or_fill(void* to, const void* from, bool exists, unsigned fill);
void tvm_deconv_copy8_or_fill(void* to, const void* from, bool exists, unsigned fill);
void tvm_deconv_copy16_or_fill(void* to, const void* from, bool exists, unsigned fill);
void tvm_deconv_copy4_or_fill_again(void* to, const void* from, bool exists, unsigned fill);
void tvm_deconv_copy8_or_fill_again(void* to, const void* from, bool exists, unsigned fill);
void tvm_deconv_copy16_or_fill_again(void* to, const void* from, bool exists, unsigned fill);
void tvm_deconv_commit();
void tvm_deconv_wait0();
void tvm_deconv_wait1();
void tvm_deconv_wait2();
void tvm_deconv_wait3();
void tvm_deconv_wait4();
#pragma GCC visibility pop
