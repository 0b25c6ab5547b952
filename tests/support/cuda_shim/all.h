// What every generated source includes, for a precompiled header.
#include "hopper.h"
#include <cuda.h>
#include <cuda_runtime.h>
#include <math.h>
#include <tvm/ffi/c_api.h>
#include <tvm/ffi/extra/c_env_api.h>
#include <tvm/ffi/extra/cuda/device_guard.h>
#include <tvm/ffi/function.h>
