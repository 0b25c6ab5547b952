/*
 * Artifacts of tvm_deconv from C99: open a library, pack a filter once, call. See docs/c.md.
 *
 * Nothing but this header is needed to compile. A program links -ldl, which is empty on newer systems. At run time the
 * functions of errors come from libtvm_ffi: the program links it, or tdl_open loads it by its name.
 *
 * All functions return 0, or -1 after they have written a text of at most `size` bytes, with its end, to `error`.
 * library.hpp, in C++, reads manifests besides: it verifies libraries, chooses among them and knows their shapes.
 */
#ifndef TVM_DECONV_ARTIFACT_H_
#define TVM_DECONV_ARTIFACT_H_

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

/* ---- arrays: the structure of DLPack ------------------------------------------------------------------------------ */

enum { TDL_INT = 0, TDL_UINT = 1, TDL_FLOAT = 2 }; /* codes of types; bfloat16 is TDL_UINT with 16 bits */
enum { TDL_CPU = 1 };

struct tdl_tensor {
  void *data;
  int32_t device_type, device_id;
  int32_t ndim;
  uint8_t code, bits;
  uint16_t lanes;
  int64_t *shape;
  int64_t *strides; /* NULL: C-contiguous, which artifacts require */
  uint64_t byte_offset;
};

/* Returns a contiguous array in CPU memory, aligned to the size of an element; it keeps the pointers. */
static inline struct tdl_tensor tdl_array(const void *data, int code, int bits, int ndim, const int64_t *shape) {
  struct tdl_tensor tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = (void *)data;
  tensor.device_type = TDL_CPU;
  tensor.ndim = ndim;
  tensor.code = (uint8_t)code;
  tensor.bits = (uint8_t)bits;
  tensor.lanes = 1;
  tensor.shape = (int64_t *)shape;
  return tensor;
}

/* ---- the calling convention of tvm_ffi ---------------------------------------------------------------------------- */

enum { TDL_TYPE_NONE = 0, TDL_TYPE_INT = 1, TDL_TYPE_TENSOR = 7 };

struct tdl_value {
  int32_t type;
  uint32_t zero;
  union {
    int64_t integer;
    const void *pointer;
  } as;
};

typedef int (*tdl_function)(void *self, const struct tdl_value *arguments, int32_t count, struct tdl_value *result);

/* An open artifact. It may be copied, and stays open: threads may run its code at any time. */
struct tdl_artifact {
  tdl_function pack, deconv;
  int (*set_num_threads)(int count);
  int (*get_num_threads)(void);
  int (*make_arena)(void *memory, uint64_t nbytes, uint64_t lane_bytes, uint64_t shared_bytes);
  void (*move_error)(void **error); /* of libtvm_ffi */
  int (*release)(void *object);
};

static inline int tdl_fail(char *error, size_t size, const char *what, const char *why) {
  if (size) snprintf(error, size, "%s: %s", what, why ? why : "unknown");
  return -1;
}

/* ISO C has no conversion from a pointer to data to one to a function. */
static inline int tdl_find(void *library, const char *name, void *function) {
  void *found = dlsym(library, name);
  memcpy(function, &found, sizeof found);
  return found != NULL;
}

/*
 * Opens the library at `path`, which has a slash in it. The path decides which library it is: give another content another
 * path. What it holds is not verified.
 */
static inline int tdl_open(struct tdl_artifact *artifact, const char *path, char *error, size_t size) {
  /* Artifacts name no library for these, so they must be visible to all before. POSIX has no RTLD_DEFAULT. */
  void *process = dlopen(NULL, RTLD_NOW);
  if (!process) return tdl_fail(error, size, "this process", dlerror());
  if (!dlsym(process, "TVMFFIErrorMoveFromRaised") && !dlopen("libtvm_ffi.so", RTLD_NOW | RTLD_GLOBAL))
    return tdl_fail(error, size, "libtvm_ffi.so", dlerror());
  void *library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
  if (!library) return tdl_fail(error, size, path, dlerror());
  int found = dlsym(library, "tvm_deconv_runtime_v5") != NULL; /* the version of all that follows */
  found = found && tdl_find(library, "__tvm_ffi_pack", &artifact->pack);
  found = found && tdl_find(library, "__tvm_ffi_deconv_with", &artifact->deconv);
  found = found && tdl_find(library, "tvm_deconv_set_num_threads", &artifact->set_num_threads);
  found = found && tdl_find(library, "tvm_deconv_get_num_threads", &artifact->get_num_threads);
  found = found && tdl_find(library, "tvm_deconv_make_arena", &artifact->make_arena);
  found = found && tdl_find(process, "TVMFFIErrorMoveFromRaised", &artifact->move_error);
  found = found && tdl_find(process, "TVMFFIObjectDecRef", &artifact->release);
  if (found) return 0;
  dlclose(library);
  return tdl_fail(error, size, path, "is no artifact for a CPU of this version: compile it again");
}

/* Calls a function; its error becomes text: "TypeError: Mismatched ...". */
static inline int tdl_invoke(const struct tdl_artifact *artifact, tdl_function function, const struct tdl_value *arguments,
                             int32_t count, char *error, size_t size) {
  struct tdl_value result = {0, 0, {0}};
  if (function(NULL, arguments, count, &result) == 0) return 0;
  /* TVMFFIObject, 24 bytes, and the first two fields of TVMFFIErrorCell: kind and message. */
  struct text {
    const char *data;
    size_t size;
  };
  struct raised {
    char header[24];
    struct text kind, message;
  };
  void *raised = NULL;
  artifact->move_error(&raised);
  if (!raised) return tdl_fail(error, size, "error", "none was raised");
  const struct raised *said = (const struct raised *)raised;
  if (size)
    snprintf(error, size, "%.*s: %.*s", (int)said->kind.size, said->kind.data, (int)said->message.size,
             said->message.data);
  artifact->release(raised);
  return -1;
}

static inline struct tdl_value tdl_tensor_value(const struct tdl_tensor *tensor) {
  struct tdl_value value = {TDL_TYPE_TENSOR, 0, {0}};
  value.as.pointer = tensor;
  return value;
}

static inline struct tdl_value tdl_integer_value(int64_t integer) {
  struct tdl_value value = {TDL_TYPE_INT, 0, {0}};
  value.as.integer = integer;
  return value;
}

/*
 * Packs `filter`, of shape [G, Ci, Co, *K] with Ci and Co of one group, into `packed`, whose shape and type the manifest
 * has (`packed_shape`, `packed_dtype`); kernels are fastest if it begins at a multiple of 64 bytes. Once for each filter;
 * afterwards the filter is not needed.
 */
static inline int tdl_pack(const struct tdl_artifact *artifact, const struct tdl_tensor *filter,
                           const struct tdl_tensor *packed, char *error, size_t size) {
  const struct tdl_value arguments[] = {tdl_tensor_value(filter), tdl_tensor_value(packed)};
  return tdl_invoke(artifact, artifact->pack, arguments, 2, error, size);
}

/*
 * Computes `out` from `data`. `bias` is NULL if the problem has none. Up to `threads` threads compute, this one included;
 * 0: as many as are set. `workspace` is memory that tdl_prepare_workspace has prepared, or NULL: every thread keeps its own.
 * Several threads may call at one time, also with one `packed`.
 */
static inline int tdl_call(const struct tdl_artifact *artifact, const struct tdl_tensor *data,
                           const struct tdl_tensor *packed, const struct tdl_tensor *bias, const struct tdl_tensor *out,
                           int threads, void *workspace, char *error, size_t size) {
  struct tdl_value arguments[7];
  int32_t count = 0;
  arguments[count++] = tdl_integer_value(threads);
  arguments[count++] = tdl_integer_value((int64_t)(intptr_t)workspace);
  arguments[count++] = tdl_integer_value(0); /* the threads of the launcher */
  arguments[count++] = tdl_tensor_value(data);
  arguments[count++] = tdl_tensor_value(packed);
  if (bias) arguments[count++] = tdl_tensor_value(bias);
  arguments[count++] = tdl_tensor_value(out);
  return tdl_invoke(artifact, artifact->deconv, arguments, count, error, size);
}

/*
 * Prepares `nbytes` of memory as workspace of calls, which outlives them. The manifest has the bytes of one thread
 * (`scratch_bytes`) and of all together (`shared_bytes`). Returns the number of threads that it serves, 0 if none.
 */
static inline int tdl_prepare_workspace(const struct tdl_artifact *artifact, void *memory, uint64_t nbytes,
                                        uint64_t scratch_bytes, uint64_t shared_bytes) {
  uint64_t lanes = (scratch_bytes + 63) / 64;
  return artifact->make_arena(memory, nbytes, (lanes ? lanes : 1) * 64, shared_bytes);
}

#ifdef __cplusplus
}
#endif

#endif /* TVM_DECONV_ARTIFACT_H_ */
