// Just enough of CUDA to run generated kernels on the CPU: every thread of a block is a fiber. One warp runs after the
// other, up to the next barrier, forwards or backwards by chance, its lanes in step at each instruction of the warp.
// Memory is the CPU's. Shared memory is spoilt before each block. An access that faults, or is not
// aligned (which the compiler checks), is a failure of the kernel. What a warp reads too early shows, and what two warps
// do to each other between barriers, as far as their order tells. Streams capture where the process has loaded the
// driver of this folder; a kernel is loaded lazily then, which a capture does not permit.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <csignal>
#include <dlfcn.h>
#include <functional>
#include <map>
#include <sys/mman.h>
#include <ucontext.h>
#include <vector>

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static __attribute__((section("shim_shared")))
#define __align__(n) alignas(n)
#define __restrict__ __restrict

struct uint3 { unsigned x, y, z; };
struct dim3 { unsigned x, y, z; dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {} };
template <typename T> struct alignas(sizeof(T) * 2) shim_2 { T x, y; };
template <typename T> struct alignas(16) shim_4 { T x, y, z, w; };
using float2 = shim_2<float>; using float4 = shim_4<float>; using double2 = shim_2<double>;
using int2 = shim_2<int>; using int4 = shim_4<int>; using uint2 = shim_2<unsigned>; using uint4 = shim_4<unsigned>;
inline float2 make_float2(float x, float y) { return {x, y}; }
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
static const char* shim_failure;  // what a kernel did that a device does not define
inline void shim_fail(const char* what) { if (!shim_failure) shim_failure = what; }
typedef void* cudaStream_t;
struct cudaLaunchConfig_t { dim3 gridDim, blockDim; size_t dynamicSmemBytes; cudaStream_t stream; void* attrs; unsigned numAttrs; };
inline const char* cudaGetErrorString(cudaError_t error) { return error ? shim_failure : "no error"; }
inline const char* cudaGetErrorName(cudaError_t error) { return error ? "cudaErrorOfShim" : "cudaSuccess"; }
inline cudaError_t cudaGetLastError() { return cudaSuccess; }
inline cudaError_t cudaGetDevice(int* device) { *device = 0; return cudaSuccess; }
inline cudaError_t cudaSetDevice(int) { return cudaSuccess; }

using std::max;
using std::min;
inline unsigned __float_as_uint(float value) { unsigned bits; std::memcpy(&bits, &value, 4); return bits; }
inline float __uint_as_float(unsigned bits) { float value; std::memcpy(&value, &bits, 4); return value; }

static uint3 blockIdx;

struct ShimCopy { void* to; const void* from; unsigned size; };
using ShimProducts = std::vector<std::function<void()>>;  // of a thread, which reads its operands when it waits for them
struct ShimFiber {
  ucontext_t context;
  bool done, waits, fenced;
  unsigned operations;
  std::deque<std::vector<ShimCopy>> copies;
  std::deque<ShimProducts> products;
  std::function<bool()> until;  // what it waits for, besides barriers of the block
};
static size_t shim_shared = 99 << 10;  // bytes of a block, on all devices; those of 9.0 have more
static void shim_forget_barriers();
static std::vector<ShimFiber> shim_fibers;
static std::vector<char> shim_stacks;
static ucontext_t shim_scheduler;
static unsigned shim_current;
static const std::function<void()>* shim_body;
constexpr size_t SHIM_STACK = 64 << 10;
extern "C" __attribute__((weak, visibility("hidden"))) char __start_shim_shared[], __stop_shim_shared[];
static bool shim_faulted;
static unsigned shim_chance = 1;

#define threadIdx (uint3{shim_current, 0, 0})

inline void shim_yield() {
  unsigned me = shim_current;
  swapcontext(&shim_fibers[me].context, &shim_scheduler);
}

inline void __syncthreads() {
  shim_fibers[shim_current].waits = true;
  shim_yield();
}

static void shim_entry() {
  (*shim_body)();
  shim_fibers[shim_current].done = true;
  swapcontext(&shim_fibers[shim_current].context, &shim_scheduler);
}

static std::map<const void*, int> shim_permitted;  // bytes of shared memory that a kernel may be given

template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel* kernel, cudaFuncAttribute, int bytes) {
  shim_permitted[(const void*)kernel] = bytes;
  return cudaSuccess;
}

// Shared memory that a launch gives: up to what faults.
static char* shim_dynamic;
struct ShimDynamic {
  static constexpr size_t page = 4096;
  size_t size, inner;
  char* whole;
  explicit ShimDynamic(size_t size) : size(size), inner((size + page - 1) / page * page) {
    whole = (char*)mmap(nullptr, inner + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(whole + inner, page, PROT_NONE);
    shim_dynamic = whole + (inner - size) / 64 * 64;  // lines with swizzles: sizes of multiples of 1024
  }
  ~ShimDynamic() { munmap(whole, inner + page); }
};

static void shim_fault(int signal) {
  shim_fail(signal == SIGSEGV ? "an access outside of all arrays" : "an access that is not aligned");
  shim_faulted = true;
  setcontext(&shim_scheduler);
}

// Turns faults into failures as long as it lives.
struct ShimFaults {
  struct sigaction before[2];
  ShimFaults() {
    struct sigaction action = {};
    action.sa_handler = shim_fault;
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGILL, &action, &before[1]);
    shim_faulted = false;
  }
  ~ShimFaults() {
    sigaction(SIGSEGV, &before[0], nullptr);
    sigaction(SIGILL, &before[1], nullptr);
  }
};

// Calls a function of the shim's driver; without that nothing happens, and the result is false.
template <typename Result = bool, typename... Args>
Result shim_driver(const char* function, Args... args) {
  void* driver = dlopen("libshim_driver.so", RTLD_LAZY | RTLD_NOLOAD);
  void* found = driver ? dlsym(driver, function) : nullptr;
  return found ? ((Result(*)(Args...))found)(args...) : Result();
}

struct cudaFuncAttributes {};

template <typename Kernel>
cudaError_t cudaFuncGetAttributes(cudaFuncAttributes*, Kernel* kernel) {
  shim_driver<void>("shim_load", (const void*)kernel);
  return cudaSuccess;
}

template <typename... Params, typename... Args>
cudaError_t shim_launch(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args... args);

template <typename... Params, typename... Args>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args... args) {
  if (shim_driver("shim_captures", config->stream)) {
    shim_failure = "a kernel that is loaded while its stream captures";
    if (!shim_driver("shim_loaded", (const void*)kernel)) return cudaErrorStreamCaptureUnsupported;
    std::function<int()> node = [=, config = *config] { return shim_launch(&config, kernel, args...); };
    shim_driver<void>("shim_node", config->stream, &node);
    return cudaSuccess;
  }
  shim_driver<void>("shim_load", (const void*)kernel);
  return shim_launch(config, kernel, args...);
}

template <typename... Params, typename... Args>
cudaError_t shim_launch(const cudaLaunchConfig_t* config, void (*kernel)(Params...), Args... args) {
  unsigned threads = config->blockDim.x, warps = (threads + 31) / 32;
  shim_failure = nullptr;
  size_t given = config->dynamicSmemBytes, permitted = std::max(48 << 10, shim_permitted[(const void*)kernel]);
  if (threads > 1024 || !config->gridDim.x || config->gridDim.x > 0x7fffffff || given > shim_shared || given > permitted) {
    shim_fail("a launch beyond what devices have");
    return cudaErrorOfShim;
  }
  ShimFaults faults;
  ShimDynamic dynamic(given);
  const std::function<void()> body = [&] { kernel(args...); };
  shim_body = &body;
  shim_fibers.resize(threads);
  shim_stacks.resize(threads * SHIM_STACK);
  const char* last = getenv("SHIM_LAST_BLOCKS");  // all, unless it says how many of the last
  unsigned skipped = last ? config->gridDim.x - std::min(config->gridDim.x, (unsigned)atoi(last)) : 0;
  for (unsigned block = skipped; block < config->gridDim.x; ++block) {
    blockIdx = {block, 0, 0};
    if (__start_shim_shared) std::memset(__start_shim_shared, 0xff, __stop_shim_shared - __start_shim_shared);
    std::memset(shim_dynamic, 0xff, given);
    for (unsigned t = 0; t < threads; ++t) {
      ShimFiber& fiber = shim_fibers[t];
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = shim_stacks.data() + t * SHIM_STACK;
      fiber.context.uc_stack.ss_size = SHIM_STACK;
      fiber.context.uc_link = nullptr;
      fiber.done = fiber.waits = fiber.fenced = false;
      fiber.until = nullptr;
      fiber.products.assign(1, {});
      fiber.operations = 0;
      fiber.copies.assign(1, {});
      makecontext(&fiber.context, shim_entry, 0);
    }
    shim_forget_barriers();
    for (bool running = true; running;) {
      unsigned ended = 0, held = 0;
      bool went = false;
      shim_chance = shim_chance * 1664525 + 1013904223;
      for (unsigned turn = 0; turn < warps; ++turn)
        for (bool some = true; some;) {
          some = false;
          unsigned warp = 32 * (shim_chance >> 31 ? warps - 1 - turn : turn);
          for (unsigned t = warp; t < std::min(warp + 32, threads); ++t) {
            ShimFiber& fiber = shim_fibers[t];
            if (fiber.done || fiber.waits || (fiber.until && !fiber.until())) continue;
            fiber.until = nullptr;
            shim_current = t;
            swapcontext(&shim_scheduler, &fiber.context);
            if (shim_faulted) return cudaErrorOfShim;
            some = went = true;
          }
        }
      for (ShimFiber& fiber : shim_fibers) held += !!fiber.until;
      if (held && !went) {
        shim_fail("a wait that nothing ends");
        return cudaErrorOfShim;
      }
      if (held) continue;
      for (ShimFiber& fiber : shim_fibers) {
        ended += fiber.done;
        fiber.waits = false;
      }
      // A barrier that some threads skip and others wait at is undefined on a device.
      if (ended && ended != threads) shim_fail("a barrier that not all threads reach");
      running = !ended;
    }
    for (const ShimFiber& fiber : shim_fibers) {
      for (const auto& group : fiber.copies)
        if (!group.empty()) shim_fail("a copy that nothing waits for");
      for (const auto& group : fiber.products)
        if (!group.empty()) shim_fail("a product that nothing waits for");
    }
    if (shim_failure) return cudaErrorOfShim;
  }
  return cudaSuccess;
}
