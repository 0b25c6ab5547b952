/*
 * Opens the library that RUN_LIBRARY names and computes the problem of examples/cpp, with whatever C library it is started
 * with. It prints the sum that examples/cpp/plain.c prints.
 */
#include <gnu/libc-version.h>
#include <stdlib.h>

#include <tvm_deconv/artifact.h>

/* What libtvm_ffi has, which needs a C++ library: artifacts call them in errors alone. */
void TVMFFIErrorMoveFromRaised(void **result) { *result = NULL; }
void TVMFFIErrorSetRaised(void *error) { (void)error; abort(); }
void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) { printf("%s: %s\n", kind, message); }
void TVMFFIErrorSetRaisedFromCStrParts(const char *kind, const char **parts, int32_t count) {
  printf("%s: ", kind);
  for (int32_t i = 0; i < count; ++i) printf("%s", parts[i]);
  printf("\n");
}
int TVMFFIObjectDecRef(void *object) { return object != NULL; }

static int run(void) {
  char error[512];
  struct tdl_artifact artifact;
  if (tdl_open(&artifact, getenv("RUN_LIBRARY"), error, sizeof error)) {
    printf("%s\n", error);
    return 1;
  }
  const int64_t elements = atol(getenv("RUN_PACKED"));
  const int64_t data_shape[] = {1, 4, 5, 6}, out_shape[] = {1, 3, 10, 12}, filter_shape[] = {1, 4, 3, 2, 2};
  static float data[120], filter[48], out[360];
  float *packed = calloc((size_t)elements, sizeof *packed);
  for (int i = 0; i < 120; ++i) data[i] = (float)(i % 7) - 3;
  for (int i = 0; i < 48; ++i) filter[i] = (float)(i % 5) - 2;
  struct tdl_tensor weights = tdl_array(packed, TDL_FLOAT, 32, 1, &elements);
  struct tdl_tensor given = tdl_array(filter, TDL_FLOAT, 32, 5, filter_shape);
  struct tdl_tensor input = tdl_array(data, TDL_FLOAT, 32, 4, data_shape);
  struct tdl_tensor output = tdl_array(out, TDL_FLOAT, 32, 4, out_shape);
  artifact.set_num_threads(2);
  if (tdl_pack(&artifact, &given, &weights, error, sizeof error) ||
      tdl_call(&artifact, &input, &weights, NULL, &output, 0, NULL, error, sizeof error)) {
    printf("%s\n", error);
    return 1;
  }
  double sum = 0;
  for (int i = 0; i < 360; ++i) sum += out[i] * (i % 3 + 1);
  printf("glibc %s: %.6g\n", gnu_get_libc_version(), sum);
  return 0;
}

/* The usual start of a program would need this machine's C library. */
__attribute__((force_align_arg_pointer)) void _start(void) { exit(run()); }
