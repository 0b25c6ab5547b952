// What every generated source includes, for a precompiled header.
#include "hopper.h"
#include <cuda.h>
#include <cuda_runtime.h>
#include <math.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>

// Exceptions are thrown and turned into errors by functions that are compiled once.
#undef TVM_FFI_CHECK
#define TVM_FFI_CHECK(condition, kind) if (!(condition)) ShimRefusal{#kind}
#undef TVM_FFI_SAFE_CALL_END
#define TVM_FFI_SAFE_CALL_END() \
  return 0; \
  } \
  catch (...) { \
    return shim_raised(); \
  } \
  TVM_FFI_UNREACHABLE()
