/*
 * A layer from C99, without a manifest: its shapes are written here. Compile it, and the problem, by
 *
 *     tvm-deconv compile examples/cpp/problem.json --output artifacts
 *     cc -std=c99 -Iinclude examples/cpp/plain.c -ldl -o plain
 *     LD_LIBRARY_PATH=$(tvm-ffi-config --libdir) ./plain artifacts/LIBRARY.so PACKED_ELEMENTS
 */
#include <stdio.h>
#include <stdlib.h>

#include <tvm_deconv/artifact.h>

enum { IN = 4, OUT = 3, HEIGHT = 5, WIDTH = 6, PACKED_MOST = 1 << 20 };

int main(int argc, char **argv) {
  char error[512];
  struct tdl_artifact artifact;
  if (argc < 3) {
    fprintf(stderr, "usage: %s LIBRARY PACKED_ELEMENTS\n", argv[0]);
    return 2;
  }
  if (tdl_open(&artifact, argv[1], error, sizeof error)) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  const int64_t elements = atol(argv[2]); /* of the manifest: packed_shape */
  const int64_t data_shape[] = {1, IN, HEIGHT, WIDTH}, out_shape[] = {1, OUT, 2 * HEIGHT, 2 * WIDTH};
  const int64_t filter_shape[] = {1, IN, OUT, 2, 2};
  static float data[IN * HEIGHT * WIDTH], filter[IN * OUT * 2 * 2], out[OUT * 2 * HEIGHT * 2 * WIDTH];
  static float packed[PACKED_MOST] __attribute__((aligned(64))); /* it begins with a line of the caches */
  if (elements <= 0 || elements > PACKED_MOST) return 1;
  for (int i = 0; i < IN * HEIGHT * WIDTH; ++i) data[i] = (float)(i % 7) - 3;
  for (int i = 0; i < IN * OUT * 2 * 2; ++i) filter[i] = (float)(i % 5) - 2;

  struct tdl_tensor weights = tdl_array(packed, TDL_FLOAT, 32, 1, &elements);
  struct tdl_tensor given = tdl_array(filter, TDL_FLOAT, 32, 5, filter_shape);
  struct tdl_tensor input = tdl_array(data, TDL_FLOAT, 32, 4, data_shape);
  struct tdl_tensor output = tdl_array(out, TDL_FLOAT, 32, 4, out_shape);
  if (tdl_pack(&artifact, &given, &weights, error, sizeof error) ||
      tdl_call(&artifact, &input, &weights, NULL, &output, 0, NULL, error, sizeof error)) {
    fprintf(stderr, "%s\n", error);
    return 1;
  }
  double sum = 0;
  for (int i = 0; i < OUT * 2 * HEIGHT * 2 * WIDTH; ++i) sum += out[i] * (i % 3 + 1);
  printf("%.6g\n", sum);
  return 0;
}
