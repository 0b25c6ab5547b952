/* What a TVM server lacks: which CPU it is, threads of the launcher, guards around an output, rates of the machine.

   Rates are measured on the launcher's threads. */
#include "probe.h"
#include <time.h>

typedef int (*task_fn)(int task, void *group, void *data);
extern int (*__TVMBackendParallelLaunch)(task_fn, void *, int);
extern int tvm_deconv_set_num_threads(int count);

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static double shortest(task_fn task, void *data, int threads) {
  double best = 1e300;
  for (int trial = 0; trial < 7; ++trial) {
    double start = now();
    __TVMBackendParallelLaunch(task, data, threads);
    double taken = now() - start;
    best = taken < best ? taken : best;
  }
  return best;
}

FUNCTION(threads) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = tvm_deconv_set_num_threads((int)args[0].v_int64);
  return 0;
}

FUNCTION(cpuinfo) {
  size_t size = 0, room = 1 << 16;
  char *text = malloc(room);
  FILE *file = fopen("/proc/cpuinfo", "r");
  if (!file) return fails("/proc/cpuinfo cannot be read");
  for (size_t got; (got = fread(text + size, 1, room - size, file)) > 0;) {
    size += got;
    if (size == room) text = realloc(text, room *= 2);
  }
  fclose(file);
  TVMFFIByteArray bytes = {text, size};
  int status = TVMFFIStringFromByteArray(&bytes, result);
  free(text);
  return status;
}

struct fma { double (*run)(long, double, double); long steps; };

static int fma_task(int task, void *group, void *data) {
  struct fma *fma = data;
  (void)task, (void)group;
  fma->run(fma->steps, 0.5, 0.25);
  return 0;
}

/* fma(path, threads): multiply-adds per second of the kernel in that library. */
FUNCTION(fma) {
  void *library = dlopen(text_of(args), RTLD_NOW | RTLD_LOCAL);
  if (!library) return fails(dlerror());
  struct fma fma = {(double (*)(long, double, double))dlsym(library, "run"), 2000000};
  long per_step = *(long *)dlsym(library, "fmas_per_step");
  int threads = (int)args[1].v_int64;
  returns(result, threads * (double)fma.steps * per_step / shortest(fma_task, &fma, threads));
  return 0;
}

struct copy { char *from, *to; size_t share; };

static int copy_task(int task, void *group, void *data) {
  struct copy *copy = data;
  (void)group;
  memcpy(copy->to + task * copy->share, copy->from + task * copy->share, copy->share);
  return 0;
}

/* copy(threads): bytes per second, read plus written, of copies that no cache serves. */
FUNCTION(copy) {
  int threads = (int)args[0].v_int64;
  long cache = sysconf(_SC_LEVEL3_CACHE_SIZE), size = 4 * cache;
  size = size < 64l << 20 ? 64l << 20 : size > 1l << 30 ? 1l << 30 : size;
  struct copy copy = {malloc(size), malloc(size), size / threads};
  if (!copy.from || !copy.to) return fails("no memory");
  memset(copy.from, 1, size);
  memset(copy.to, 1, size);
  returns(result, 2.0 * copy.share * threads / shortest(copy_task, &copy, threads));
  free(copy.from);
  free(copy.to);
  return 0;
}

static void release(DLManagedTensor *tensor) {
  free((char *)tensor->dl_tensor.data - GUARD);
  free(tensor->dl_tensor.shape);
  free(tensor);
}

/* output(code, bits, extent...): an array between guards. */
FUNCTION(output) {
  DLManagedTensor *tensor = described(kDLCPU, args, count, release);
  char *memory;
  if (posix_memalign((void **)&memory, 64, bytes_of(&tensor->dl_tensor) + 2 * GUARD)) return fails("no memory");
  tensor->dl_tensor.data = memory + GUARD;
  return returns_tensor(result, tensor);
}

/* poison(output, byte) */
FUNCTION(poison) {
  const DLTensor *tensor = args[0].v_ptr;
  memset((char *)tensor->data - GUARD, (int)args[1].v_int64, bytes_of(tensor) + 2 * GUARD);
  return 0;
}

/* intact(output, byte): whether the guards hold that byte. */
FUNCTION(intact) {
  const DLTensor *tensor = args[0].v_ptr;
  const unsigned char *before = (unsigned char *)tensor->data - GUARD, *behind = before + GUARD + bytes_of(tensor);
  int whole = 1;
  for (int i = 0; i < GUARD; ++i) whole &= before[i] == args[1].v_int64 && behind[i] == args[1].v_int64;
  result->type_index = kTVMFFIInt;
  result->v_int64 = whole;
  return 0;
}
