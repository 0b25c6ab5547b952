// Just enough of CUDA to compile generated kernels for the CPU; `runtime.cc` runs them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __grid_constant__
#define __shared__ static __attribute__((section("shim_shared")))
#define __align__(n) alignas(n)
#define __restrict__ __restrict

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {} };
template <typename T> struct alignas(sizeof(T) * 2) shim_2 { T x, y; };
template <typename T> struct alignas(16) shim_4 { T x, y, z, w; };
using float2 = shim_2<float>; using float4 = shim_4<float>; using double2 = shim_2<double>;
using char2 = shim_2<signed char>; using uchar2 = shim_2<unsigned char>;
using int2 = shim_2<int>; using int4 = shim_4<int>; using uint2 = shim_2<unsigned>; using uint4 = shim_4<unsigned>;
using ushort2 = shim_2<unsigned short>;
inline float2 make_float2(float x, float y) { return {x, y}; }
inline ushort2 make_ushort2(unsigned short x, unsigned short y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline double2 make_double2(double x, double y) { return {x, y}; }
struct alignas(8) ushort4 { unsigned short x, y, z, w; };
inline ushort4 make_ushort4(unsigned short x, unsigned short y, unsigned short z, unsigned short w) { return {x, y, z, w}; }
inline int4 make_int4(int x, int y, int z, int w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };
enum cudaError_t {
  cudaSuccess = 0, cudaErrorOfShim = 1, cudaErrorCudartUnloading = 4, cudaErrorStreamCaptureUnsupported = 900
};
typedef void* cudaStream_t;
struct cudaLaunchConfig_t { dim3 gridDim, blockDim; size_t dynamicSmemBytes; cudaStream_t stream; void* attrs; unsigned numAttrs; };
struct cudaFuncAttributes {};
inline const char* cudaGetErrorName(cudaError_t error) { return error ? "cudaErrorOfShim" : "cudaSuccess"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

using std::max;
using std::min;
inline unsigned __float_as_uint(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }

// A library has a runtime of its own.
#pragma GCC visibility push(hidden)
extern const char* shim_failure;  // what a kernel did that a device does not define
extern size_t shim_most_shared;  // bytes of a block, on all devices; those of 9.0 have more
extern char* shim_dynamic;  // what a launch gives a block
extern uint3 blockIdx;
extern unsigned shim_current;  // a thread
void __syncthreads();
void shim_cluster(const void* kernel, unsigned blocks);  // of a kernel, if several
void shim_permit(const void* kernel, int bytes);  // of shared memory that a kernel may be given
void shim_load(const void* kernel);
// Launches a kernel: each thread has `run` called with `size` bytes at `body`.
cudaError_t shim_launch(
    const cudaLaunchConfig_t& config, const void* kernel, const void* body, size_t size, void (*run)(const void* body));
int shim_raised();  // sets the exception that is being handled as the error of a call
int shim_raise(const char* kind, const char* text);
struct ShimRefusal { const char* kind; void operator<<(const char* text) const; };  // throws
#pragma GCC visibility pop

#define threadIdx (uint3{shim_current, 0, 0})

inline void tvm_deconv_forget(int&) {}
inline const char* cudaGetErrorString(cudaError_t error) { return error ? shim_failure : "no error"; }

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  shim_permit((const void*)kernel, bytes);
  return cudaSuccess;
}

template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel* kernel) {
  shim_load((const void*)kernel);
  return cudaSuccess;
}

// Little is made for each kernel's types, since every test compiles it.
template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args... args) {
  auto body = [=] { kernel(args...); };
  using Body = decltype(body);
  static_assert(std::is_trivially_copyable<Body>::value, "");
  return shim_launch(*config, (const void*)kernel, &body, sizeof body, [](const void* body) { (*(const Body*)body)(); });
}
