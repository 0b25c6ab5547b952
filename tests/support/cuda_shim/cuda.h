#include "cuda_runtime.h"
// NVIDIA's driver as far as maps of tensors are encoded: by the rules of cuTensorMapEncodeTiled.
#pragma once
#include <cstdint>
#include <cstring>

using cuuint32_t = uint32_t;
using cuuint64_t = uint64_t;
enum CUresult { CUDA_SUCCESS = 0, CUDA_ERROR_INVALID_VALUE = 1 };
enum CUtensorMapDataType { CU_TENSOR_MAP_DATA_TYPE_UINT16 = 1, CU_TENSOR_MAP_DATA_TYPE_FLOAT16 = 6, CU_TENSOR_MAP_DATA_TYPE_FLOAT32 = 7 };
enum CUtensorMapInterleave { CU_TENSOR_MAP_INTERLEAVE_NONE };
enum CUtensorMapSwizzle { CU_TENSOR_MAP_SWIZZLE_NONE };
enum CUtensorMapL2promotion { CU_TENSOR_MAP_L2_PROMOTION_NONE };
enum CUtensorMapFloatOOBfill { CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE };
struct alignas(64) CUtensorMap { uint64_t opaque[16]; };
struct ShimMap {
  const char* address;
  uint32_t extents[5], strides[5];
  uint16_t box[5];
  uint8_t rank, size, swizzle;
  long lines() const {
    long count = 1;
    for (int axis = 1; axis < rank; ++axis) count *= box[axis];
    return count;
  }
};
static_assert(sizeof(ShimMap) <= sizeof(CUtensorMap), "");

inline CUresult tvm_deconv_encode(
    CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* address, const cuuint64_t* extents,
    const cuuint64_t* strides, const cuuint32_t* box, const cuuint32_t* steps, CUtensorMapInterleave,
    CUtensorMapSwizzle swizzle, CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  ShimMap made = {};
  made.address = (const char*)address, made.rank = rank, made.swizzle = swizzle;
  made.size = type == CU_TENSOR_MAP_DATA_TYPE_FLOAT32 ? 4 : 2;
  bool valid = (uintptr_t)address % 16 == 0 && rank <= 5 && box[0] * made.size <= 128;
  for (cuuint32_t axis = 0; axis < rank; ++axis) {
    made.extents[axis] = extents[axis], made.box[axis] = box[axis];
    made.strides[axis] = axis ? strides[axis - 1] : made.size;
    valid &= extents[axis] > 0 && extents[axis] <= 1ull << 32 && box[axis] > 0 && box[axis] <= 256 && steps[axis] == 1;
    valid &= !axis || (strides[axis - 1] % 16 == 0 && strides[axis - 1] < 1ull << 40);
  }
  std::memcpy(map, &made, sizeof made);
  return valid ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
