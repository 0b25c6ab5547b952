// Hopper's instructions: mbarriers with phases, loads of boxes by maps, and products of a warpgroup.
#include "hopper.h"
#include "runtime.h"

// Shared memory begins at 1024 bytes of its window, as on a device, so that swizzles see the same bits.
unsigned __cvta_generic_to_shared(const void* at) { return (unsigned)((const char*)at - shim_dynamic) + 1024; }
static char* shim_generic(unsigned at) { return shim_dynamic + at - 1024; }

// The address of a byte of a line of 16, 32, 64 or 128 bytes with the swizzle of these, by number: bits from 7 on change
// as many from 4 on.
static unsigned shim_swizzled(unsigned at, int swizzle) { return at ^ (at >> 7 & ((1 << swizzle) - 1)) << 4; }

struct ShimBarrier {
  long count, pending, phase, bytes;
  std::vector<std::pair<size_t, std::function<void()>>> loads;
};
static std::map<const void*, ShimBarrier> shim_barriers;
// Words in shared memory that copies of threads brought, which wgmma does not see yet.
static std::unordered_set<const void*> shim_unpublished;
void shim_forget_barriers() { shim_barriers.clear(), shim_unpublished.clear(); }
void shim_arrived(const ShimCopy& copy) {
  if (shim_barriers.empty()) return;
  shim_fiber().arrived.push_back(copy);
  for (unsigned at = 0; at < copy.size; at += 4) shim_unpublished.insert((char*)copy.to + at);
}

static ShimBarrier& shim_barrier(const void* at) {
  if (!shim_barriers.count(at)) shim_fail("a barrier that was not made"), shim_barriers[at] = {1, 1, 0, 0, {}};
  return shim_barriers[at];
}
static void shim_settle(ShimBarrier& barrier) {
  if (barrier.pending < 0) shim_fail("more arrivals than a barrier expects");
  if (barrier.pending || barrier.bytes) return;
  barrier.phase ^= 1;
  barrier.pending = barrier.count;
}
void tvm_deconv_init(void* barrier, int arrivals) {
  if ((uintptr_t)barrier % 8) shim_fail("a barrier at an odd address");
  shim_barriers[barrier] = {arrivals, arrivals, 0, 0, {}};
}
void tvm_deconv_expect(void* at, int bytes) {
  ShimBarrier& barrier = shim_barrier(at);
  barrier.bytes += bytes, --barrier.pending;
  shim_settle(barrier);
}
void tvm_deconv_arrive(void* at) { tvm_deconv_expect(at, 0); }

// Loads at their worst: they are there when the barrier has all arrivals, and somebody looks.
static bool shim_passed(void* at, int parity) {
  ShimBarrier& barrier = shim_barrier(at);
  if (barrier.phase != parity) return true;
  if (barrier.pending) return false;
  auto loads = std::move(barrier.loads);
  barrier.loads.clear();
  for (auto& [bytes, load] : loads) load(), barrier.bytes -= bytes;
  shim_settle(barrier);
  return barrier.phase != parity;
}
void tvm_deconv_wait_phase(void* at, int parity) {
  if (shim_passed(at, parity)) return;
  shim_fiber().until = [=] { return shim_passed(at, parity); };
  shim_yield();
}
// A thread's copies that have arrived.
void tvm_deconv_publish() {
  for (const ShimCopy& copy : shim_fiber().arrived)
    for (unsigned at = 0; at < copy.size; at += 4) shim_unpublished.erase((char*)copy.to + at);
  shim_fiber().arrived.clear();
}

// What is at the place of `at` in the memory of another block of the cluster.
static char* shim_in(unsigned block, const void* at) {
  if (block >= shim_dynamics.size() || shim_ended(block)) shim_fail("a block that its cluster lacks, or that has ended");
  return shim_dynamics[block % shim_dynamics.size()] + ((char*)at - shim_dynamic);
}
void tvm_deconv_arrive_at(void* at, int block) { tvm_deconv_arrive(shim_in(block, at)); }
void tvm_deconv_take(float* to, const void* at, int block) {
  if ((uintptr_t)at % 16) shim_fail("four floats at an odd address");
  std::memcpy(to, shim_in(block, at), 16);
}
void tvm_deconv_meet2() { shim_meet(); }
void tvm_deconv_meet4() { shim_meet(); }
void tvm_deconv_meet8() { shim_meet(); }

// Brings a box to the shared memory of a block.
static void shim_bring(const ShimMap& m, const std::vector<long>& first, unsigned at, char* memory) {
  for (long line = 0; line < m.lines(); ++line) {
    long rest = line, offset = 0;
    bool inside = true;
    for (int axis = 1; axis < m.rank; ++axis) {
      long x = first[axis] + rest % m.box[axis];
      rest /= m.box[axis];
      inside &= x >= 0 && x < m.extents[axis];
      offset += x * m.strides[axis];
    }
    for (int i = 0; i < m.box[0]; ++i) {
      long x = first[0] + i;
      char* place = memory + shim_swizzled(at + (line * m.box[0] + i) * m.size, m.swizzle) - 1024;
      if (inside && x >= 0 && x < m.extents[0]) std::memcpy(place, m.address + offset + x * m.size, m.size);
      else std::memset(place, 0, m.size);
    }
  }
}

// A load of a box for each of some blocks: what was there is gone at once.
static void shim_load_box(void* to, unsigned long long map, void* barrier, std::vector<long> first, unsigned blocks) {
  const ShimMap m = *(const ShimMap*)map;
  unsigned at = __cvta_generic_to_shared(to);
  if (at % 1024) shim_fail("a box at an odd address");
  if (first[0] * m.size % 16) shim_fail("a box that begins at an odd place");
  if ((int)first.size() != m.rank || m.box[0] * m.size != 16 << m.swizzle) shim_fail("a box that its map does not say");
  const size_t size = m.lines() * m.box[0] * m.size;
  for (unsigned block = 0; blocks >> block; ++block) {
    if (!(blocks >> block & 1)) continue;
    std::memset(shim_in(block, to), 0xff, size);
    char* memory = shim_dynamics[block % shim_dynamics.size()];
    auto load = [=] { shim_bring(m, first, at, memory); };
    shim_barrier(shim_in(block, barrier)).loads.push_back({size, load});
  }
}
static unsigned shim_self() { return 1u << shim_fiber().block; }
void tvm_deconv_load_box2(void* to, unsigned long long map, void* b, int x, int y) {
  shim_load_box(to, map, b, {x, y}, shim_self());
}
void tvm_deconv_load_box5(void* to, unsigned long long map, void* b, int c, int w, int h, int d, int n) {
  shim_load_box(to, map, b, {c, w, h, d, n}, shim_self());
}
void tvm_deconv_load_box2_to(void* to, unsigned long long map, void* b, int x, int y, int blocks) {
  shim_load_box(to, map, b, {x, y}, blocks);
}
void tvm_deconv_load_box5_to(void* to, unsigned long long map, void* b, int c, int w, int h, int d, int n, int blocks) {
  shim_load_box(to, map, b, {c, w, h, d, n}, blocks);
}

// An operand in shared memory, as a descriptor of wgmma tells it: strides are of 16 bytes.
struct ShimOperand {
  unsigned at, leading, stride;
  int swizzle;
  bool transposed;
  template <typename Bits> Bits element(unsigned line, unsigned k) const;
};
static ShimOperand shim_operand(const void* at, int leading, int stride, int swizzle, bool transposed) {
  return {__cvta_generic_to_shared(at), leading * 16u, stride * 16u, (4 - swizzle) % 4, transposed};
}
template <typename Bits> Bits ShimOperand::element(unsigned line, unsigned k) const {
  // Terms fastest: lines of 128 bytes, eight in a group. Else lines of 16 bytes and more, of eight terms each.
  unsigned wide = 8 << swizzle, place = line / 8 * stride + line % 8 * 128 + k * sizeof(Bits);
  unsigned along = swizzle ? leading : stride, across = swizzle ? stride : leading;
  if (transposed) place = line / wide * along + line % wide * 2 + k / 8 * across + k % 8 * wide * 2;
  else if (swizzle != 3) shim_fail("lines with another swizzle");
  Bits bits;
  const char* from = shim_generic(shim_swizzled(at + place, swizzle));
  if (!shim_unpublished.empty() && shim_unpublished.count(from - (uintptr_t)from % 4)) shim_fail("what nobody has published");
  std::memcpy(&bits, from, sizeof bits);
  return bits;
}

// What a thread sees of an operand, each `step`th line from `first` on. Products read operands at any time until they are
// waited for: here at last, and so what is there at first must be the same.
template <typename Bits> static size_t shim_seen(const ShimOperand& operand, int first, int step, int lines) {
  size_t seen = 0;
  for (int line = first; line < lines; line += step)
    for (unsigned k = 0; k < 32 / sizeof(Bits); ++k) seen = seen * 31 + operand.element<Bits>(line, k);
  return seen;
}

// m64nNk16: a warp has 16 rows.
static void shim_wgmma(float* c, ShimOperand a, const void* lines, int columns, float (*number)(unsigned short)) {
  ShimFiber& fiber = shim_fiber();
  if (!fiber.fenced) shim_fail("a product without a fence");
  ShimOperand b = shim_operand(lines, 1, 64, 1, false);
  int warp = shim_current / 32 % 4, lane = shim_current % 32, first = 16 * warp + lane / 4;
  auto seen = [=] {
    return shim_seen<unsigned short>(a, first, 8, first + 16) * 31 + shim_seen<unsigned short>(b, lane, 32, columns);
  };
  fiber.products.back().push_back([=, before = seen()] {
    if (seen() != before) shim_fail("an operand that changes while a product reads it");
    float rows[2][16];
    for (int half = 0; half < 2; ++half)
      for (int k = 0; k < 16; ++k) rows[half][k] = number(a.element<unsigned short>(first + half * 8, k));
    for (int i = 0; i < columns / 2; ++i) {
      int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k) c[i] += rows[i / 2 % 2][k] * number(b.element<unsigned short>(column, k));
    }
  });
}
#define SHIM_WGMMA(name, columns, suffix, transposed) \
  void tvm_deconv_wgmma_##name##_n##columns##suffix( \
      float* c, const void* a, const void* b, int leading, int stride, int swizzle) { \
    shim_wgmma(c, shim_operand(a, leading, stride, swizzle, transposed), b, columns, shim_##name); \
  }
SHIM_WGMMAS

// A product with A in registers, which stay as they are until it is done. `sum` returns what is in a place of C then: of the
// registers that a row's lanes have, in order, of B and its column, and of what was there.
template <class Sum>
static void shim_wgmma_of_registers(float* c, const void* registers, const void* lines, int columns, Sum sum) {
  ShimFiber& fiber = shim_fiber();
  if (!fiber.fenced) shim_fail("a product without a fence");
  auto a = (const unsigned*)registers;
  ShimOperand b = shim_operand(lines, 1, 64, 1, false);
  ShimShown mine = {nullptr, {a[0], a[1], a[2], a[3]}, {}};
  const ShimShown* shown = shim_show(mine);
  std::vector<ShimShown> warp(shown, shown + 32);
  int lane = shim_current % 32;
  fiber.products.back().push_back([=, before = shim_seen<unsigned>(b, lane, 32, columns)] {
    if (std::memcmp(a, mine.a, sizeof mine.a)) shim_fail("registers that change while a product reads them");
    if (shim_seen<unsigned>(b, lane, 32, columns) != before) shim_fail("an operand that changes while a product reads it");
    for (int i = 0; i < columns / 2; ++i) {
      int half = i / 2 % 2, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      unsigned row[8];
      for (int k = 0; k < 8; ++k) row[k] = warp[lane / 4 * 4 + k % 4].a[half + k / 4 * 2];
      c[i] = sum(row, b, column, c[i]);
    }
  });
}

// m64nNk8 of TF32; it may be the first of its sums.
static void shim_wgmma_tf32(float* c, const void* registers, const void* lines, int columns, bool first) {
  shim_wgmma_of_registers(c, registers, lines, columns, [=](const unsigned* row, const ShimOperand& b, int column, float sum) {
    double addends[9] = {first ? 0 : sum};
    for (int k = 0; k < 8; ++k) addends[k + 1] = (double)shim_tf32(row[k]) * shim_tf32(b.element<unsigned>(column, k));
    return shim_truncated_sum(addends, 9);
  });
}
#define SHIM_WGMMA_TF32(columns) \
  void tvm_deconv_wgmma_tf32_n##columns(float* c, const void* registers, const void* b) { \
    shim_wgmma_tf32(c, registers, b, columns, false); \
  } \
  void tvm_deconv_wgmma_tf32_n##columns##_first(float* c, const void* registers, const void* b) { \
    shim_wgmma_tf32(c, registers, b, columns, true); \
  }
SHIM_WGMMA_TF32(16)
SHIM_WGMMA_TF32(32)
SHIM_WGMMA_TF32(64)
SHIM_WGMMA_TF32(128)
SHIM_WGMMA_TF32(256)

// m64nNk16 of two bytes.
static void shim_wgmma_registers(float* c, const void* registers, const void* lines, int columns, float (*number)(unsigned short)) {
  shim_wgmma_of_registers(c, registers, lines, columns, [=](const unsigned* row, const ShimOperand& b, int column, float sum) {
    for (int k = 0; k < 16; ++k)
      sum += number(row[k / 2] >> k % 2 * 16) * number(b.element<unsigned short>(column, k));
    return sum;
  });
}
#define SHIM_WGMMA_REGISTERS(name, columns) \
  void tvm_deconv_wgmma_##name##_n##columns##_registers(float* c, const void* registers, const void* b) { \
    shim_wgmma_registers(c, registers, b, columns, shim_##name); \
  }
SHIM_WGMMAS_REGISTERS
void tvm_deconv_wgmma_fence() { shim_fiber().fenced = true; }
void tvm_deconv_wgmma_commit() {
  shim_fiber().products.emplace_back();
  shim_fiber().fenced = false;
}

// The last group is open: no wait is for it.
static void shim_wgmma_wait(size_t left) {
  auto& groups = shim_fiber().products;
  for (; groups.size() > left + 1; groups.pop_front())
    for (const auto& product : groups.front()) product();
}
void tvm_deconv_wgmma_wait0() { shim_wgmma_wait(0); }
void tvm_deconv_wgmma_wait1() { shim_wgmma_wait(1); }
void tvm_deconv_wgmma_wait2() { shim_wgmma_wait(2); }
