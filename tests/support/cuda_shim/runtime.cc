// Runs generated kernels on the CPU: every thread of a block is a fiber. One warp runs after the
// other, up to the next barrier, forwards or backwards by chance, its lanes in step at each instruction of the warp. So do
// the blocks of a cluster, each until it waits for another one.
// Memory is the CPU's. Shared memory is spoilt before each block. An access that faults, or is not
// aligned (which the compiler checks), is a failure of the kernel. What a warp reads too early shows, and what two warps
// do to each other between barriers, as far as their order tells. Streams capture where the process has loaded the
// driver of this folder; a kernel is loaded lazily then, which a capture does not permit.
#include "runtime.h"
#include <csignal>
#include <cstdlib>
#include <dlfcn.h>
#include <memory>
#include <sys/mman.h>

const char* shim_failure;
size_t shim_most_shared = 99 << 10;
char* shim_dynamic;
static std::map<const void*, unsigned> shim_clusters;
std::vector<char*> shim_dynamics;
ShimFiber* shim_running;
uint3 blockIdx;
unsigned shim_current;
static std::map<const void*, int> shim_permitted;
std::vector<ShimFiber> shim_fibers;

static std::vector<char> shim_stacks;
static jmp_buf shim_scheduler;
static const std::function<void()>* shim_body;
static bool shim_faulted;
static unsigned shim_threads;  // of a block
static size_t shim_met;  // threads that came to where all of a cluster meet
static unsigned shim_chance = 1;
constexpr size_t SHIM_STACK = 64 << 10;
extern "C" __attribute__((weak, visibility("hidden"))) char __start_shim_shared[], __stop_shim_shared[];

// By jumps: swapcontext makes a system call for the mask of signals.
void shim_yield() {
  if (!_setjmp(shim_fiber().place)) _longjmp(shim_scheduler, 1);
}

void __syncthreads() {
  shim_fiber().waits = true;
  shim_yield();
}

static void shim_entry() {
  (*shim_body)();
  shim_fiber().done = true;
  shim_yield();
}

static void shim_resume(ShimFiber& fiber) {
  if (_setjmp(shim_scheduler)) return;
  if (fiber.began) _longjmp(fiber.place, 1);
  fiber.began = true;
  setcontext(&fiber.context);
}

// Shared memory that a launch gives: up to what faults.
struct ShimDynamic {
  static constexpr size_t page = 4096;
  size_t size, inner;
  char *whole, *first;
  explicit ShimDynamic(size_t size) : size(size), inner((size + page - 1) / page * page) {
    whole = (char*)mmap(nullptr, inner + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    mprotect(whole + inner, page, PROT_NONE);
    first = whole + (inner - size) / 64 * 64;  // lines with swizzles: sizes of multiples of 1024
  }
  ~ShimDynamic() { munmap(whole, inner + page); }
};

static void shim_fault(int signal) {
  shim_fail(signal == SIGSEGV ? "an access outside of all arrays" : "an access that is not aligned");
  shim_faulted = true;
  _longjmp(shim_scheduler, 1);
}

// Turns faults into failures as long as it lives.
struct ShimFaults {
  struct sigaction before[2];
  ShimFaults() {
    struct sigaction action = {};
    action.sa_handler = shim_fault;
    action.sa_flags = SA_NODEFER;
    sigaction(SIGSEGV, &action, &before[0]);
    sigaction(SIGILL, &action, &before[1]);
    shim_faulted = false;
  }
  ~ShimFaults() {
    sigaction(SIGSEGV, &before[0], nullptr);
    sigaction(SIGILL, &before[1], nullptr);
  }
};

static void shim_begin(unsigned number) {
  ShimFiber& fiber = shim_fibers[number];
  fiber.thread = number % shim_threads, fiber.block = number / shim_threads;
  getcontext(&fiber.context);
  fiber.context.uc_stack.ss_sp = shim_stacks.data() + number * SHIM_STACK;
  fiber.context.uc_stack.ss_size = SHIM_STACK;
  fiber.context.uc_link = nullptr;
  fiber.began = fiber.done = fiber.waits = fiber.fenced = false;
  fiber.until = nullptr;
  fiber.products.assign(1, {});
  fiber.operations = 0;
  fiber.copies.assign(1, {});
  fiber.arrived.clear();
  makecontext(&fiber.context, shim_entry, 0);
}

static bool shim_chooses() {
  shim_chance = shim_chance * 1664525 + 1013904223;
  return shim_chance >> 31;
}

// Runs the warps of a block of a cluster, whose first block has this number, each until it waits, all or, by chance, some;
// returns whether any went on.
static bool shim_run(unsigned first, unsigned block) {
  unsigned warps = (shim_threads + 31) / 32;
  bool went = false, backwards = shim_chooses();
  for (unsigned turn = 0; turn < warps && !(went && shim_chooses() && shim_chooses()); ++turn)
    for (bool some = true; some;) {
      some = false;
      unsigned warp = 32 * (backwards ? warps - 1 - turn : turn);
      for (unsigned t = warp; t < std::min(warp + 32, shim_threads); ++t) {
        ShimFiber& fiber = shim_fibers[block * shim_threads + t];
        if (fiber.done || fiber.waits || (fiber.until && !fiber.until())) continue;
        fiber.until = nullptr;
        shim_running = &fiber;
        shim_current = t;
        blockIdx = {first + block, 0, 0};
        shim_dynamic = shim_dynamics[block];
        shim_resume(fiber);
        if (shim_faulted) return false;
        some = went = true;
      }
    }
  return went;
}

bool shim_ended(unsigned block) { return shim_fibers[block * shim_threads].done; }

// Lets the threads of a block go on if all wait at its barrier; returns whether they do.
static bool shim_release(unsigned block) {
  unsigned ended = 0;
  auto begin = shim_fibers.begin() + block * shim_threads, end = begin + shim_threads;
  for (auto fiber = begin; fiber != end; ++fiber) {
    if (fiber->until) return false;
    ended += fiber->done;
  }
  // A barrier that some threads skip and others wait at is undefined on a device.
  if (ended && ended != shim_threads) shim_fail("a barrier that not all threads reach");
  for (auto fiber = begin; fiber != end; ++fiber) fiber->waits = false;
  return !ended;
}

// All threads of a cluster.
void shim_meet() {
  size_t all = shim_met++ / shim_fibers.size() * shim_fibers.size() + shim_fibers.size();
  shim_fiber().until = [=] { return shim_met >= all; };
  shim_yield();
}

static cudaError_t shim_execute(const cudaLaunchConfig_t& config, const void* kernel, const std::function<void()>& body) {
  unsigned threads = config.blockDim.x;
  shim_failure = nullptr;
  size_t given = config.dynamicSmemBytes, permitted = std::max(48 << 10, shim_permitted[kernel]);
  if (threads > 1024 || !config.gridDim.x || config.gridDim.x > 0x7fffffff || given > shim_most_shared || given > permitted) {
    shim_fail("a launch beyond what devices have");
    return cudaErrorOfShim;
  }
  ShimFaults faults;
  unsigned blocks = shim_clusters.count(kernel) ? shim_clusters[kernel] : 1;
  if (config.gridDim.x % blocks) {
    shim_fail("a launch of a part of a cluster");
    return cudaErrorOfShim;
  }
  std::deque<ShimDynamic> dynamics;
  shim_dynamics.clear();
  for (unsigned block = 0; block < blocks; ++block) shim_dynamics.push_back(dynamics.emplace_back(given).first);
  shim_body = &body;
  shim_fibers.resize(blocks * threads);
  shim_stacks.resize(blocks * threads * SHIM_STACK);
  const char* last = getenv("SHIM_LAST_BLOCKS");  // all, unless it says how many of the last
  unsigned skipped = last ? config.gridDim.x - std::min(config.gridDim.x, (unsigned)atoi(last)) : 0;
  shim_threads = threads;
  for (unsigned first = skipped / blocks * blocks; first < config.gridDim.x; first += blocks) {
    if (__start_shim_shared) std::memset(__start_shim_shared, 0xff, __stop_shim_shared - __start_shim_shared);
    for (char* dynamic : shim_dynamics) std::memset(dynamic, 0xff, given);
    for (unsigned number = 0; number < blocks * threads; ++number) shim_begin(number);
    shim_forget_barriers();
    shim_met = 0;
    unsigned ended = 0;
    while (ended < blocks && !shim_failure) {
      // Each block as far as it comes without the others.
      bool went = false, backwards = shim_chooses();
      ended = 0;
      for (unsigned turn = 0; turn < blocks; ++turn) {
        unsigned block = backwards ? blocks - 1 - turn : turn;
        while (!shim_failure && (shim_run(first, block) || shim_release(block))) went = true;
        ended += shim_ended(block);
      }
      if (!went && ended < blocks) shim_fail("a wait that nothing ends");
    }
    for (const ShimFiber& fiber : shim_fibers) {
      for (const auto& group : fiber.copies)
        if (!group.empty()) shim_fail("a copy that nothing waits for");
      for (const auto& group : fiber.products)
        if (!group.empty()) shim_fail("a product that nothing waits for");
    }
    if (shim_failure) return cudaErrorOfShim;
  }
  return cudaSuccess;
}

void shim_cluster(const void* kernel, unsigned blocks) { shim_clusters[kernel] = blocks; }
void shim_permit(const void* kernel, int bytes) { shim_permitted[kernel] = bytes; }

// Calls a function of the shim's driver; without that nothing happens, and the result is false.
template <typename Result = bool, typename... Args>
static Result shim_driver(const char* function, Args... args) {
  void* driver = dlopen("libshim_driver.so", RTLD_LAZY | RTLD_NOLOAD);
  void* found = driver ? dlsym(driver, function) : nullptr;
  return found ? ((Result(*)(Args...))found)(args...) : Result();
}

void shim_load(const void* kernel) { shim_driver<void>("shim_load", kernel); }

cudaError_t shim_launch(
    const cudaLaunchConfig_t& config, const void* kernel, const void* body, size_t size, void (*run)(const void*)) {
  if (shim_driver("shim_captures", config.stream)) {
    shim_failure = "a kernel that is loaded while its stream captures";
    if (!shim_driver("shim_loaded", kernel)) return cudaErrorStreamCaptureUnsupported;
    std::shared_ptr<void> kept(aligned_alloc(64, (size + 63) / 64 * 64), free);  // maps of tensors are aligned
    std::memcpy(kept.get(), body, size);
    std::function<int()> node = [=] { return shim_execute(config, kernel, [=] { run(kept.get()); }); };
    shim_driver<void>("shim_node", config.stream, &node);
    return cudaSuccess;
  }
  shim_load(kernel);
  return shim_execute(config, kernel, [=] { run(body); });
}
