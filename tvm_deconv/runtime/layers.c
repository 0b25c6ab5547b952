#include "layers.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include <tvm/ffi/c_api.h>

/* ---- numbers ----------------------------------------------------------------------------------------------------- */

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

/* Begins with the time in nanoseconds: a model that another process has written names none of this one's. */
static int64_t next_number(void) {
  static int64_t last;
  if (!last) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    last = (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
  }
  return ++last;
}

int64_t tvm_deconv_add_layer(const struct facts *facts) {
  struct entry *entry = malloc(sizeof *entry);
  if (!entry) return 0;
  entry->facts = *facts;
  hold(facts);
  pthread_mutex_lock(&lock);
  int64_t number = entry->number = next_number();
  entry->next = entries;
  entries = entry;
  pthread_mutex_unlock(&lock);
  return number;
}

void tvm_deconv_remove_layer(int64_t number) {
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

struct facts *tvm_deconv_find_layer(int64_t number, char message[MESSAGE_BYTES]) {
  snprintf(message, MESSAGE_BYTES, "no memory for a layer");
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
  snprintf(message, MESSAGE_BYTES, "layer=%lld: must be a layer of a model that is being made in this process",
           (long long)number);
  return NULL;
}

void tvm_deconv_release_layer(struct facts *facts) {
  release(facts);
  free(facts);
}

/* ---- calls ------------------------------------------------------------------------------------------------------- */

int tvm_deconv_fit(const struct facts *facts, size_t rank, const int64_t *data, int64_t *out, char message[MESSAGE_BYTES]) {
  if (rank != (size_t)facts->rank) {
    snprintf(message, MESSAGE_BYTES, "data: rank must be %d, not %zu", facts->rank, rank);
    return -1;
  }
  for (int axis = 0; axis < facts->rank; ++axis) {
    int64_t scaled, least = axis > 1;
    if (data[axis] < least || (facts->data[axis] >= 0 && data[axis] != facts->data[axis]) ||
        __builtin_mul_overflow(facts->factor[axis], data[axis], &scaled) ||
        __builtin_add_overflow(scaled, facts->offset[axis], &out[axis]) || out[axis] < 0) {
      snprintf(message, MESSAGE_BYTES, "data: extent %lld of axis %d does not fit the layer", (long long)data[axis], axis);
      return -1;
    }
  }
  return 0;
}

/* Writes the error that a function of tvm_ffi has raised. */
static int raised(char message[MESSAGE_BYTES]) {
  TVMFFIObjectHandle error = NULL;
  TVMFFIErrorMoveFromRaised(&error);
  snprintf(message, MESSAGE_BYTES, "the layer failed without a message");
  if (!error) return -1;
  TVMFFIErrorCell *cell = (TVMFFIErrorCell *)((char *)error + sizeof(TVMFFIObject));
  snprintf(message, MESSAGE_BYTES, "%.*s: %.*s", (int)cell->kind.size, cell->kind.data, (int)cell->message.size,
           cell->message.data);
  TVMFFIObjectDecRef(error);
  return -1;
}

static TVMFFIAny tensor_argument(DLTensor *tensor) {
  return (TVMFFIAny){.type_index = kTVMFFIDLTensorPtr, .v_ptr = tensor};
}

/* Returns the data, for `which` 0, or the output, for 1. */
static DLTensor tensor_of(const struct facts *facts, int which, struct array array, int64_t *strides) {
  strides[facts->rank - 1] = 1;
  for (int axis = facts->rank - 1; axis > 0; --axis) strides[axis - 1] = strides[axis] * array.extents[axis];
  return (DLTensor){.data = array.memory,
                    .device = {kDLCPU, 0},
                    .ndim = facts->rank,
                    .dtype = {facts->types[which][0], facts->types[which][1], 1},
                    .shape = array.extents,
                    .strides = strides};
}

int tvm_deconv_run(const struct facts *facts, const struct host *host, struct array data, struct array out,
                   char message[MESSAGE_BYTES]) {
  for (int axis = 0; axis < facts->rank; ++axis)
    if (out.extents[axis] == 0) return 0; /* kernels need not know extents of zero */
  int64_t strides[2][MOST_AXES];
  DLTensor source = tensor_of(facts, 0, data, strides[0]), target = tensor_of(facts, 1, out, strides[1]);
  TVMFFIAny arguments[7], result = {.type_index = kTVMFFINone};
  int count = 0;
  arguments[count++] = (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = facts->threads};
  arguments[count++] = (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = 0}; /* the thread's own workspace */
  arguments[count++] = (TVMFFIAny){.type_index = kTVMFFIInt, .v_int64 = (intptr_t)host};
  arguments[count++] = tensor_argument(&source);
  for (int i = 0; i < 2; ++i)
    if (facts->constants[i]) {
      arguments[count++] = (TVMFFIAny){.type_index = kTVMFFITensor, .v_obj = facts->constants[i]};
    }
  arguments[count++] = tensor_argument(&target);
  return TVMFFIFunctionCall(facts->deconv, arguments, count, &result) ? raised(message) : 0;
}
