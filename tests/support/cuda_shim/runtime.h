// What the parts of the emulation have in common: fibers, one for each thread of a block.
#pragma once
#include "cuda_runtime.h"
#include <deque>
#include <functional>
#include <map>
#include <setjmp.h>
#include <ucontext.h>
#include <unordered_set>
#include <vector>

inline void shim_fail(const char* what) { if (!shim_failure) shim_failure = what; }

struct ShimCopy { void* to; const void* from; unsigned size; };
using ShimProducts = std::vector<std::function<void()>>;  // of a thread, which reads its operands when it waits for them
struct ShimFiber {
  unsigned thread, block;  // its place in its block, and that of its block in a cluster
  ucontext_t context;  // where it begins
  jmp_buf place;       // where it goes on
  bool began, done, waits, fenced;
  unsigned operations;
  std::deque<std::vector<ShimCopy>> copies;
  std::vector<ShimCopy> arrived;  // and are not published
  std::deque<ShimProducts> products;
  std::function<bool()> until;  // what it waits for, besides barriers of the block
};
extern std::vector<ShimFiber> shim_fibers;  // of all blocks of a cluster
extern std::vector<char*> shim_dynamics;  // of each block of a cluster
extern ShimFiber* shim_running;
inline ShimFiber& shim_fiber() { return *shim_running; }
void shim_yield();
void shim_forget_barriers();
void shim_arrived(const ShimCopy& copy);
void shim_meet();
bool shim_ended(unsigned block);
float shim_f16(unsigned short bits);
float shim_bf16(unsigned short bits);
float shim_tf32(unsigned bits);
float shim_truncated_sum(const double* addends, int count);
struct ShimShown { const void* row; unsigned a[4], b[2]; };
const ShimShown* shim_show(const ShimShown& mine);  // what all lanes of the warp show
