#pragma once
#include "cuda_runtime.h"
typedef _Float16 __half;
typedef _Float16 half;
using __half2 = shim_2<half>;
using half2 = __half2;
inline bool __hgt(half a, half b) { return a > b; }
inline bool __hlt(half a, half b) { return a < b; }
inline float __half2float(half a) { return a; }
inline half __float2half(float a) { return a; }
inline half __float2half_rn(float a) { return a; }
