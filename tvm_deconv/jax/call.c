/*
 * A handler of XLA's foreign functions: calls the function of an artifact on the buffers of a program, without a copy.
 *
 * The attribute `artifact` names the function, as `tvm_deconv_add_function` was told. Functions are of libraries that are
 * never unloaded. Operands are data, packed filter and bias if there is one, all of the types that the artifact has:
 * bfloat16 is given as unsigned integers. Kernels check types and shapes themselves.
 */
#include <pthread.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <tvm/ffi/c_api.h>
#include <xla/ffi/api/c_api.h>

#define EXPORT __attribute__((visibility("default")))

enum { MOST_OPERANDS = 4, CALL_INTEGERS = 3 };

/* ---- functions --------------------------------------------------------------------------------------------------- */

struct entry {
  char *name;
  void *deconv; /* tvm_ffi's function (threads, arena, host, data, packed filter, ..., out) */
  struct entry *next;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *entries;

static void *find_function(const char *name, size_t length) {
  void *found = NULL;
  pthread_mutex_lock(&lock);
  for (struct entry *entry = entries; entry && !found; entry = entry->next)
    if (strlen(entry->name) == length && memcmp(entry->name, name, length) == 0) found = entry->deconv;
  pthread_mutex_unlock(&lock);
  return found;
}

/* Lets calls find a function by its name; returns 0, or -1 if there is no memory. */
EXPORT int tvm_deconv_add_function(const char *name, void *deconv) {
  if (find_function(name, strlen(name))) return 0;
  struct entry *entry = malloc(sizeof *entry);
  char *copy = strdup(name);
  if (!entry || !copy) {
    free(entry), free(copy);
    return -1;
  }
  TVMFFIObjectIncRef(deconv);
  pthread_mutex_lock(&lock);
  *entry = (struct entry){copy, deconv, entries};
  entries = entry;
  pthread_mutex_unlock(&lock);
  return 0;
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

static XLA_FFI_Error *error(const XLA_FFI_CallFrame *frame, XLA_FFI_Error_Code code, const char *message) {
  XLA_FFI_Error_Create_Args made = {
      .struct_size = XLA_FFI_Error_Create_Args_STRUCT_SIZE, .message = message, .errc = code};
  return frame->api->XLA_FFI_Error_Create(&made);
}

/* Returns the error that a function of tvm_ffi has raised. */
static XLA_FFI_Error *raised_error(const XLA_FFI_CallFrame *frame) {
  TVMFFIObjectHandle raised = NULL;
  TVMFFIErrorMoveFromRaised(&raised);
  if (!raised) return error(frame, XLA_FFI_Error_Code_INTERNAL, "the layer failed without a message");
  TVMFFIErrorCell *cell = (TVMFFIErrorCell *)((char *)raised + sizeof(TVMFFIObject));
  char message[1024];
  snprintf(message, sizeof message, "%.*s: %.*s", (int)cell->kind.size, cell->kind.data, (int)cell->message.size,
           cell->message.data);
  TVMFFIObjectDecRef(raised);
  return error(frame, XLA_FFI_Error_Code_INTERNAL, message);
}

static DLDataType type_of(XLA_FFI_DataType type) {
  switch (type) {
    case XLA_FFI_DataType_F16: return (DLDataType){kDLFloat, 16, 1};
    case XLA_FFI_DataType_F32: return (DLDataType){kDLFloat, 32, 1};
    case XLA_FFI_DataType_F64: return (DLDataType){kDLFloat, 64, 1};
    case XLA_FFI_DataType_BF16: case XLA_FFI_DataType_U16: return (DLDataType){kDLUInt, 16, 1};
    case XLA_FFI_DataType_S8: return (DLDataType){kDLInt, 8, 1};
    case XLA_FFI_DataType_S16: return (DLDataType){kDLInt, 16, 1};
    case XLA_FFI_DataType_S32: return (DLDataType){kDLInt, 32, 1};
    case XLA_FFI_DataType_U8: return (DLDataType){kDLUInt, 8, 1};
    default: return (DLDataType){kDLOpaqueHandle, 0, 0}; /* which every kernel refuses */
  }
}

static DLTensor tensor_of(const XLA_FFI_Buffer *buffer) {
  return (DLTensor){.data = buffer->data,
                    .device = {kDLCPU, 0},
                    .ndim = (int32_t)buffer->rank,
                    .dtype = type_of(buffer->dtype),
                    .shape = buffer->dims};
}

static bool is_empty(const XLA_FFI_Buffer *buffer) {
  for (int64_t axis = 0; axis < buffer->rank; ++axis)
    if (buffer->dims[axis] == 0) return true;
  return false;
}

static XLA_FFI_Error *compute(const XLA_FFI_CallFrame *frame) {
  const XLA_FFI_Args *given = &frame->args;
  if (given->size >= MOST_OPERANDS || frame->rets.size != 1 || frame->attrs.size != 1 ||
      frame->attrs.types[0] != XLA_FFI_AttrType_STRING) {
    return error(frame, XLA_FFI_Error_Code_INVALID_ARGUMENT, "tvm_deconv: must have data, packed filter, bias, one result");
  }
  const XLA_FFI_ByteSpan *name = frame->attrs.attrs[0];
  void *deconv = find_function(name->ptr, name->len);
  if (!deconv) {
    char message[256];
    snprintf(message, sizeof message, "artifact=%.*s: must be loaded in this process", (int)name->len, name->ptr);
    return error(frame, XLA_FFI_Error_Code_NOT_FOUND, message);
  }
  if (is_empty(frame->rets.rets[0])) return NULL; /* kernels need not know extents of zero */
  DLTensor tensors[MOST_OPERANDS];
  TVMFFIAny arguments[CALL_INTEGERS + MOST_OPERANDS], result = {.type_index = kTVMFFINone};
  int count = 0;
  while (count < CALL_INTEGERS) arguments[count++] = (TVMFFIAny){.type_index = kTVMFFIInt}; /* the launcher decides */
  for (int64_t i = 0; i <= given->size; ++i) {
    tensors[i] = tensor_of(i < given->size ? given->args[i] : frame->rets.rets[0]);
    arguments[count++] = (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = &tensors[i]};
  }
  return TVMFFIFunctionCall(deconv, arguments, count, &result) ? raised_error(frame) : NULL;
}

/* XLA asks what interface a handler was compiled for by a call with an extension. */
EXPORT XLA_FFI_Error *tvm_deconv_handle(XLA_FFI_CallFrame *frame) {
  XLA_FFI_Extension_Base *extension = frame->extension_start;
  if (extension && extension->type == XLA_FFI_Extension_Metadata) {
    XLA_FFI_Metadata *metadata = ((XLA_FFI_Metadata_Extension *)extension)->metadata;
    metadata->api_version = (XLA_FFI_Api_Version){.struct_size = XLA_FFI_Api_Version_STRUCT_SIZE,
                                                  .major_version = XLA_FFI_API_MAJOR,
                                                  .minor_version = XLA_FFI_API_MINOR};
    return NULL;
  }
  return frame->stage == XLA_FFI_ExecutionStage_EXECUTE ? compute(frame) : NULL;
}
