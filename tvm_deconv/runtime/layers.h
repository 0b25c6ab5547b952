/*
 * Layers that a library has bound, for operators in C and C++ that frameworks call: what such an operator knows of its
 * layer, the numbers by which models name layers, and calls. Calls hold no lock and reach no Python.
 *
 * A number is needed only while a model is made: who finds a layer by it keeps what belongs to the layer. Another process
 * knows no number of this one.
 */
#ifndef TVM_DECONV_LAYERS_H
#define TVM_DECONV_LAYERS_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define TVM_DECONV_EXPORT __attribute__((visibility("default")))

enum {
  MOST_AXES = 5, /* batch, channels, three spatial axes */
  MESSAGE_BYTES = 1024
};

/* `Facts` in facts.py is the same structure. */
struct facts {
  void *deconv;       /* tvm_ffi's function (threads, arena, host, data, *constants, out) */
  void *constants[2]; /* packed filter, and bias or NULL: tensors of tvm_ffi */
  int32_t threads;    /* that a call may use, 0: no limit */
  int32_t rank;
  uint8_t types[2][2];                          /* code and bits, as DLPack has them, of data and output */
  int64_t data[MOST_AXES];                      /* the data's extents, -1 for one that each call decides */
  int64_t factor[MOST_AXES], offset[MOST_AXES]; /* output extent = factor * data extent + offset */
};

/* Of the launcher: docs/launcher.md. */
struct host {
  void (*parallel_for)(void *context, size_t count, void (*body)(void *argument, size_t index), void *argument);
  void *context;
};

/* Returns the number of a new layer, 0 if there is no memory. */
TVM_DECONV_EXPORT int64_t tvm_deconv_add_layer(const struct facts *facts);

/* Forgets a layer; what was found by its number stays. */
TVM_DECONV_EXPORT void tvm_deconv_remove_layer(int64_t number);

/* Returns the facts of a layer, which the caller gives back, or NULL with a message. */
struct facts *tvm_deconv_find_layer(int64_t number, char message[MESSAGE_BYTES]);
void tvm_deconv_release_layer(struct facts *facts);

/* Writes the output's extents for data of `rank` extents; returns -1 with a message if they do not fit. */
int tvm_deconv_fit(const struct facts *facts, size_t rank, const int64_t *data, int64_t *out, char message[MESSAGE_BYTES]);

/* An array of the extents that fit. */
struct array {
  void *memory;
  int64_t *extents;
};

/* Computes a layer in the threads of `host`, or in the launcher's for NULL; returns -1 with a message if it fails. */
int tvm_deconv_run(const struct facts *facts, const struct host *host, struct array data, struct array out,
                   char message[MESSAGE_BYTES]);

#ifdef __cplusplus
}
#endif
#endif
