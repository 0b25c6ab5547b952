/*
 * A host of the launcher (docs/launcher.md) whose threads are those of the arena of oneTBB that the caller runs in, as
 * OpenVINO's operations do. They are awake behind OpenVINO's own loops; threads of another pool would have to be woken.
 *
 * What is declared here is the binary interface of libtbb.so.12, which oneTBB's headers put into every program: the
 * layouts of a task, with the table of functions that C++ compilers for Linux make, of a count of references, and of the
 * beginning of a group's context.
 */
#include <stdalign.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#define EXPORT __attribute__((visibility("default")))

enum { MOST_BODIES = 256 }; /* tasks on the stack; the caller of a host does what is left out */

struct host {
  void (*parallel_for)(void *context, size_t count, void (*body)(void *argument, size_t index), void *argument);
  void *context;
};

/* detail::d1::wait_context: a wait is over when no reference is left. */
struct wait_context {
  uint64_t version;
  _Atomic uint64_t references;
};

/* detail::d1::task, of 64 bytes, and behind it what ours has to do. */
struct task {
  alignas(64) const void *const *functions;
  uint64_t traits;
  uint64_t reserved[6];
  struct wait_context *wait;
  void (*body)(void *argument, size_t index);
  void *argument;
  size_t index;
};

/* detail::d1::task_group_context, of 128 bytes. Without a trait it is isolated: no other can cancel its tasks. */
struct context {
  alignas(128) uint64_t floating_point;
  uint32_t cancelled;
  uint8_t version, traits;
  char rest[128 - 14];
};

/* Functions of detail::r1. */
struct tbb {
  void (*initialize)(struct context *context);
  void (*spawn)(struct task *task, struct context *context);
  void (*wait)(struct wait_context *wait, struct context *context);
  void (*notify_waiters)(uintptr_t wait);
};

static struct tbb tbb;
static struct context context = {.version = 1}; /* of all calls */

/* The task and what it points to are the waiting thread's, and may be gone after the last reference. */
static void *cancel(struct task *task, void *execution) {
  (void)execution;
  struct wait_context *wait = task->wait;
  if (atomic_fetch_sub(&wait->references, 1) == 1) tbb.notify_waiters((uintptr_t)wait);
  return NULL;
}

static void *execute(struct task *task, void *execution) {
  task->body(task->argument, task->index);
  return cancel(task, execution);
}

static void destroy(struct task *task) { (void)task; }

static const void *const functions[] = {(void *)destroy, (void *)destroy, (void *)execute, (void *)cancel};

static void parallel_for(void *unused, size_t count, void (*body)(void *, size_t), void *argument) {
  (void)unused;
  struct task tasks[MOST_BODIES];
  size_t bodies = count < MOST_BODIES ? count : MOST_BODIES;
  struct wait_context wait = {1, 0};
  if (bodies == 0) return;
  atomic_store(&wait.references, bodies - 1);
  for (size_t i = 1; i < bodies; ++i) {
    tasks[i] = (struct task){.functions = functions, .wait = &wait, .body = body, .argument = argument, .index = i};
    tbb.spawn(&tasks[i], &context);
  }
  body(argument, 0);
  tbb.wait(&wait, &context);
}

EXPORT struct host tvm_deconv_arena = {parallel_for, NULL};

EXPORT void tvm_deconv_use(struct tbb found) {
  tbb = found;
  tbb.initialize(&context);
}
