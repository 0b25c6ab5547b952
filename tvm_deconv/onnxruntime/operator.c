/*
 * Custom operators for ONNX Runtime, one for each pair of types, of data and output: a layer that a library has bound.
 *
 * A node holds the number of its layer, which `tvm_deconv_add_layer` has given. The kernel that ONNX Runtime makes of the
 * node keeps the layer's function and constants, which are objects of tvm_ffi, so the number is needed only while a
 * session is made. A number that nobody has given, as in a model that another process has written, is an error.
 *
 * Calls hold no lock and reach no Python. They run in the threads of the session.
 */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <tvm/ffi/c_api.h>

#include "onnxruntime_c_api.h"

#define EXPORT __attribute__((visibility("default")))

enum {
  API = 20,     /* the oldest version of the interface that has all that is used here: ONNX Runtime 1.20 */
  MOST_AXES = 5 /* batch, channels, three spatial axes */
};
static const char DOMAIN[] = "tvm_deconv";
static const OrtApi *ort;

/* ---- layers ------------------------------------------------------------------------------------------------------ */

/* `Facts` in operator.py is the same structure. */
struct facts {
  void *deconv;       /* tvm_ffi's function (threads, arena, host, data, *constants, out) */
  void *constants[2]; /* packed filter, and bias or NULL: tensors of tvm_ffi */
  int32_t threads;    /* that a call may use, 0: no limit */
  int32_t rank;
  uint8_t types[2][2];                          /* code and bits, as DLPack has them, of data and output */
  int64_t data[MOST_AXES];                      /* the data's extents, -1 for one that each call decides */
  int64_t factor[MOST_AXES], offset[MOST_AXES]; /* output extent = factor * data extent + offset */
};

struct entry {
  int64_t number;
  struct facts facts;
  struct entry *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *entries;

static void hold(const struct facts *facts) {
  TVMFFIObjectIncRef(facts->deconv);
  for (int i = 0; i < 2; ++i)
    if (facts->constants[i]) TVMFFIObjectIncRef(facts->constants[i]);
}

static void release(const struct facts *facts) {
  for (int i = 0; i < 2; ++i)
    if (facts->constants[i]) TVMFFIObjectDecRef(facts->constants[i]);
  TVMFFIObjectDecRef(facts->deconv);
}

/* Returns the number of a new layer, 0 if there is no memory. */
EXPORT int64_t tvm_deconv_add_layer(const struct facts *facts) {
  static int64_t last;
  struct entry *entry = malloc(sizeof *entry);
  if (!entry) return 0;
  entry->facts = *facts;
  hold(facts);
  pthread_mutex_lock(&lock);
  entry->number = ++last;
  entry->next = entries;
  entries = entry;
  pthread_mutex_unlock(&lock);
  return entry->number;
}

/* Forgets a layer; kernels that were made of it stay. */
EXPORT void tvm_deconv_remove_layer(int64_t number) {
  pthread_mutex_lock(&lock);
  struct entry **place = &entries;
  while (*place && (*place)->number != number) place = &(*place)->next;
  struct entry *entry = *place;
  if (entry) *place = entry->next;
  pthread_mutex_unlock(&lock);
  if (!entry) return;
  release(&entry->facts);
  free(entry);
}

/* Returns a copy of the facts of a layer, held, or NULL. */
static struct facts *find_layer(int64_t number) {
  struct facts *found = malloc(sizeof *found);
  if (!found) return NULL;
  pthread_mutex_lock(&lock);
  struct entry *entry = entries;
  while (entry && entry->number != number) entry = entry->next;
  if (entry) {
    *found = entry->facts;
    hold(found);
  }
  pthread_mutex_unlock(&lock);
  if (entry) return found;
  free(found);
  return NULL;
}

/* ---- threads ----------------------------------------------------------------------------------------------------- */

/* Of the launcher: docs/launcher.md. */
struct host {
  void (*parallel_for)(void *context, size_t count, void (*body)(void *argument, size_t index), void *argument);
  void *context;
};

/* The launcher's caller does what the session's threads have not. */
static void parallel_for(void *context, size_t count, void (*body)(void *argument, size_t index), void *argument) {
  OrtStatus *status = ort->KernelContext_ParallelFor(context, body, count, 0, argument);
  if (status) ort->ReleaseStatus(status);
}

/* ---- kernel ------------------------------------------------------------------------------------------------------ */

struct kernel {
  struct facts *facts;
  pid_t process; /* that has the session's threads */
};

static OrtStatus *make_kernel(const OrtCustomOp *op, const OrtApi *api, const OrtKernelInfo *info, void **kernel) {
  (void)op;
  int64_t number;
  OrtStatus *status = api->KernelInfoGetAttribute_int64(info, "layer", &number);
  if (status) return status;
  struct kernel *made = malloc(sizeof *made);
  if (!made) return api->CreateStatus(ORT_FAIL, "no memory for a layer");
  *made = (struct kernel){find_layer(number), getpid()};
  *kernel = made;
  if (made->facts) return NULL;
  free(made);
  char message[128];
  snprintf(message, sizeof message, "layer=%lld: must be a layer of a session that is being made in this process",
           (long long)number);
  return api->CreateStatus(ORT_INVALID_ARGUMENT, message);
}

static void destroy_kernel(void *given) {
  struct kernel *kernel = given;
  release(kernel->facts);
  free(kernel->facts);
  free(kernel);
}

/* Writes the extents of `value` and of the layer's output; returns an error if the data do not fit. */
static OrtStatus *read_extents(const struct facts *facts, const OrtValue *value, int64_t *data, int64_t *out) {
  OrtTensorTypeAndShapeInfo *info;
  size_t rank;
  OrtStatus *status = ort->GetTensorTypeAndShape(value, &info);
  if (status) return status;
  status = ort->GetDimensionsCount(info, &rank);
  if (!status && rank == (size_t)facts->rank) status = ort->GetDimensions(info, data, rank);
  ort->ReleaseTensorTypeAndShapeInfo(info);
  if (status) return status;
  char message[128];
  if (rank != (size_t)facts->rank) {
    snprintf(message, sizeof message, "data: rank must be %d, not %zu", facts->rank, rank);
    return ort->CreateStatus(ORT_INVALID_ARGUMENT, message);
  }
  for (int axis = 0; axis < facts->rank; ++axis) {
    int64_t scaled, least = axis > 1;
    if (data[axis] < least || (facts->data[axis] >= 0 && data[axis] != facts->data[axis]) ||
        __builtin_mul_overflow(facts->factor[axis], data[axis], &scaled) ||
        __builtin_add_overflow(scaled, facts->offset[axis], &out[axis]) || out[axis] < 0) {
      snprintf(message, sizeof message, "data: extent %lld of axis %d does not fit the layer", (long long)data[axis],
               axis);
      return ort->CreateStatus(ORT_INVALID_ARGUMENT, message);
    }
  }
  return NULL;
}

/* Returns the error that a function of tvm_ffi has raised. */
static OrtStatus *raised_error(void) {
  TVMFFIObjectHandle error = NULL;
  TVMFFIErrorMoveFromRaised(&error);
  if (!error) return ort->CreateStatus(ORT_FAIL, "the layer failed without a message");
  TVMFFIErrorCell *cell = (TVMFFIErrorCell *)((char *)error + sizeof(TVMFFIObject));
  char message[1024];
  snprintf(message, sizeof message, "%.*s: %.*s", (int)cell->kind.size, cell->kind.data, (int)cell->message.size,
           cell->message.data);
  TVMFFIObjectDecRef(error);
  return ort->CreateStatus(ORT_FAIL, message);
}

static TVMFFIAny tensor_argument(DLTensor *tensor) {
  return (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = tensor};
}

/* Returns the data, for `which` 0, or the output, for 1. */
static DLTensor tensor_of(const struct facts *facts, int which, void *memory, int64_t *shape, int64_t *strides) {
  strides[facts->rank - 1] = 1;
  for (int axis = facts->rank - 1; axis > 0; --axis) strides[axis - 1] = strides[axis] * shape[axis];
  return (DLTensor){.data = memory,
                    .device = {kDLCPU, 0},
                    .ndim = facts->rank,
                    .dtype = {facts->types[which][0], facts->types[which][1], 1},
                    .shape = shape,
                    .strides = strides};
}

static OrtStatus *run(const struct facts *facts, const struct host *host, DLTensor *data, DLTensor *out) {
  TVMFFIAny arguments[7], result = {.type_index = kTVMFFINone};
  int count = 0;
  arguments[count++] = (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = facts->threads};
  arguments[count++] = (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = 0}; /* the thread's own workspace */
  arguments[count++] = (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = (intptr_t)host};
  arguments[count++] = tensor_argument(data);
  for (int i = 0; i < 2; ++i)
    if (facts->constants[i]) {
      arguments[count++] = (TVMFFIAny){.type_index = kTVMFFITensor, .v_obj = facts->constants[i]};
    }
  arguments[count++] = tensor_argument(out);
  return TVMFFIFunctionCall(facts->deconv, arguments, count, &result) ? raised_error() : NULL;
}

static OrtStatus *compute(void *given_kernel, OrtKernelContext *context) {
  const struct kernel *kernel = given_kernel;
  const struct facts *facts = kernel->facts;
  const OrtValue *given;
  OrtValue *made;
  void *from, *to;
  int64_t data[MOST_AXES], out[MOST_AXES], strides[2][MOST_AXES], elements = 1;
  OrtStatus *status = ort->KernelContext_GetInput(context, 0, &given);
  if (!status) status = read_extents(facts, given, data, out);
  if (!status) status = ort->KernelContext_GetOutput(context, 0, out, (size_t)facts->rank, &made);
  if (!status) status = ort->GetTensorMutableData((OrtValue *)given, &from); /* the function reads only */
  if (!status) status = ort->GetTensorMutableData(made, &to);
  if (status) return status;
  for (int axis = 0; axis < facts->rank; ++axis) elements *= out[axis];
  if (elements == 0) return NULL; /* kernels need not know extents of zero */
  DLTensor source = tensor_of(facts, 0, from, data, strides[0]), target = tensor_of(facts, 1, to, out, strides[1]);
  struct host host = {parallel_for, context};
  return run(facts, kernel->process == getpid() ? &host : NULL, &source, &target);
}

/* ---- operators --------------------------------------------------------------------------------------------------- */

struct operator {
  OrtCustomOp base;
  const char *name;
  ONNXTensorElementDataType input, output;
};

static const char *name_of(const OrtCustomOp *op) { return ((const struct operator *)op)->name; }
static const char *provider_of(const OrtCustomOp *op) { return (void)op, NULL; } /* the CPU's */
static size_t one(const OrtCustomOp *op) { return (void)op, 1; }
static int one_version(const OrtCustomOp *op) { return (void)op, 1; }
static int none(const OrtCustomOp *op) { return (void)op, 0; }
static ONNXTensorElementDataType input_of(const OrtCustomOp *op, size_t index) {
  return (void)index, ((const struct operator *)op)->input;
}
static ONNXTensorElementDataType output_of(const OrtCustomOp *op, size_t index) {
  return (void)index, ((const struct operator *)op)->output;
}
static OrtCustomOpInputOutputCharacteristic required(const OrtCustomOp *op, size_t index) {
  return (void)op, (void)index, INPUT_OUTPUT_REQUIRED;
}
static OrtMemType any_memory(const OrtCustomOp *op, size_t index) { return (void)op, (void)index, OrtMemTypeDefault; }

#define OPERATOR(text, from, to)                                                                                     \
  {{.version = API, .GetName = name_of, .GetExecutionProviderType = provider_of, .GetInputType = input_of,          \
    .GetInputTypeCount = one, .GetOutputType = output_of, .GetOutputTypeCount = one,                                \
    .KernelDestroy = destroy_kernel, .GetInputCharacteristic = required, .GetOutputCharacteristic = required,       \
    .GetInputMemoryType = any_memory, .GetVariadicInputMinArity = none, .GetVariadicInputHomogeneity = none,        \
    .GetVariadicOutputMinArity = none, .GetVariadicOutputHomogeneity = none, .CreateKernelV2 = make_kernel,         \
    .KernelComputeV2 = compute, .GetStartVersion = one_version, .GetEndVersion = one_version},                      \
   text, ONNX_TENSOR_ELEMENT_DATA_TYPE_##from, ONNX_TENSOR_ELEMENT_DATA_TYPE_##to}

static const struct operator operators[] = {
    OPERATOR("ConvTranspose_float32", FLOAT, FLOAT),
    OPERATOR("ConvTranspose_float64", DOUBLE, DOUBLE),
    OPERATOR("ConvTranspose_float16", FLOAT16, FLOAT16),
    OPERATOR("ConvTranspose_bfloat16", BFLOAT16, BFLOAT16),
    OPERATOR("ConvTranspose_int8", INT8, INT8),
    OPERATOR("ConvTranspose_int8_uint8", INT8, UINT8),
    OPERATOR("ConvTranspose_int8_float32", INT8, FLOAT),
    OPERATOR("ConvTranspose_uint8", UINT8, UINT8),
    OPERATOR("ConvTranspose_uint8_int8", UINT8, INT8),
    OPERATOR("ConvTranspose_uint8_float32", UINT8, FLOAT),
};

/* Adds the operators to the options of a session; the name is ONNX Runtime's. Their domain lives as long as the process. */
EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  static OrtCustomOpDomain *domain;
  OrtStatus *status = NULL;
  pthread_mutex_lock(&lock);
  if (!domain) {
    ort = base->GetApi(API);
    if (ort) status = ort->CreateCustomOpDomain(DOMAIN, &domain);
    for (size_t i = 0; ort && !status && i < sizeof operators / sizeof *operators; ++i)
      status = ort->CustomOpDomain_Add(domain, &operators[i].base);
  }
  pthread_mutex_unlock(&lock);
  return ort && !status ? ort->AddCustomOpDomain(options, domain) : status;
}
