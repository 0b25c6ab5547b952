// The warp's instructions by the layouts of the PTX manual: every lane shows its operands to the others, waits, reads.
// And the copies that run along.
#include "warp.h"
#include "runtime.h"

static ShimShown shim_shown[2][1024];

const ShimShown* shim_show(const ShimShown& mine) {
  // Two sets by turns: a lane may be one instruction ahead of those that have not read yet.
  auto& set = shim_shown[shim_fiber().operations++ % 2];
  set[shim_current] = mine;
  shim_yield();
  return set + shim_current / 32 * 32;
}

static void shim_ldmatrix(unsigned* r, const void* row, int count, bool transposed) {
  if ((uintptr_t)row % 16) shim_fail("a row at an odd address");
  const ShimShown* warp = shim_show({row, {}, {}});
  int lane = shim_current % 32;
  for (int i = 0; i < count; ++i) {
    unsigned short pair[2];
    for (int e = 0; e < 2; ++e) {
      int y = lane / 4, x = lane % 4 * 2 + e;
      if (transposed) std::swap(y, x);
      pair[e] = static_cast<const unsigned short*>(warp[8 * i + y].row)[x];
    }
    r[i] = pair[0] | (unsigned)pair[1] << 16;
  }
}

// All numbers of 16 bits: to convert one takes a call.
static const std::vector<float> shim_halves = [] {
  std::vector<float> halves(1 << 16);
  for (unsigned number = 0; number < halves.size(); ++number) {
    unsigned short bits = number;
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    halves[number] = value;
  }
  return halves;
}();
float shim_f16(unsigned short bits) { return shim_halves[bits]; }
float shim_bf16(unsigned short bits) { unsigned wide = (unsigned)bits << 16; float value; std::memcpy(&value, &wide, 4); return value; }

// m16n8k16 of pairs of 16 bits.
static void shim_mma(float* c, const void* registers_a, const void* registers_b, float (*number)(unsigned short)) {
  const unsigned *a = (const unsigned*)registers_a, *b = (const unsigned*)registers_b;
  const ShimShown* warp = shim_show({nullptr, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  int lane = shim_current % 32;
  for (int part = 0; part < 4; ++part) {
    int row = lane / 4 + part / 2 * 8, column = lane % 4 * 2 + part % 2;
    for (int k = 0; k < 16; ++k) {
      unsigned x = warp[row % 8 * 4 + k % 8 / 2].a[row / 8 + k / 8 * 2], y = warp[column * 4 + k % 8 / 2].b[k / 8];
      c[part] += number(x >> k % 2 * 16) * number(y >> k % 2 * 16);
    }
  }
}

// m16n8k32 of fours of bytes; sums wrap around.
template <typename A, typename B>
static void shim_mma_bytes(int* c, const void* registers_a, const void* registers_b) {
  const unsigned *a = (const unsigned*)registers_a, *b = (const unsigned*)registers_b;
  const ShimShown* warp = shim_show({nullptr, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  int lane = shim_current % 32;
  for (int part = 0; part < 4; ++part) {
    int row = lane / 4 + part / 2 * 8, column = lane % 4 * 2 + part % 2;
    for (int k = 0; k < 32; ++k) {
      unsigned x = warp[row % 8 * 4 + k % 16 / 4].a[row / 8 + k / 16 * 2], y = warp[column * 4 + k % 16 / 4].b[k / 16];
      c[part] = (unsigned)c[part] + (A)(x >> k % 4 * 8) * (B)(y >> k % 4 * 8);
    }
  }
}

// m16n8k8 of TF32. What is not rounded beforehand is cut off, as far as anything says: that is an error here.
float shim_tf32(unsigned bits) {
  if (bits & 0x1fff && (bits & 0x7fffffff) <= 0x7f800000) shim_fail("an operand that is no TF32");
  float value; std::memcpy(&value, &bits, 4); return value;
}

// A sum as tensor cores form it at their worst: every addend loses what lies below the last bit of the largest, and so
// does the sum, both towards zero.
float shim_truncated_sum(const double* addends, int count) {
  double largest = 0, sum = 0;
  for (int i = 0; i < count; ++i)
    if (std::fabs(addends[i]) > largest) largest = std::fabs(addends[i]);  // what is no number is not
  if (!(largest > 0x1p-100 && largest < 0x1p127)) {
    for (int i = 0; i < count; ++i) sum += addends[i];
    return sum;
  }
  uint64_t bits;
  std::memcpy(&bits, &largest, 8);
  bits &= 0x7ff0000000000000;  // the power of two of the largest
  double power;
  std::memcpy(&power, &bits, 8);
  double unit = power * 0x1p-23;
  for (int i = 0; i < count; ++i) sum += std::trunc(addends[i] / unit);
  while (std::fabs(sum) >= 0x1p24) sum = std::trunc(sum / 2), unit *= 2;
  return sum * unit;
}

void tvm_deconv_mma_tf32(float* c, const void* registers_a, const void* registers_b) {
  const unsigned *a = (const unsigned*)registers_a, *b = (const unsigned*)registers_b;
  const ShimShown* warp = shim_show({nullptr, {a[0], a[1], a[2], a[3]}, {b[0], b[1]}});
  int lane = shim_current % 32;
  for (int part = 0; part < 4; ++part) {
    int row = lane / 4 + part / 2 * 8, column = lane % 4 * 2 + part % 2;
    double addends[9] = {c[part]};
    for (int k = 0; k < 8; ++k)
      addends[k + 1] = (double)shim_tf32(warp[row % 8 * 4 + k % 4].a[row / 8 + k / 4 * 2]) * shim_tf32(warp[column * 4 + k % 4].b[k / 4]);
    c[part] = shim_truncated_sum(addends, 9);
  }
}

float tvm_deconv_tf32(float value) {
  if (value != value) return value;
  unsigned bits;
  std::memcpy(&bits, &value, 4);
  bits = (bits + 0x1000) & ~0x1fffu;
  std::memcpy(&value, &bits, 4);
  return value;
}

void tvm_deconv_ldmatrix_x4(void* r, const void* row) { shim_ldmatrix((unsigned*)r, row, 4, false); }
void tvm_deconv_ldmatrix_x4_trans(void* r, const void* row) { shim_ldmatrix((unsigned*)r, row, 4, true); }
void tvm_deconv_ldmatrix_x2_trans(void* r, const void* row) { shim_ldmatrix((unsigned*)r, row, 2, true); }
void tvm_deconv_ldmatrix_x2(void* r, const void* row) { shim_ldmatrix((unsigned*)r, row, 2, false); }
void tvm_deconv_mma_s8(int* c, const void* a, const void* b) { shim_mma_bytes<int8_t, int8_t>(c, a, b); }
void tvm_deconv_mma_u8(int* c, const void* a, const void* b) { shim_mma_bytes<uint8_t, uint8_t>(c, a, b); }
void tvm_deconv_mma_u8_s8(int* c, const void* a, const void* b) { shim_mma_bytes<uint8_t, int8_t>(c, a, b); }
void tvm_deconv_mma_f16(float* c, const void* a, const void* b) { shim_mma(c, a, b, shim_f16); }
void tvm_deconv_mma_bf16(float* c, const void* a, const void* b) { shim_mma(c, a, b, shim_bf16); }

// cp.async at its worst: what was there is gone at once, and what comes is there when it has been waited for.
static void shim_copy(void* to, const void* from, bool exists, unsigned size) {
  if ((uintptr_t)to % size || (uintptr_t)from % size) shim_fail("a copy at an odd address");
  std::memset(to, 0xff, size);
  shim_fiber().copies.back().push_back({to, exists ? from : nullptr, size});
}

void tvm_deconv_copy4(void* to, const void* from, bool exists) { shim_copy(to, from, exists, 4); }
void tvm_deconv_copy8(void* to, const void* from, bool exists) { shim_copy(to, from, exists, 8); }
void tvm_deconv_copy16(void* to, const void* from, bool exists) { shim_copy(to, from, exists, 16); }
void tvm_deconv_copy4_again(void* to, const void* from, bool exists) { shim_copy(to, from, exists, 4); }
void tvm_deconv_copy8_again(void* to, const void* from, bool exists) { shim_copy(to, from, exists, 8); }
void tvm_deconv_copy16_again(void* to, const void* from, bool exists) { shim_copy(to, from, exists, 16); }

// Words that are stored at once in the place of zeros.
static void shim_copy_or_fill(void* to, const void* from, bool exists, unsigned fill, unsigned size) {
  shim_copy(to, from, exists, size);
  if (exists) return;
  shim_fiber().copies.back().pop_back();
  for (unsigned at = 0; at < size; at += 4) std::memcpy((char*)to + at, &fill, 4);
}
void tvm_deconv_copy4_or_fill(void* to, const void* from, bool exists, unsigned fill) { shim_copy_or_fill(to, from, exists, fill, 4); }
void tvm_deconv_copy8_or_fill(void* to, const void* from, bool exists, unsigned fill) { shim_copy_or_fill(to, from, exists, fill, 8); }
void tvm_deconv_copy16_or_fill(void* to, const void* from, bool exists, unsigned fill) { shim_copy_or_fill(to, from, exists, fill, 16); }
void tvm_deconv_copy4_or_fill_again(void* to, const void* from, bool exists, unsigned fill) { shim_copy_or_fill(to, from, exists, fill, 4); }
void tvm_deconv_copy8_or_fill_again(void* to, const void* from, bool exists, unsigned fill) { shim_copy_or_fill(to, from, exists, fill, 8); }
void tvm_deconv_copy16_or_fill_again(void* to, const void* from, bool exists, unsigned fill) { shim_copy_or_fill(to, from, exists, fill, 16); }

void tvm_deconv_commit() { shim_fiber().copies.emplace_back(); }

static void shim_wait(size_t left) {
  // The last group is open: no wait is for it.
  auto& groups = shim_fiber().copies;
  for (; groups.size() > left + 1; groups.pop_front())
    for (const ShimCopy& copy : groups.front()) {
      if (copy.from) std::memcpy(copy.to, copy.from, copy.size);
      else std::memset(copy.to, 0, copy.size);
      shim_arrived(copy);
    }
}
void tvm_deconv_wait0() { shim_wait(0); }
void tvm_deconv_wait1() { shim_wait(1); }
void tvm_deconv_wait2() { shim_wait(2); }
void tvm_deconv_wait3() { shim_wait(3); }
void tvm_deconv_wait4() { shim_wait(4); }
