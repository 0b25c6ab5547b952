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
#include <stdlib.h>
#include <unistd.h>

#include "../runtime/layers.h"
#include "onnxruntime_c_api.h"

enum { API = 20 }; /* the oldest version of the interface that has all that is used here: ONNX Runtime 1.20 */
static const char DOMAIN[] = "tvm_deconv";
static const OrtApi *ort;

/* ---- threads ----------------------------------------------------------------------------------------------------- */

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
  char message[MESSAGE_BYTES];
  *made = (struct kernel){tvm_deconv_find_layer(number, message), getpid()};
  *kernel = made;
  if (made->facts) return NULL;
  free(made);
  return api->CreateStatus(ORT_INVALID_ARGUMENT, message);
}

static void destroy_kernel(void *given) {
  struct kernel *kernel = given;
  tvm_deconv_release_layer(kernel->facts);
  free(kernel);
}

/* Writes the extents of `value` and of the layer's output; returns an error if the data do not fit. */
static OrtStatus *read_extents(const struct facts *facts, const OrtValue *value, int64_t *data, int64_t *out) {
  OrtTensorTypeAndShapeInfo *info;
  size_t rank;
  OrtStatus *status = ort->GetTensorTypeAndShape(value, &info);
  if (status) return status;
  status = ort->GetDimensionsCount(info, &rank);
  if (!status && rank <= MOST_AXES) status = ort->GetDimensions(info, data, rank);
  ort->ReleaseTensorTypeAndShapeInfo(info);
  if (status) return status;
  char message[MESSAGE_BYTES];
  return tvm_deconv_fit(facts, rank, data, out, message) ? ort->CreateStatus(ORT_INVALID_ARGUMENT, message) : NULL;
}

static OrtStatus *compute(void *given_kernel, OrtKernelContext *context) {
  const struct kernel *kernel = given_kernel;
  const struct facts *facts = kernel->facts;
  const OrtValue *given;
  OrtValue *made;
  void *from, *to;
  int64_t data[MOST_AXES], out[MOST_AXES];
  OrtStatus *status = ort->KernelContext_GetInput(context, 0, &given);
  if (!status) status = read_extents(facts, given, data, out);
  if (!status) status = ort->KernelContext_GetOutput(context, 0, out, (size_t)facts->rank, &made);
  if (!status) status = ort->GetTensorMutableData((OrtValue *)given, &from); /* the function reads only */
  if (!status) status = ort->GetTensorMutableData(made, &to);
  if (status) return status;
  struct host host = {parallel_for, context};
  struct array source = {from, data}, target = {to, out};
  char message[MESSAGE_BYTES];
  if (!tvm_deconv_run(facts, kernel->process == getpid() ? &host : NULL, source, target, message)) return NULL;
  return ort->CreateStatus(ORT_FAIL, message);
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
TVM_DECONV_EXPORT OrtStatus *RegisterCustomOps(OrtSessionOptions *options, const OrtApiBase *base) {
  static OrtCustomOpDomain *domain;
  static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
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
