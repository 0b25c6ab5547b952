// Hopper's instructions: mbarriers with phases, loads of boxes by maps, and products of a warpgroup.
#include "hopper.h"
#include "runtime.h"

// Shared memory begins at 1024 bytes of its window, as on a device, so that swizzles see the same bits.
unsigned __cvta_generic_to_shared(const void* at) { return (unsigned)((const char*)at - shim_dynamic) + 1024; }
static char* shim_generic(unsigned at) { return shim_dynamic + at - 1024; }

// The address of a byte of a line of 128 bytes with the swizzle of these: bits 7 to 9 change bits 4 to 6.
static unsigned shim_swizzled(unsigned at) { return at ^ (at >> 7 & 7) << 4; }

struct ShimBarrier {
  long count, pending, phase, bytes;
  std::vector<std::pair<size_t, std::function<void()>>> loads;
};
static std::map<const void*, ShimBarrier> shim_barriers;
void shim_forget_barriers() { shim_barriers.clear(); }

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
void tvm_deconv_publish() {}

// What is at the place of `at` in the memory of another block of the cluster.
static void* shim_in(unsigned block, void* at) {
  if (block >= shim_dynamics.size() || shim_ended(block)) shim_fail("a block that its cluster lacks, or that has ended");
  return shim_dynamics[block % shim_dynamics.size()] + ((char*)at - shim_dynamic);
}
void tvm_deconv_arrive_at(void* at, int block) { tvm_deconv_arrive(shim_in(block, at)); }
void tvm_deconv_meet2() { shim_meet(); }
void tvm_deconv_meet4() { shim_meet(); }

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
      unsigned plain = at + line * 128 + i * m.size;
      char* place = memory + (m.swizzle == 3 ? shim_swizzled(plain) : plain) - 1024;
      if (inside && x >= 0 && x < m.extents[0]) std::memcpy(place, m.address + offset + x * m.size, m.size);
      else std::memset(place, 0, m.size);
    }
  }
}

// A load of a box for each of some blocks: what was there is gone at once. Lines are 128 bytes and begin at multiples of
// 1024, eight of them.
static void shim_load_box(void* to, unsigned long long map, void* barrier, std::vector<long> first, unsigned blocks) {
  const ShimMap m = *(const ShimMap*)map;
  unsigned at = __cvta_generic_to_shared(to);
  if (at % 1024) shim_fail("a box at an odd address");
  if ((int)first.size() != m.rank || m.box[0] * m.size != 128) shim_fail("a box of another shape than its map's");
  for (unsigned block = 0; blocks >> block; ++block) {
    if (!(blocks >> block & 1)) continue;
    std::memset(shim_in(block, to), 0xff, m.lines() * 128);
    char* memory = shim_dynamics[block % shim_dynamics.size()];
    auto load = [=] { shim_bring(m, first, at, memory); };
    shim_barrier(shim_in(block, barrier)).loads.push_back({(size_t)m.lines() * 128, load});
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

// An element of a line that a descriptor of wgmma finds: terms fastest, 128 bytes with their swizzle, eight lines a group.
static unsigned short shim_element(unsigned long long lines, int line, int k) {
  if (lines >> 61 != 2) shim_fail("lines with another swizzle");
  unsigned at = (lines & 0x3fff) << 4, group = (lines >> 32 & 0x3fff) << 4;
  unsigned short bits;
  std::memcpy(&bits, shim_generic(shim_swizzled(at + line / 8 * group + line % 8 * 128 + k * 2)), 2);
  return bits;
}

unsigned long long tvm_deconv_lines(const void* at) {
  return (__cvta_generic_to_shared(at) & 0x3ffff) >> 4 | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// m64nNk16: a warp has 16 rows.
static void shim_wgmma(float* c, const void* a, const void* b, int columns, float (*number)(unsigned short)) {
  ShimFiber& fiber = shim_fiber();
  if (!fiber.fenced) shim_fail("a product without a fence");
  unsigned long long of_a = tvm_deconv_lines(a), of_b = tvm_deconv_lines(b);
  int warp = shim_current / 32 % 4, lane = shim_current % 32;
  fiber.products.back().push_back([=] {
    for (int i = 0; i < columns / 2; ++i) {
      int row = 16 * warp + lane / 4 + i / 2 % 2 * 8, column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      for (int k = 0; k < 16; ++k)
        c[i] += number(shim_element(of_a, row, k)) * number(shim_element(of_b, column, k));
    }
  });
}
#define SHIM_WGMMA(columns) \
  void tvm_deconv_wgmma_f16_n##columns(float* c, const void* a, const void* b) { shim_wgmma(c, a, b, columns, shim_f16); } \
  void tvm_deconv_wgmma_bf16_n##columns(float* c, const void* a, const void* b) { shim_wgmma(c, a, b, columns, shim_bf16); }
SHIM_WGMMA(32)
SHIM_WGMMA(64)
SHIM_WGMMA(128)
SHIM_WGMMA(256)
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
