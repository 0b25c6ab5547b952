/* What the probes share: functions as tvm_ffi calls them, arrays between guards, and the end of a process whose candidate
   crashes or hangs. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>
#include <tvm/ffi/c_api.h>

#define FUNCTION(name)                   \
  __attribute__((visibility("default"))) \
  int __tvm_ffi_##name(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)

static int fails(const char *what) {
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", what);
  return -1;
}

static void returns(TVMFFIAny *result, double value) {
  result->type_index = kTVMFFIFloat;
  result->v_float64 = value;
}

/* A string of more than seven characters. */
static const char *text_of(const TVMFFIAny *value) {
  if (value->type_index == kTVMFFIRawStr) return value->v_c_str;
  return ((const TVMFFIByteArray *)(value->v_obj + 1))->data;
}

static void leave(int number) {
  (void)number;
  _exit(0);
}

/* limit(seconds): this process ends after so many, 0 for never, and when it crashes. */
FUNCTION(limit) {
  static const int numbers[] = {SIGALRM, SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i) signal(numbers[i], leave);
  double seconds = args[0].v_float64;
  struct itimerval timer = {.it_value = {(time_t)seconds, (suseconds_t)(1e6 * (seconds - (time_t)seconds))}};
  return setitimer(ITIMER_REAL, &timer, NULL) ? fails("setitimer") : 0;
}

enum { GUARD = 256 };  /* bytes before and behind an array */

static size_t bytes_of(const DLTensor *tensor) {
  size_t bytes = tensor->dtype.bits / 8;
  for (int i = 0; i < tensor->ndim; ++i) bytes *= tensor->shape[i];
  return bytes;
}

/* An array of (code, bits, extent...) whose memory is still to come. */
static DLManagedTensor *described(
    DLDeviceType device, const TVMFFIAny *args, int32_t count, void (*release)(DLManagedTensor *)) {
  DLManagedTensor *tensor = calloc(1, sizeof *tensor);
  int axes = count - 2;
  int64_t *shape = calloc(2 * axes + 1, sizeof *shape);
  for (int i = 0; i < axes; ++i) shape[i] = args[2 + i].v_int64;
  for (int64_t i = axes, stride = 1; i-- > 0; stride *= shape[i]) shape[axes + i] = stride;
  DLDataType type = {(uint8_t)args[0].v_int64, (uint8_t)args[1].v_int64, 1};
  tensor->dl_tensor = (DLTensor){NULL, {device, 0}, axes, type, shape, shape + axes, 0};
  tensor->deleter = release;
  return tensor;
}

static int returns_tensor(TVMFFIAny *result, DLManagedTensor *tensor) {
  TVMFFIObjectHandle made;
  if (TVMFFITensorFromDLPack(tensor, 0, 0, &made)) return -1;
  result->type_index = kTVMFFITensor;
  result->v_obj = made;
  return 0;
}
