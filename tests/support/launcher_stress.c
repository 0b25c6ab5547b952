/*
 * Stress of tvm_deconv/compiler/launcher/launcher.c, linked with it and, where the machine can, built with -fsanitize=thread.
 *
 *   launcher_stress storm ROUNDS       8 callers launch at once while thread counts and limits change, with and without
 *                                      an arena: every task runs once, what it wrote is seen, a workspace has one
 *                                      owner, failures and their error objects arrive
 *   launcher_stress rendezvous ROUNDS  each task waits for all others: every helper that is needed comes, however the
 *                                      launch falls against workers going to sleep
 *   launcher_stress cost ROUNDS        what a launch costs, its worker awake or asleep, and what an idle pool costs
 *
 * Others bring about one moment each, and take no account of ROUNDS:
 *
 *   launcher_stress failures 1   two tasks fail at once, each with blocks of an arena and an error object
 *   launcher_stress lanes 1      caller and helper fill their parts of an arena, and leave it
 *   launcher_stress fork 1       a child of a pool that is asleep, and of one whose threads the system refused
 *   launcher_stress turns 1      a worker finds a job while as many threads compute as are configured
 *   launcher_stress keep 1       more workspace is given back than a thread may keep
 *   launcher_stress asleep 1     a job comes between a worker's last look at the clock and its sleep
 *   launcher_stress elsewhere 1  a sleeper is woken off its waker's processor, unless its mask is someone else's
 *   launcher_stress host 1       threads that the program lends: they compute as the pool's do, in any order, late or
 *                                not at all, and also in the middle of launches of their own
 *
 * Prints what failed and returns 1, else 0. The launcher is compiled with -D for the functions of the C library that
 * stand here as hooked_...
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef struct {
  void *sync_handle;
  int32_t num_task;
} Env;
typedef int (*Task)(int, Env *, void *);

extern int (*__TVMBackendParallelLaunch)(Task, void *, int);
extern void *(*__TVMBackendAllocWorkspace)(int, int, uint64_t, int, int);
extern int (*__TVMBackendFreeWorkspace)(int, int, void *);
extern int (*__TVMBackendParallelBarrier)(int, Env *);
int tvm_deconv_set_num_threads(int);
int tvm_deconv_get_num_threads(void);
int tvm_deconv_make_arena(void *, uint64_t, uint64_t, uint64_t);

typedef void (*Body)(void *argument, size_t index);
struct host {
  void (*parallel_for)(void *context, size_t count, Body body, void *argument);
  void *context;
};
void tvm_deconv_make_openmp_host(struct host *, void *);

typedef struct {
  int32_t type_index;
  uint32_t padding;
  int64_t integer;
} Any;
int __tvm_ffi_deconv(void *, const Any *, int32_t, Any *);
int __tvm_ffi_deconv_with(void *, const Any *, int32_t, Any *);

/* The part of libtvm_ffi that the launcher uses: one raised error a thread, counted objects. */
static _Thread_local void *raised;
static atomic_int live_errors;

static void raise_object(void) {
  free(raised);
  raised = malloc(1);
  atomic_fetch_add(&live_errors, 1);
}
void TVMFFIErrorSetRaisedFromCStr(const char *kind, const char *message) {
  (void)kind, (void)message;
  raise_object();
}
void TVMFFIErrorMoveFromRaised(void **result) {
  *result = raised;
  raised = NULL;
}
void TVMFFIErrorSetRaised(void *error) { raised = error; }
int TVMFFIObjectDecRef(void *object) {
  free(object);
  atomic_fetch_sub(&live_errors, 1);
  return 0;
}

static atomic_int failures;

static void check(int truth, const char *what) {
  if (!truth && atomic_fetch_add(&failures, 1) < 10) printf("failed: %s\n", what);
}

static unsigned next_random(unsigned *state) { return (*state = *state * 1664525u + 1013904223u) >> 16; }

enum { CALLERS = 8, MOST_TASKS = 64 };

/* Rounding, in the control register of vectors. */
enum { NEAREST = 0, DOWNWARD = 0x2000, UPWARD = 0x4000, ROUNDING = 0x6000 };
static int get_rounding(void) { return (int)__builtin_ia32_stmxcsr() & ROUNDING; }
static void set_rounding(int mode) {
  __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() & ~(unsigned)ROUNDING) | (unsigned)mode);
}

struct storm {
  int done[MOST_TASKS]; /* plain memory: only the launch orders these writes before the caller's reads */
  int tasks;
  int fails; /* the task that fails, or -1 */
  int asked; /* tasks, 0 for as many as threads */
  Task task;
  void *data;
  unsigned work;
  int rounding; /* of the caller */
};

struct nested {
  pthread_t caller;
  int count; /* unprotected: a nested launch is serial */
};

static int nothing(int task, Env *env, void *data) {
  (void)task, (void)env;
  struct nested *nested = data;
  check(pthread_equal(pthread_self(), nested->caller), "a nested launch stays in its thread");
  ++nested->count;
  return 0;
}

static int empty_task(int task, Env *env, void *data) {
  (void)task, (void)env, (void)data;
  return 0;
}

static int storm_task(int task, Env *env, void *data) {
  struct storm *storm = data;
  if (task == 0) storm->tasks = env->num_task;
  check(get_rounding() == storm->rounding, "tasks compute in the caller's mode");
  if (task == storm->fails) {
    if (task % 2) raise_object();
    return -1;
  }
  size_t size = 100 + 977 * (size_t)(task % 5);
  unsigned char *outer = __TVMBackendAllocWorkspace(1, 0, size, 2, 32);
  unsigned char *inner = __TVMBackendAllocWorkspace(1, 0, 64, 2, 32);
  check((uintptr_t)outer % 64 == 0 && (uintptr_t)inner % 64 == 0, "workspaces are aligned");
  memset(outer, task, size);
  memset(inner, ~task, 64);
  for (volatile unsigned i = 0; i < storm->work; i = i + 1) continue;
  for (size_t i = 0; i < size; ++i) check(outer[i] == (unsigned char)task, "a workspace belongs to one task");
  __TVMBackendFreeWorkspace(1, 0, inner);
  __TVMBackendFreeWorkspace(1, 0, outer);
  struct nested nested = {.caller = pthread_self()};
  check(__TVMBackendParallelLaunch(nothing, &nested, 3) == 0 && nested.count == 3, "a nested launch runs its tasks");
  ++storm->done[task];
  return 0;
}

/* In the place of a kernel, with a storm for a handle. */
int __tvm_ffi_deconv(void *handle, const Any *arguments, int32_t count, Any *result) {
  (void)result;
  check(count == 1 && arguments->integer == 42, "a kernel gets its own arguments");
  struct storm *storm = handle;
  unsigned char *own = __TVMBackendAllocWorkspace(1, 0, 300, 2, 32); /* around the launch, as some schedules have it */
  memset(own, 0x5a, 300);
  int status = __TVMBackendParallelLaunch(storm->task, storm->data, storm->asked);
  for (int i = 0; i < 300; ++i) check(own[i] == 0x5a, "a caller's workspace is its own");
  __TVMBackendFreeWorkspace(1, 0, own);
  return status;
}

static int call_in(const struct host *host, int threads, void *memory, void *handle) {
  Any arguments[] = {{1, 0, threads}, {1, 0, (intptr_t)memory}, {1, 0, (intptr_t)host}, {1, 0, 42}}, result;
  return __tvm_ffi_deconv_with(handle, arguments, 4, &result);
}

static int call_with(int threads, void *memory, void *handle) { return call_in(NULL, threads, memory, handle); }

/* A host that starts a thread for each part but the last, which is the caller's. */
struct part {
  Body body;
  void *argument;
  size_t index;
};

static void *part_main(void *part) {
  int before = get_rounding();
  ((struct part *)part)->body(((struct part *)part)->argument, ((struct part *)part)->index);
  check(get_rounding() == before, "a host's thread keeps its mode");
  return NULL;
}

static void *part_of_other(void *part) {
  set_rounding(DOWNWARD); /* else that of the thread that starts it */
  return part_main(part);
}

static void lend_threads(void *context, size_t count, Body body, void *argument) {
  (void)context;
  pthread_t threads[MOST_TASKS];
  struct part parts[MOST_TASKS];
  check(count >= 2 && count <= MOST_TASKS, "a host is asked for as many threads as there are tasks for");
  for (size_t i = 0; i < count; ++i) {
    parts[i] = (struct part){body, argument, i};
    if (i + 1 < count) pthread_create(&threads[i], NULL, part_of_other, &parts[i]);
  }
  part_main(&parts[count - 1]);
  for (size_t i = 0; i + 1 < count; ++i) pthread_join(threads[i], NULL);
}

static const struct host lender = {lend_threads, NULL};

static pthread_barrier_t start;

/* Shared by all callers, too small for all of them, with lanes that are too small for some blocks. */
static _Alignas(64) char arena[64 + 1024 + 3 * 2048];

static void *storm_caller(void *argument) {
  unsigned seed = (unsigned)(uintptr_t)argument;
  int rounds = atoi(getenv("ROUNDS"));
  for (int round = 0; round < rounds; ++round) {
    struct storm storm = {.fails = -1, .work = next_random(&seed) % 2000};
    int asked = next_random(&seed) % 3 ? 0 : 1 + (int)(next_random(&seed) % MOST_TASKS);
    int limit = next_random(&seed) % 2 ? 0 : (int)(next_random(&seed) % 5);
    if (next_random(&seed) % 16 == 0) tvm_deconv_set_num_threads(1 + (int)(next_random(&seed) % 12));
    if (next_random(&seed) % 8 == 0) storm.fails = (int)(next_random(&seed) % 3);
    if (next_random(&seed) % 32 == 0) usleep(next_random(&seed) % 200);
    if (round % 64 == 0) pthread_barrier_wait(&start);
    storm.asked = asked, storm.task = storm_task, storm.data = &storm;
    const struct host *host = next_random(&seed) % 4 ? NULL : &lender;
    int status = call_in(host, limit, next_random(&seed) % 2 ? arena : NULL, &storm);
    if (storm.fails >= 0 && storm.fails < storm.tasks) { /* tasks are claimed in order: the first three all run */
      check(status == -1 && raised != NULL, "a failed task fails the launch and leaves an error");
      TVMFFIObjectDecRef(raised);
      raised = NULL;
      continue;
    }
    check(status == 0 && raised == NULL, "the launch succeeds");
    check(asked ? storm.tasks == asked : storm.tasks >= 1 && storm.tasks <= 12, "the number of tasks");
    check(asked || !limit || storm.tasks <= limit, "a call keeps to its limit");
    for (int i = 0; i < MOST_TASKS; ++i) check(storm.done[i] == (i < storm.tasks), "every task runs once");
  }
  return NULL;
}

static void run_storm(void) {
  pthread_t callers[CALLERS];
  pthread_barrier_init(&start, NULL, CALLERS);
  check(tvm_deconv_make_arena(arena, 1024, 2048, 1024) == 0, "an arena without a lane is none");
  check(tvm_deconv_make_arena(arena, sizeof arena, 2048, 1024) == 3, "an arena has as many lanes as there is room for");
  for (uintptr_t i = 0; i < CALLERS; ++i) pthread_create(&callers[i], NULL, storm_caller, (void *)(i + 1));
  for (int i = 0; i < CALLERS; ++i) pthread_join(callers[i], NULL);
  check(atomic_load(&live_errors) == 0, "no error object is lost");
  check(*(uint64_t *)arena == 0, "every lane is given back");
}

static double now_us(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec * 1e6 + (double)t.tv_nsec * 1e-3;
}

static int rendezvous_task(int task, Env *env, void *data) {
  (void)task;
  atomic_int *arrived = data;
  atomic_fetch_add(arrived, 1);
  time_t end = time(NULL) + 10;
  while (atomic_load(arrived) < env->num_task) {
    if (time(NULL) > end) return -1;
    sched_yield();
  }
  return 0;
}

static void run_rendezvous(int rounds) {
  unsigned seed = 1;
  double last = 0;
  for (int round = 0; round < rounds && !atomic_load(&failures); ++round) {
    atomic_int arrived = 0;
    tvm_deconv_set_num_threads(next_random(&seed) % 2 ? 2 : 2 + (int)(next_random(&seed) % 5));
    double pause = 49 + 0.01 * (next_random(&seed) % 300); /* workers spin for 50 us: they are just falling asleep */
    switch (next_random(&seed) % 4) {
      case 0: usleep(next_random(&seed) % 60); break;
      case 1: case 2: while (now_us() < last + pause) continue;
    }
    check(__TVMBackendParallelLaunch(rendezvous_task, &arrived, 0) == 0, "every helper comes");
    last = now_us();
  }
  Env one = {.num_task = 1}, two = {.num_task = 2};
  check(__TVMBackendParallelBarrier(0, &one) == 0, "a barrier of one task passes");
  check(__TVMBackendParallelBarrier(0, &two) == -1 && raised, "a barrier of two tasks is refused");
}

/* ---- moments ----------------------------------------------------------------------------------------------------- */

static atomic_int threads_refused, threads_released = 1 << 20, threads_created;
static atomic_int hold_clock, held_at_clock;
static atomic_long live_blocks, live_bytes;
static _Thread_local int is_worker;

struct created {
  void *(*function)(void *);
  void *argument;
  int number;
};

static void wait_until(atomic_int *value, int least) {
  time_t end = time(NULL) + 10;
  while (atomic_load(value) < least && time(NULL) < end) usleep(100);
  check(atomic_load(value) >= least, "what is waited for comes");
}

static void *created_main(void *argument) {
  struct created created = *(struct created *)argument;
  free(argument);
  is_worker = 1;
  while (atomic_load(&threads_released) <= created.number) usleep(100);
  return created.function(created.argument);
}

int hooked_create(pthread_t *thread, const pthread_attr_t *attributes, void *(*function)(void *), void *argument) {
  if (atomic_load(&threads_refused)) return 11; /* EAGAIN */
  struct created *created = malloc(sizeof *created);
  *created = (struct created){function, argument, atomic_fetch_add(&threads_created, 1)};
  return pthread_create(thread, attributes, created_main, created);
}

static atomic_int kept_off_first; /* as if another program had kept every thread off processor 0 */

int hooked_affinity(pid_t pid, size_t size, cpu_set_t *set) {
  int status = sched_getaffinity(pid, size, set);
  for (int i = 0; i < 8; ++i) CPU_SET(i, set); /* so that workers spin before they sleep, however few there are */
  if (atomic_load(&kept_off_first)) CPU_CLR(0, set);
  return status;
}

static atomic_int watching, masks_set;
static cpu_set_t last_masks[2]; /* the one set for another thread, and by a thread for itself */

int hooked_confine(pid_t pid, size_t size, const cpu_set_t *set) {
  if (atomic_load(&watching)) {
    last_masks[pid == 0] = *set;
    atomic_fetch_add(&masks_set, 1);
  }
  return sched_setaffinity(pid, size, set);
}

int hooked_clock(clockid_t clock, struct timespec *now) {
  int status = clock_gettime(clock, now);
  if (is_worker && atomic_load(&hold_clock)) {
    atomic_store(&held_at_clock, 1);
    while (atomic_load(&hold_clock)) sched_yield();
    now->tv_sec += 1; /* its patience is over */
  }
  return status;
}

int hooked_memalign(void **memory, size_t align, size_t size) {
  void *whole = malloc(size + 2 * align);
  if (!whole) return 12; /* ENOMEM */
  uintptr_t start = ((uintptr_t)whole + 2 * align - 1) / align * align;
  ((void **)start)[-1] = whole;
  ((size_t *)start)[-2] = size;
  *memory = (void *)start;
  atomic_fetch_add(&live_blocks, 1), atomic_fetch_add(&live_bytes, (long)size);
  return 0;
}

void hooked_free(void *memory) {
  atomic_fetch_sub(&live_blocks, 1), atomic_fetch_sub(&live_bytes, (long)((size_t *)memory)[-2]);
  free(((void **)memory)[-1]);
}

static int failing_task(int task, Env *env, void *data) {
  check(__TVMBackendAllocWorkspace(1, 0, 100, 2, 32) != NULL, "there is workspace");
  int status = rendezvous_task(task, env, data);
  check(status == 0, "both tasks run at once");
  raise_object();
  return -1; /* as generated code leaves: without giving its blocks back */
}

static int launch_rendezvous(int tasks) {
  atomic_int arrived = 0;
  return __TVMBackendParallelLaunch(rendezvous_task, &arrived, tasks);
}

static int first_fails(int task, Env *env, void *begun) {
  (void)env;
  atomic_fetch_add((atomic_int *)begun, 1);
  if (task == 0) return -1;
  usleep(20000);
  return 0;
}

static void run_failures(void) {
  tvm_deconv_set_num_threads(2);
  check(tvm_deconv_make_arena(arena, sizeof arena, 2048, 1024) == 3, "an arena has as many lanes as there is room for");
  atomic_int arrived = 0;
  struct storm storm = {.task = failing_task, .data = &arrived, .asked = 2};
  check(call_with(0, arena, &storm) == -1, "the call fails");
  check(*(uint64_t *)arena == 0, "every lane is given back, that of a helper too");
  check(atomic_load(&live_errors) == 1, "the second error object is freed");
  atomic_int begun = 0;
  check(__TVMBackendParallelLaunch(first_fails, &begun, MOST_TASKS) == -1, "the launch fails");
  check(atomic_load(&begun) < MOST_TASKS / 2, "no task begins after one has failed");
}

static int in_arena(void *block) { return (char *)block >= arena && (char *)block < arena + sizeof arena; }

struct filled {
  pthread_t caller;
  atomic_int arrived;
};

/* The caller's lane is the larger one, up to its last line; each thread finds in its own what it wrote. */
static int filling_task(int task, Env *env, void *data) {
  struct filled *filled = data;
  int of_caller = pthread_equal(pthread_self(), filled->caller);
  size_t size = of_caller ? 2560 : 1920;
  unsigned char *block = __TVMBackendAllocWorkspace(1, 0, size, 2, 32);
  check(in_arena(block), "what fits is in the arena");
  memset(block, 1 + of_caller, size);
  int status = rendezvous_task(task, env, &filled->arrived);
  for (size_t i = 0; i < size; ++i) check(block[i] == 1 + of_caller, "lanes lie apart");
  __TVMBackendFreeWorkspace(1, 0, block);
  for (int i = 0; i < 10; ++i) {
    void *again = __TVMBackendAllocWorkspace(1, 0, 1000, 2, 32);
    check(in_arena(again), "a lane is a stack");
    __TVMBackendFreeWorkspace(1, 0, again);
  }
  return status;
}

static void run_lanes(void) {
  tvm_deconv_set_num_threads(2);
  check(tvm_deconv_make_arena(arena, sizeof arena, 2048, 1024) == 3, "an arena has as many lanes as there is room for");
  struct filled filled = {.caller = pthread_self()};
  struct storm storm = {.task = filling_task, .data = &filled, .asked = 2};
  check(call_with(0, arena, &storm) == 0, "caller and helper come");
  check(*(uint64_t *)arena == 0, "every lane is given back");
  storm.task = empty_task;
  check(call_with(1, arena, &storm) == 0, "a call of one thread goes");
  void *block = __TVMBackendAllocWorkspace(1, 0, 100, 2, 32);
  check(!in_arena(block), "the arena is of the call alone");
  __TVMBackendFreeWorkspace(1, 0, block);
  check(launch_rendezvous(2) == 0, "the limit is of the call alone");
}

struct held {
  int tasks;
  atomic_int arrived, released;
};

static int held_task(int task, Env *env, void *data) {
  (void)task, (void)env;
  struct held *held = data;
  atomic_fetch_add(&held->arrived, 1);
  wait_until(&held->released, 1);
  return 0;
}

static void *held_caller(void *data) {
  check(__TVMBackendParallelLaunch(held_task, data, ((struct held *)data)->tasks) == 0, "the held launch succeeds");
  return NULL;
}

/* In a child whose parent had four workers asleep: the first four join a job at once, the fifth sleeps. */
static void run_child_of_sleepers(void) {
  struct held held = {.tasks = 5};
  pthread_t caller;
  atomic_store(&threads_created, 0), atomic_store(&threads_released, 0);
  tvm_deconv_set_num_threads(6);
  pthread_create(&caller, NULL, held_caller, &held);
  wait_until(&held.arrived, 1);
  for (int workers = 1; workers <= 4; ++workers) {
    atomic_store(&threads_released, workers);
    wait_until(&held.arrived, workers + 1);
  }
  atomic_store(&threads_released, 5);
  usleep(100000); /* now it is asleep */
  atomic_store(&threads_refused, 1);
  tvm_deconv_set_num_threads(7); /* one more, so that it may compute, but no worker more */
  check(launch_rendezvous(2) == 0, "the only worker that sleeps is woken");
  atomic_store(&held.released, 1);
  pthread_join(caller, NULL);
}

static void in_child(void (*run)(void)) {
  fflush(stdout);
  pid_t child = fork();
  if (child == 0) {
    run();
    fflush(stdout);
    _exit(atomic_load(&failures) != 0);
  }
  int status = -1;
  waitpid(child, &status, 0);
  check(status == 0, "a forked child computes");
}

static void run_child_of_refused(void) {
  atomic_store(&threads_refused, 0);
  check(launch_rendezvous(7) == 0, "a child starts the threads that its parent could not");
}

static void run_fork(void) {
  tvm_deconv_set_num_threads(5);
  check(launch_rendezvous(5) == 0, "every helper comes");
  usleep(100000);
  in_child(run_child_of_sleepers);
  atomic_store(&threads_refused, 1);
  tvm_deconv_set_num_threads(7);
  check(__TVMBackendParallelLaunch(empty_task, NULL, 0) == 0, "a launch goes without the threads that are refused");
  in_child(run_child_of_refused);
}

static int nesting_task(int task, Env *env, void *data) {
  (void)task, (void)env;
  return __TVMBackendParallelLaunch(held_task, data, 1);
}

static void *nesting_caller(void *data) {
  check(__TVMBackendParallelLaunch(nesting_task, data, 1) == 0, "the nesting launch succeeds");
  return NULL;
}

/* Three threads may compute: the one in the nested launch, and two that meet meanwhile. */
static void run_nested(void) {
  struct held held = {0};
  pthread_t caller;
  tvm_deconv_set_num_threads(3);
  pthread_create(&caller, NULL, nesting_caller, &held);
  wait_until(&held.arrived, 1);
  check(launch_rendezvous(2) == 0, "a thread in a nested launch counts once");
  atomic_store(&held.released, 1);
  pthread_join(caller, NULL);
}

static int turn_task(int task, Env *env, void *data) {
  (void)env;
  if (task == 0) {
    atomic_store(&threads_released, 1 << 20); /* the worker is free to look for a job, and finds this one */
    usleep(300000);
  }
  ((pthread_t *)data)[task] = pthread_self();
  return 0;
}

struct counted {
  atomic_int inside, most;
};

static int counting_task(int task, Env *env, void *data) {
  (void)task, (void)env;
  struct counted *counted = data;
  int inside = atomic_fetch_add(&counted->inside, 1) + 1, most = atomic_load(&counted->most);
  while (inside > most && !atomic_compare_exchange_weak(&counted->most, &most, inside)) continue;
  usleep(50000);
  atomic_fetch_sub(&counted->inside, 1);
  return 0;
}

static void run_turns(void) {
  struct held held = {.tasks = 1};
  pthread_t caller, ran[2];
  atomic_store(&threads_released, 0);
  tvm_deconv_set_num_threads(2);
  pthread_create(&caller, NULL, held_caller, &held);
  wait_until(&held.arrived, 1);
  check(__TVMBackendParallelLaunch(turn_task, ran, 2) == 0, "the launch succeeds");
  check(pthread_equal(ran[0], ran[1]), "no more threads compute than are configured");
  atomic_store(&held.released, 1);
  pthread_join(caller, NULL);
  struct counted counted = {0};
  struct storm storm = {.task = counting_task, .data = &counted, .asked = 8};
  tvm_deconv_set_num_threads(4);
  check(launch_rendezvous(4) == 0, "every helper comes");
  check(call_with(2, NULL, &storm) == 0, "the call succeeds");
  check(atomic_load(&counted.most) <= 2, "no more threads compute than the call may use");
}

static void run_keep(void) {
  enum { LARGE = 5, SMALL = 200 };
  void *blocks[SMALL];
  for (int i = 0; i < LARGE; ++i) blocks[i] = __TVMBackendAllocWorkspace(1, 0, 100 + 5000 * i, 2, 32);
  for (int i = 0; i < LARGE; ++i) __TVMBackendFreeWorkspace(1, 0, blocks[i]);
  void *first = __TVMBackendAllocWorkspace(1, 0, 200, 2, 32), *second = __TVMBackendAllocWorkspace(1, 0, 200, 2, 32);
  __TVMBackendFreeWorkspace(1, 0, first), __TVMBackendFreeWorkspace(1, 0, second);
  check(__TVMBackendAllocWorkspace(1, 0, 200, 2, 32) == second, "the last block freed of a size is the next one taken");
  check(__TVMBackendAllocWorkspace(1, 0, 200, 2, 32) == first, "then the one before");
  __TVMBackendFreeWorkspace(1, 0, first), __TVMBackendFreeWorkspace(1, 0, second);
  for (int i = 0; i < LARGE; ++i) blocks[i] = __TVMBackendAllocWorkspace(1, 0, 80 << 20, 2, 32);
  for (int i = 0; i < LARGE; ++i) __TVMBackendFreeWorkspace(1, 0, blocks[i]);
  check(atomic_load(&live_bytes) < 257 << 20, "a thread keeps at most 256 MiB");
  check(atomic_load(&live_bytes) > 239 << 20, "a thread keeps what it may");
  for (int i = 0; i < SMALL; ++i) blocks[i] = __TVMBackendAllocWorkspace(1, 0, 100, 2, 32);
  for (int i = 0; i < SMALL; ++i) __TVMBackendFreeWorkspace(1, 0, blocks[i]);
  check(atomic_load(&live_blocks) == 128, "a thread keeps at most 128 blocks");
  void *large = __TVMBackendAllocWorkspace(1, 0, 300 << 20, 2, 32);
  check(atomic_load(&live_bytes) >= 300 << 20, "a block that is too small is not taken");
  __TVMBackendFreeWorkspace(1, 0, large);
}

static int released_task(int task, Env *env, void *data) {
  atomic_store(&hold_clock, 0); /* the job is open, and the worker about to fall asleep */
  return rendezvous_task(task, env, data);
}

static void run_asleep(void) {
  tvm_deconv_set_num_threads(2);
  check(launch_rendezvous(2) == 0, "the helper comes");
  for (int round = 0; round < 20; ++round) {
    atomic_int arrived = 0;
    atomic_store(&held_at_clock, 0), atomic_store(&hold_clock, 1);
    launch_rendezvous(1);
    __TVMBackendParallelLaunch(empty_task, NULL, 0); /* wakes the worker if it sleeps */
    wait_until(&held_at_clock, 1);
    check(__TVMBackendParallelLaunch(released_task, &arrived, 2) == 0, "a worker looks once more before it sleeps");
  }
}

static void run_elsewhere(void) {
  cpu_set_t every, one, all;
  sched_getaffinity(0, sizeof every, &every);
  tvm_deconv_set_num_threads(2);
  check(launch_rendezvous(2) == 0, "the helper comes");
  hooked_affinity(0, sizeof all, &all);
  atomic_store(&watching, 1);
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &every)) continue;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    sched_setaffinity(0, sizeof one, &one);
    usleep(100000); /* now it is asleep */
    int before = atomic_load(&masks_set);
    check(launch_rendezvous(2) == 0, "the helper is woken");
    check(atomic_load(&masks_set) == before + 2 && CPU_EQUAL(&last_masks[1], &all), "who is awake may run anywhere");
    CPU_XOR(&one, &one, &all);
    check(CPU_EQUAL(&last_masks[0], &one), "a sleeper wakes on any processor but its waker's");
  }
  atomic_store(&kept_off_first, 1);
  usleep(100000); /* it is asleep again */
  int before = atomic_load(&masks_set);
  check(launch_rendezvous(2) == 0, "the helper is woken");
  check(atomic_load(&masks_set) == before, "a mask that someone else has set stays");
}

/* ---- cost -------------------------------------------------------------------------------------------------------- */

/* ---- hosts ------------------------------------------------------------------------------------------------------- */

static void lend_nothing(void *context, size_t count, Body body, void *argument) {
  (void)context, (void)count, (void)body, (void)argument;
}

static void lend_only_others(void *context, size_t count, Body body, void *argument) {
  (void)context;
  for (size_t i = 0; i < count; ++i) {
    struct part part = {body, argument, i};
    pthread_t thread;
    pthread_create(&thread, NULL, part_of_other, &part);
    pthread_join(thread, NULL);
  }
}

/* Another call, in the caller's thread, while its own tasks are under way: so a host's thread may take other work. */
static void lend_for_two(void *context, size_t count, Body body, void *argument) {
  struct storm *other = context;
  pthread_t thread;
  struct part part = {body, argument, 0};
  pthread_create(&thread, NULL, part_of_other, &part);
  other->rounding = get_rounding();
  check(call_in(&lender, 0, arena, other) == 0, "a call in the middle of another");
  for (size_t i = 1; i < count; ++i) body(argument, i);
  pthread_join(thread, NULL);
}

/* A thread that has a launch of its own under way computes tasks of another. */
static struct part *_Atomic mailbox;

static void give_to_mailbox(void *context, size_t count, Body body, void *argument) {
  (void)context, (void)count;
  static struct part part;
  part = (struct part){body, argument, 0};
  atomic_store(&mailbox, &part);
  while (atomic_load(&mailbox)) sched_yield();
}

static void take_from_mailbox(void *context, size_t count, Body body, void *argument) {
  (void)context;
  while (!atomic_load(&mailbox)) sched_yield();
  part_main(atomic_load(&mailbox));
  atomic_store(&mailbox, NULL);
  for (size_t i = 0; i < count; ++i) body(argument, i);
}

static const struct host giver = {give_to_mailbox, NULL}, taker = {take_from_mailbox, NULL};

static void *giver_main(void *storm) {
  check(call_in(&giver, 0, arena, storm) == 0, "a call whose host is busy");
  return NULL;
}

/* With what its threads are started, GOMP_parallel enters a team that is larger than was asked for. */
static void gomp_parallel(void (*function)(void *), void *data, unsigned threads, unsigned flags) {
  check(threads == 0 && flags == 0, "the team is the program's own");
  struct part parts[6];
  pthread_t others[6];
  for (int i = 0; i < 6; ++i) {
    parts[i] = (struct part){(Body)(void *)function, data, 0};
    pthread_create(&others[i], NULL, part_of_other, &parts[i]);
  }
  function(data);
  for (int i = 0; i < 6; ++i) pthread_join(others[i], NULL);
}

static atomic_int crowd, largest_crowd;

static int crowd_task(int task, Env *env, void *data) {
  (void)task, (void)env, (void)data;
  int now = atomic_fetch_add(&crowd, 1) + 1, largest = atomic_load(&largest_crowd);
  while (now > largest && !atomic_compare_exchange_weak(&largest_crowd, &largest, now)) continue;
  usleep(1000);
  atomic_fetch_sub(&crowd, 1);
  return 0;
}

static void *crowd_main(void *host) {
  struct storm storm = {.task = crowd_task, .asked = 40};
  call_in(host, 2, NULL, &storm);
  return NULL;
}

static void check_storm(const struct host *host, int asked, void *memory) {
  struct storm storm = {.fails = -1, .asked = asked, .task = storm_task, .data = &storm, .rounding = UPWARD};
  set_rounding(UPWARD);
  check(call_in(host, 0, memory, &storm) == 0 && raised == NULL, "the launch succeeds");
  check(get_rounding() == UPWARD, "the caller keeps its mode");
  set_rounding(NEAREST);
  check(storm.tasks == (asked ? asked : 4), "the number of tasks");
  for (int i = 0; i < MOST_TASKS; ++i) check(storm.done[i] == (i < storm.tasks), "every task runs once");
}

static void run_hosts(void) {
  static const struct host nobody = {lend_nothing, NULL}, others = {lend_only_others, NULL};
  struct host openmp;
  tvm_deconv_make_openmp_host(&openmp, (void *)gomp_parallel);
  const struct host *hosts[] = {&lender, &nobody, &others, &openmp};
  tvm_deconv_set_num_threads(4);
  check(tvm_deconv_make_arena(arena, sizeof arena, 2048, 1024) == 3, "an arena has as many lanes as there is room for");
  for (int round = 0; round < 200; ++round) {
    check_storm(hosts[round % 4], round % 3 ? 0 : 1 + round % MOST_TASKS, round % 2 ? arena : NULL);
    check(*(uint64_t *)arena == 0, "every lane is given back");
  }
  check(atomic_load(&threads_created) == 0, "a host's threads are in place of the pool's");

  crowd_main(&openmp);
  check(atomic_load(&largest_crowd) == 2, "a call keeps to its limit in a larger team");
  tvm_deconv_set_num_threads(2);
  atomic_store(&largest_crowd, 0);
  pthread_t caller;
  pthread_create(&caller, NULL, crowd_main, (void *)&lender);
  crowd_main((void *)&lender);
  pthread_join(caller, NULL);
  /* A thread that was lent before the second caller came stays to the end of its call; no other joins. */
  check(atomic_load(&largest_crowd) <= 3, "callers share the number of threads");

  atomic_int arrived = 0;
  struct storm both = {.task = rendezvous_task, .data = &arrived, .asked = 2};
  check(call_in(&lender, 0, arena, &both) == 0, "a host's threads compute at the same time");
  arrived = 0;
  struct storm failing = {.task = failing_task, .data = &arrived, .asked = 2};
  check(call_in(&lender, 0, arena, &failing) == -1 && raised, "the call fails, in the caller or not");
  TVMFFIErrorMoveFromRaised(&(void *){NULL});
  check(*(uint64_t *)arena == 0, "every lane is given back, that of a host's thread too");
  check(atomic_load(&live_errors) == 1, "the second error object is freed");
  atomic_int begun = 0;
  struct storm first = {.task = first_fails, .data = &begun, .asked = MOST_TASKS};
  check(call_in(&lender, 0, NULL, &first) == -1 && atomic_load(&begun) < MOST_TASKS / 2, "no task begins after that");
  TVMFFIErrorMoveFromRaised(&(void *){NULL});
  arrived = 0;
  struct filled filled = {.caller = pthread_self()};
  struct storm filling = {.task = filling_task, .data = &filled, .asked = 2};
  check(call_in(&lender, 0, arena, &filling) == 0, "lanes lie apart in a host's threads");

  tvm_deconv_set_num_threads(4);
  struct storm inner = {.fails = -1, .task = storm_task, .data = &inner};
  const struct host stealing = {lend_for_two, &inner};
  for (int round = 0; round < 50; ++round) check_storm(&stealing, 0, arena);
  check(inner.tasks == 4 && inner.done[3] == 50, "the call in the middle has its own limit and tasks");
  for (int round = 0; round < 50; ++round) {
    struct storm given = {.fails = -1, .task = storm_task, .data = &given};
    pthread_t thread;
    pthread_create(&thread, NULL, giver_main, &given);
    check_storm(&taker, 0, arena);
    pthread_join(thread, NULL);
    check(given.done[0] == 1 && given.done[3] == 1, "a thread computes for another in the middle of its own launch");
    check(*(uint64_t *)arena == 0, "every lane is given back");
  }
  check(atomic_load(&threads_created) == 0, "the pool has not started");
}

struct arrival {
  atomic_int arrived;
  double when; /* a helper began its task */
};

static int arrival_task(int task, Env *env, void *data) {
  struct arrival *arrival = data;
  if (task) arrival->when = now_us();
  return rendezvous_task(task, env, &arrival->arrived);
}

enum { WORK_US = 200 };

static int work_task(int task, Env *env, void *data) {
  (void)task, (void)data;
  double end = now_us() + (double)WORK_US / env->num_task;
  while (now_us() < end) continue;
  return 0;
}

static int by_value(const void *a, const void *b) {
  double x = *(const double *)a, y = *(const double *)b;
  return (x > y) - (x < y);
}

static void report(const char *what, double *times, int rounds) {
  qsort(times, (size_t)rounds, sizeof *times, by_value);
  printf("%-52s p10 %7.2f   median %7.2f   p90 %7.2f us\n", what, times[rounds / 10], times[rounds / 2],
         times[rounds * 9 / 10]);
}

static void launch_cost(const char *what, Task task, int rounds, double *times, int sleep_us) {
  for (int i = 0; i < rounds; ++i) {
    if (sleep_us) usleep((unsigned)sleep_us);
    double begin = now_us();
    __TVMBackendParallelLaunch(task, NULL, 0);
    times[i] = now_us() - begin;
  }
  report(what, times, rounds);
}

static void arrival_cost(const char *what, int rounds, double *times, int sleep_us) {
  for (int i = 0; i < rounds; ++i) {
    struct arrival arrival = {.arrived = 0};
    if (sleep_us) usleep((unsigned)sleep_us);
    double begin = now_us();
    check(__TVMBackendParallelLaunch(arrival_task, &arrival, 0) == 0, "the helper comes");
    times[i] = arrival.when - begin;
  }
  report(what, times, rounds);
}

static void run_cost(int rounds) {
  double *times = malloc((size_t)rounds * sizeof *times);
  for (int i = 0; i < rounds; ++i) {
    double begin = now_us();
    times[i] = now_us() - begin;
  }
  report("the clock itself, in every figure below", times, rounds);
  tvm_deconv_set_num_threads(1);
  launch_cost("empty tasks, 1 thread", empty_task, rounds, times, 0);
  launch_cost("200 us of work, 1 thread", work_task, rounds, times, 0);
  tvm_deconv_set_num_threads(2);
  launch_cost("empty tasks, 2 threads, worker awake", empty_task, rounds, times, 0);
  launch_cost("empty tasks, 2 threads, worker asleep", empty_task, rounds, times, 1000);
  launch_cost("200 us of work, 2 threads, worker awake", work_task, rounds, times, 0);
  launch_cost("200 us of work, 2 threads, worker asleep", work_task, rounds, times, 1000);
  arrival_cost("until the worker begins its task, worker awake", rounds, times, 0);
  arrival_cost("until the worker begins its task, worker asleep", rounds, times, 1000);
  for (int i = 0; i < rounds; ++i) {
    double begin = now_us();
    __TVMBackendFreeWorkspace(1, 0, __TVMBackendAllocWorkspace(1, 0, 1 << 20, 2, 32));
    times[i] = now_us() - begin;
  }
  report("workspace of 1 MiB, taken and given back", times, rounds);
  clock_t begin = clock();
  usleep(300000);
  double burned_ms = (double)(clock() - begin) * 1e3 / CLOCKS_PER_SEC;
  printf("CPU time of the process in 300 ms without a launch: %.3f ms\n", burned_ms);
  free(times);
}

int main(int argc, char **argv) {
  if (argc != 3) return 2;
  int rounds = atoi(argv[2]);
  setenv("ROUNDS", argv[2], 1);
  if (strcmp(argv[1], "storm") == 0) run_storm();
  if (strcmp(argv[1], "rendezvous") == 0) run_rendezvous(rounds);
  if (strcmp(argv[1], "cost") == 0) run_cost(rounds);
  if (strcmp(argv[1], "failures") == 0) run_failures();
  if (strcmp(argv[1], "lanes") == 0) run_lanes();
  if (strcmp(argv[1], "nested") == 0) run_nested();
  if (strcmp(argv[1], "fork") == 0) run_fork();
  if (strcmp(argv[1], "turns") == 0) run_turns();
  if (strcmp(argv[1], "keep") == 0) run_keep();
  if (strcmp(argv[1], "asleep") == 0) run_asleep();
  if (strcmp(argv[1], "elsewhere") == 0) run_elsewhere();
  if (strcmp(argv[1], "host") == 0) run_hosts();
  return atomic_load(&failures) != 0;
}
