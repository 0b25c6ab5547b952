/* What a TVM server with a CUDA device lacks: memory between guards, and times of calls, by NVIDIA's driver alone.

   Functions do at the server what `cuda.py` does on this machine. The server's TVM need not know CUDA. */
#include "probe.h"
#include <tvm/ffi/extra/c_env_api.h>

typedef unsigned long long address_t;
#define EACH(X)                                                  \
  X(cuInit, (unsigned))                                          \
  X(cuDeviceGet, (int *, int))                                   \
  X(cuDeviceGetAttribute, (int *, int, int))                     \
  X(cuDeviceGetName, (char *, int, int))                         \
  X(cuDevicePrimaryCtxRetain, (void **, int))                    \
  X(cuCtxSetCurrent, (void *))                                   \
  X(cuCtxSynchronize, (void))                                    \
  X(cuMemAlloc_v2, (address_t *, size_t))                        \
  X(cuMemFree_v2, (address_t))                                   \
  X(cuMemcpyHtoD_v2, (address_t, const void *, size_t))          \
  X(cuMemcpyDtoH_v2, (void *, address_t, size_t))                \
  X(cuMemcpyDtoD_v2, (address_t, address_t, size_t))             \
  X(cuMemcpyDtoDAsync_v2, (address_t, address_t, size_t, void *)) \
  X(cuMemsetD8_v2, (address_t, unsigned char, size_t))           \
  X(cuEventCreate, (void **, unsigned))                          \
  X(cuEventRecord, (void *, void *))                             \
  X(cuEventSynchronize, (void *))                                \
  X(cuEventElapsedTime, (float *, void *, void *))               \
  X(cuEventDestroy_v2, (void *))                                 \
  X(cuStreamCreate, (void **, unsigned))                         \
  X(cuStreamBeginCapture_v2, (void *, int))                      \
  X(cuStreamEndCapture, (void *, void **))                       \
  X(cuGraphGetNodes, (void *, void **, size_t *))                \
  X(cuGraphInstantiateWithFlags, (void **, void *, unsigned long long)) \
  X(cuGraphUpload, (void *, void *))                             \
  X(cuGraphLaunch, (void *, void *))                             \
  X(cuGraphDestroy, (void *))                                    \
  X(cuGraphExecDestroy, (void *))
#define DECLARE(name, arguments) static int (*name) arguments;
EACH(DECLARE)

enum { CLOCK = 13, MULTIPROCESSORS = 16, LEVEL2 = 38, MAJOR = 75, MINOR = 76 };  /* CU_DEVICE_ATTRIBUTE_* */
enum { RELAXED = 2 };  /* CU_STREAM_CAPTURE_MODE_RELAXED */
enum { ARGUMENTS = 8, AXES = 8, COPIES = 32, SMALLEST = 1 << 14 };

static void *stream;  /* behind all work of the legacy stream */

/* Returns from a function that cannot do without this call of the driver. */
#define ASK(function, ...)                                       \
  do {                                                           \
    int code = function(__VA_ARGS__);                            \
    if (code) return driver_fails(#function, code);              \
  } while (0)

static int driver_fails(const char *function, int code) {
  char what[128];
  snprintf(what, sizeof what, "NVIDIA's driver failed: %s says %d", function, code);
  return fails(what);
}

static int describe(char *text, size_t size) {
  static const int attributes[] = {MAJOR, MINOR, MULTIPROCESSORS, CLOCK, LEVEL2};
  int device, values[5];
  char name[256];
  void *context;
  ASK(cuInit, 0);
  ASK(cuDeviceGet, &device, 0);
  for (int i = 0; i < 5; ++i) ASK(cuDeviceGetAttribute, &values[i], attributes[i], device);
  ASK(cuDeviceGetName, name, sizeof name, device);
  /* The CUDA runtime inside the candidates uses this context too. */
  ASK(cuDevicePrimaryCtxRetain, &context, device);
  ASK(cuCtxSetCurrent, context);
  ASK(cuStreamCreate, &stream, 0);
  snprintf(text, size, "%d %d %d %d %d %s", values[0], values[1], values[2], values[3], values[4], name);
  return 0;
}

/* device(): opens device 0; its capability, multiprocessors, kHz, bytes of level-2 cache, and name. */
FUNCTION(device) {
  char text[512];
  void *library = dlopen("libcuda.so.1", RTLD_NOW);
  if (!library) return fails("needs NVIDIA's driver: libcuda.so.1 is not found");
#define FIND(name, arguments) \
  if (!(name = (int(*) arguments)dlsym(library, #name))) return fails("NVIDIA's driver is too old: it lacks " #name);
  EACH(FIND)
  if (describe(text, sizeof text)) return -1;
  TVMFFIByteArray bytes = {text, strlen(text)};
  return TVMFFIStringFromByteArray(&bytes, result);
}

static address_t address_of(const DLTensor *tensor) { return (address_t)(uintptr_t)tensor->data; }

static void release(DLManagedTensor *tensor) {
  cuMemFree_v2(address_of(&tensor->dl_tensor) - GUARD);
  free(tensor->dl_tensor.shape);
  free(tensor);
}

/* output(code, bits, extent...): an array on the device between guards. */
FUNCTION(output) {
  DLManagedTensor *tensor = described(kDLCUDA, args, count, release);
  address_t address;
  ASK(cuMemAlloc_v2, &address, bytes_of(&tensor->dl_tensor) + 2 * GUARD);
  tensor->dl_tensor.data = (void *)(uintptr_t)(address + GUARD);
  return returns_tensor(result, tensor);
}

/* write(array on the device, array) */
FUNCTION(write) {
  const DLTensor *to = args[0].v_ptr, *from = args[1].v_ptr;
  if (bytes_of(to)) ASK(cuMemcpyHtoD_v2, address_of(to), from->data, bytes_of(to));
  return 0;
}

/* read(array on the device, array): waits for all calls. */
FUNCTION(read) {
  const DLTensor *from = args[0].v_ptr, *to = args[1].v_ptr;
  ASK(cuCtxSynchronize);
  if (bytes_of(to)) ASK(cuMemcpyDtoH_v2, to->data, address_of(from), bytes_of(to));
  return 0;
}

/* poison(output, byte) */
FUNCTION(poison) {
  const DLTensor *tensor = args[0].v_ptr;
  ASK(cuMemsetD8_v2, address_of(tensor) - GUARD, (unsigned char)args[1].v_int64, bytes_of(tensor) + 2 * GUARD);
  return 0;
}

/* intact(output, byte): whether the guards hold that byte, when all calls are done. */
FUNCTION(intact) {
  const DLTensor *tensor = args[0].v_ptr;
  unsigned char guards[2 * GUARD];
  int whole = 1;
  ASK(cuCtxSynchronize);
  ASK(cuMemcpyDtoH_v2, guards, address_of(tensor) - GUARD, GUARD);
  ASK(cuMemcpyDtoH_v2, guards + GUARD, address_of(tensor) + bytes_of(tensor), GUARD);
  for (int i = 0; i < 2 * GUARD; ++i) whole &= guards[i] == args[1].v_int64;
  result->type_index = kTVMFFIInt;
  result->v_int64 = whole;
  return 0;
}

/* Calls that take turns: `call(data, turn)` enqueues one. */
struct task {
  int (*call)(void *data, int turn);
  void *data;
  int turns;
};

/* The graphs of a task's calls, by the turn that they begin with; `direct` are made one by one. */
struct graphs {
  const struct task *task;
  int number;
  void *executables[1 + COPIES];
  char direct[1 + COPIES];
};

static int several(const struct graphs *graphs, int first) {
  const struct task *task = graphs->task;
  void *before;
  int failed = TVMFFIEnvSetStream(kDLCUDA, 0, stream, &before);
  for (int i = 0; i < graphs->number && !failed; ++i) failed = task->call(task->data, (first + i) % task->turns);
  TVMFFIEnvSetStream(kDLCUDA, 0, before, NULL);
  return failed;
}

static void forget_error(void) {
  TVMFFIObjectHandle error;
  TVMFFIErrorMoveFromRaised(&error);
  if (error) TVMFFIObjectDecRef(error);
}

/* Whether the calls can be captured. What fails as it is captured is made one by one, and says so then. */
static int captured(struct graphs *graphs, int first) {
  void *graph = NULL;
  size_t nodes = 0;
  if (cuStreamBeginCapture_v2(stream, RELAXED)) return 0;
  int failed = several(graphs, first);
  if (failed) forget_error();
  /* In any case: a stream that captures is of no other use. */
  failed |= cuStreamEndCapture(stream, &graph);
  failed = failed || cuGraphGetNodes(graph, NULL, &nodes) || nodes < (size_t)graphs->number ||
           cuGraphInstantiateWithFlags(&graphs->executables[first], graph, 0);
  if (graph) cuGraphDestroy(graph);
  return !failed && !cuGraphUpload(graphs->executables[first], stream);
}

static int launch(struct graphs *graphs, int first) {
  if (graphs->direct[first]) return several(graphs, first);
  ASK(cuGraphLaunch, graphs->executables[first], stream);
  return 0;
}

/* Enqueues the graphs, and an event behind each; the first is not timed. */
static int enqueue(struct graphs *graphs, int repeat, void **events) {
  for (int run = 0; run <= repeat; ++run) {
    int first = (int)((int64_t)run * graphs->number % graphs->task->turns);
    if (!graphs->direct[first] && !graphs->executables[first]) graphs->direct[first] = !captured(graphs, first);
    ASK(cuEventCreate, &events[run], 0);
  }
  for (int run = 0; run <= repeat; ++run) {
    if (launch(graphs, (int)((int64_t)run * graphs->number % graphs->task->turns))) return -1;
    ASK(cuEventRecord, events[run], stream);
  }
  ASK(cuEventSynchronize, events[repeat]);
  return 0;
}

static int read_times(void **events, int repeat, int number, double *times) {
  for (int run = 0; run < repeat; ++run) {
    float milliseconds;
    ASK(cuEventElapsedTime, &milliseconds, events[run], events[run + 1]);
    times[run] = 1e-3 * milliseconds / number;
  }
  return 0;
}

/* `repeat` means of the seconds of `number` calls. */
static int sample(const struct task *task, int number, int repeat, double *times) {
  struct graphs graphs = {.task = task, .number = number};
  void **events = calloc(repeat + 1, sizeof *events);
  int failed = enqueue(&graphs, repeat, events) || read_times(events, repeat, number, times);
  for (int run = 0; run <= repeat; ++run)
    if (events[run]) cuEventDestroy_v2(events[run]);
  for (int first = 0; first < task->turns; ++first)
    if (graphs.executables[first]) cuGraphExecDestroy(graphs.executables[first]);
  free(events);
  return failed ? -1 : 0;
}

struct copy { address_t to, from; size_t size; };

static int copy_once(void *data, int turn) {
  struct copy *copy = data;
  (void)turn;
  ASK(cuMemcpyDtoDAsync_v2, copy->to, copy->from, copy->size, stream);
  return 0;
}

/* copy(bytes, times): seconds of copies of so many, or of half as many as often as there is no room; how many it were. */
FUNCTION(copy) {
  const DLTensor *times = args[1].v_ptr;
  struct copy copy = {0, 0, (size_t)args[0].v_int64};
  while (cuMemAlloc_v2(&copy.to, 2 * copy.size))
    if ((copy.size /= 2) < SMALLEST) return fails("NVIDIA's driver failed: cuMemAlloc_v2 has no memory");
  copy.from = copy.to + copy.size;
  struct task task = {copy_once, &copy, 1};
  int failed = sample(&task, 4, (int)times->shape[0], times->data);
  cuMemFree_v2(copy.to);
  result->type_index = kTVMFFIInt;
  result->v_int64 = (int64_t)copy.size;
  return failed;
}

/* A function of a library, and its arguments in each turn. */
struct bound {
  void *library;
  TVMFFISafeCallType function;
  int count, turns, copied;
  size_t wanted;
  DLTensor tensors[1 + COPIES][ARGUMENTS];
  int64_t extents[ARGUMENTS][2 * AXES];
};

static int call_bound(void *data, int turn) {
  struct bound *bound = data;
  TVMFFIAny args[ARGUMENTS], result = {0};
  for (int i = 0; i < bound->count; ++i)
    args[i] = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = &bound->tensors[turn][i]};
  return bound->function(NULL, args, bound->count, &result);
}

/* Makes one more turn, of copies; returns whether there was room. */
static int copies(struct bound *bound) {
  DLTensor *to = bound->tensors[bound->turns];
  for (int i = 0; i < bound->count; ++i) {
    const DLTensor *from = &bound->tensors[0][i];
    address_t address;
    to[i] = *from;
    if (cuMemAlloc_v2(&address, bytes_of(from) + 1)) {
      while (i-- > 0) cuMemFree_v2(address_of(&to[i]));
      return 0;
    }
    to[i].data = (void *)(uintptr_t)address;
    cuMemcpyDtoD_v2(address, address_of(from), bytes_of(from));
  }
  return ++bound->turns;
}

static void release_bound(void *self) {
  struct bound *bound = self;
  for (int turn = 1; turn < bound->turns; ++turn)
    for (int i = 0; i < bound->count; ++i) cuMemFree_v2(address_of(&bound->tensors[turn][i]));
  dlclose(bound->library);
  free(bound);
}

/* bound(): calls the function, and waits. bound(number, times): means of `number` calls, which take turns on copies. */
static int use_bound(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result) {
  struct bound *bound = self;
  (void)result;
  if (!count) {
    if (call_bound(bound, 0)) return -1;
    ASK(cuCtxSynchronize);
    return 0;
  }
  const DLTensor *times = args[1].v_ptr;
  if (!bound->copied++)
    for (size_t left = bound->wanted; left-- && copies(bound);) continue;
  struct task task = {call_bound, bound, bound->turns};
  return sample(&task, (int)args[0].v_int64, (int)times->shape[0], times->data);
}

/* bind(path, symbol, bytes, array...): a function of a library with its arguments; copies of so many bytes take turns. */
FUNCTION(bind) {
  struct bound *bound = calloc(1, sizeof *bound);
  size_t size = 1;
  bound->count = count - 3;
  bound->turns = 1;
  for (int i = 0; i < bound->count; ++i) {
    const DLTensor *tensor = args[3 + i].v_ptr;
    int64_t *extents = bound->extents[i], stride = 1;
    memcpy(extents, tensor->shape, tensor->ndim * sizeof *extents);
    for (int axis = tensor->ndim; axis-- > 0; stride *= extents[axis]) extents[AXES + axis] = stride;
    bound->tensors[0][i] = *tensor;
    bound->tensors[0][i].shape = extents;
    bound->tensors[0][i].strides = extents + AXES;
    size += bytes_of(tensor);
  }
  bound->wanted = (size_t)args[2].v_int64 / size;
  if (bound->wanted > COPIES) bound->wanted = COPIES;
  bound->library = dlopen(text_of(&args[0]), RTLD_NOW | RTLD_LOCAL);
  if (!bound->library) return fails(dlerror());
  bound->function = (TVMFFISafeCallType)dlsym(bound->library, text_of(&args[1]));
  if (!bound->function) return fails(dlerror());
  TVMFFIObjectHandle made;
  if (TVMFFIFunctionCreate(bound, use_bound, release_bound, &made)) return -1;
  result->type_index = kTVMFFIFunction;
  result->v_obj = made;
  return 0;
}
