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

/* ---- shapes ------------------------------------------------------------------------------------------------------ */

enum { NAME_BYTES = 64 };

struct shape {
  int64_t number; /* of the layer */
  size_t rank;
  int64_t extents[MOST_AXES];
  char names[MOST_AXES][NAME_BYTES]; /* of extents that are not known; empty for others */
};

/* Reads the data's shape; a rank of 0 if it is unknown or too large. */
static OrtStatus *read_shape(const OrtShapeInferContext *context, struct shape *data) {
  OrtTensorTypeAndShapeInfo *info; /* the context's */
  const char *names[MOST_AXES];
  OrtStatus *status = ort->ShapeInferContext_GetInputTypeShape(context, 0, &info);
  if (!status) status = ort->GetDimensionsCount(info, &data->rank);
  if (!status && data->rank > MOST_AXES) data->rank = 0;
  if (!status) status = ort->GetDimensions(info, data->extents, data->rank);
  if (!status) status = ort->GetSymbolicDimensions(info, names, data->rank);
  for (size_t axis = 0; !status && axis < data->rank; ++axis)
    snprintf(data->names[axis], NAME_BYTES, "%s", strlen(names[axis]) < NAME_BYTES ? names[axis] : "");
  return status;
}

/* Writes the output's shape. An extent that is not known gets the data's name, if it is the same, or one of its own. */
static int make_shape(const struct facts *facts, const struct shape *data, struct shape *out) {
  *out = (struct shape){.number = data->number, .rank = data->rank};
  if (data->rank != (size_t)facts->rank) return -1;
  for (int axis = 0; axis < facts->rank; ++axis) {
    int64_t factor = facts->factor[axis], offset = facts->offset[axis];
    int64_t extent = data->extents[axis] < 0 ? facts->data[axis] : data->extents[axis];
    if (extent >= 0 || !factor) {
      if (__builtin_mul_overflow(factor, extent, &extent) || __builtin_add_overflow(extent, offset, &out->extents[axis]))
        return -1;
      if (out->extents[axis] < 0) return -1;
    } else if (factor == 1 && !offset && *data->names[axis]) {
      memcpy(out->names[axis], data->names[axis], NAME_BYTES);
    } else {
      snprintf(out->names[axis], NAME_BYTES, "tvm_deconv_%lld_%d", (long long)data->number, axis);
    }
  }
  return 0;
}

static OrtStatus *write_shape(OrtShapeInferContext *context, ONNXTensorElementDataType type, const struct shape *out) {
  OrtTensorTypeAndShapeInfo *info;
  const char *names[MOST_AXES];
  for (size_t axis = 0; axis < out->rank; ++axis) names[axis] = out->names[axis];
  OrtStatus *status = ort->CreateTensorTypeAndShapeInfo(&info);
  if (status) return status;
  status = ort->SetTensorElementType(info, type);
  if (!status) status = ort->SetDimensions(info, out->extents, out->rank);
  if (!status) status = ort->SetSymbolicDimensions(info, names, out->rank);
  if (!status) status = ort->ShapeInferContext_SetOutputTypeShape(context, 0, info);
  ort->ReleaseTensorTypeAndShapeInfo(info);
  return status;
}

/*
 * Tells ONNX Runtime what it knew of the layer's output: else it would compute at every call what follows from the
 * extents. Says nothing of a layer that does not exist, or data that do not fit, which have their own errors.
 */
static OrtStatus *infer_shape(const OrtCustomOp *op, OrtShapeInferContext *context) {
  struct shape data = {0}, out;
  const OrtOpAttr *attribute;
  size_t read;
  char message[MESSAGE_BYTES];
  OrtStatus *status = ort->ShapeInferContext_GetAttribute(context, "layer", &attribute);
  if (!status) status = ort->ReadOpAttr(attribute, ORT_OP_ATTR_INT, &data.number, sizeof data.number, &read);
  if (!status) status = read_shape(context, &data);
  if (status) return status;
  struct facts *facts = tvm_deconv_find_layer(data.number, message);
  if (!facts) return NULL;
  if (!make_shape(facts, &data, &out)) status = write_shape(context, op->GetOutputType(op, 0), &out);
  tvm_deconv_release_layer(facts);
  return status;
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
    .KernelComputeV2 = compute, .InferOutputShapeFn = infer_shape, .GetStartVersion = one_version, .GetEndVersion = one_version},                      \
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
