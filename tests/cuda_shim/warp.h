// The warp's instructions by the layouts of the PTX manual: every lane shows its operands to the others, waits, reads.
#pragma once
#include "cuda_runtime.h"

struct ShimShown { const void* row; unsigned a[4], b[2]; };
static ShimShown shim_shown[2][1024];

inline const ShimShown* shim_show(const ShimShown& mine) {
  // Two sets by turns: a lane may be one instruction ahead of those that have not read yet.
  auto& set = shim_shown[shim_fibers[shim_current].operations++ % 2];
  set[shim_current] = mine;
  shim_yield();
  return set + shim_current / 32 * 32;
}

inline void shim_ldmatrix(unsigned* r, const void* row, int count, bool transposed) {
  const ShimShown* warp = shim_show({row, {}, {}});
  int lane = shim_current % 32;
  for (int i = 0; i < count; ++i) {
    unsigned short pair[2];
    for (int e = 0; e < 2; ++e) {
      int y = lane / 4, x = lane % 4 * 2 + e;
      if (transposed) std::swap(y, x);
      pair[e] = static_cast<const unsigned short*>(warp[8 * i + y].row)[x];
    }
    r[i] = pair[0] | (unsigned)pair[1] << 16;
  }
}

inline float shim_f16(unsigned short bits) { _Float16 value; std::memcpy(&value, &bits, 2); return value; }
inline float shim_bf16(unsigned short bits) { unsigned wide = (unsigned)bits << 16; float value; std::memcpy(&value, &wide, 4); return value; }

inline void shim_mma(float* c, const unsigned* a, const unsigned* b, float (*number)(unsigned short)) {
  const ShimShown* warp = shim_show({nullptr, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  int lane = shim_current % 32;
  for (int part = 0; part < 4; ++part) {
    int row = lane / 4 + part / 2 * 8, column = lane % 4 * 2 + part % 2;
    for (int k = 0; k < 16; ++k) {
      unsigned x = warp[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], y = warp[column * 4 + k % 8 / 2].b[k / 8];
      c[part] += number(x >> k % 2 * 16) * number(y >> k % 2 * 16);
    }
  }
}

inline void tvm_deconv_ldmatrix_x4(unsigned* r, const void* row) { shim_ldmatrix(r, row, 4, false); }
inline void tvm_deconv_ldmatrix_x4_trans(unsigned* r, const void* row) { shim_ldmatrix(r, row, 4, true); }
inline void tvm_deconv_ldmatrix_x2_trans(unsigned* r, const void* row) { shim_ldmatrix(r, row, 2, true); }
inline void tvm_deconv_mma_f16(float* c, const unsigned* a, const unsigned* b) { shim_mma(c, a, b, shim_f16); }
inline void tvm_deconv_mma_bf16(float* c, const unsigned* a, const unsigned* b) { shim_mma(c, a, b, shim_bf16); }
