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
 * Prints what failed and returns 1, else 0.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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
int tvm_deconv_set_thread_limit(int);
int tvm_deconv_make_arena(void *, uint64_t, uint64_t, uint64_t);
void *tvm_deconv_set_arena(void *);

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

struct storm {
  int done[MOST_TASKS]; /* plain memory: only the launch orders these writes before the caller's reads */
  int tasks;
  int fails; /* the task that fails, or -1 */
  unsigned work;
};

static int nothing(int task, Env *env, void *data) {
  (void)task, (void)env;
  ++*(int *)data;
  return 0;
}

static int storm_task(int task, Env *env, void *data) {
  struct storm *storm = data;
  if (task == 0) storm->tasks = env->num_task;
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
  int nested = 0; /* unprotected: a nested launch is serial */
  check(__TVMBackendParallelLaunch(nothing, &nested, 3) == 0 && nested == 3, "a nested launch runs its tasks");
  ++storm->done[task];
  return 0;
}

static pthread_barrier_t start;

/* Shared by all callers, too small for all of them, with lanes that are too small for some blocks. */
static _Alignas(64) char arena[64 + 1024 + 3 * 2048];

static void *storm_caller(void *argument) {
  unsigned seed = (unsigned)(uintptr_t)argument;
  int rounds = atoi(getenv("ROUNDS"));
  for (int round = 0; round < rounds; ++round) {
    struct storm storm = {.fails = -1, .work = next_random(&seed) % 2000};
    int asked = next_random(&seed) % 3 ? 0 : 1 + (int)(next_random(&seed) % MOST_TASKS);
    if (next_random(&seed) % 8 == 0) tvm_deconv_set_thread_limit((int)(next_random(&seed) % 5));
    if (next_random(&seed) % 16 == 0) tvm_deconv_set_num_threads(1 + (int)(next_random(&seed) % 12));
    if (next_random(&seed) % 8 == 0) storm.fails = (int)(next_random(&seed) % 3);
    if (next_random(&seed) % 32 == 0) usleep(next_random(&seed) % 200);
    if (round % 64 == 0) pthread_barrier_wait(&start);
    int shared = next_random(&seed) % 2;
    if (shared) check(tvm_deconv_set_arena(arena) == NULL, "no arena is left behind");
    unsigned char *own = __TVMBackendAllocWorkspace(1, 0, 300, 2, 32); /* around the launch, as some schedules have it */
    memset(own, 0x5a, 300);
    int status = __TVMBackendParallelLaunch(storm_task, &storm, asked);
    for (int i = 0; i < 300; ++i) check(own[i] == 0x5a, "a caller's workspace is its own");
    __TVMBackendFreeWorkspace(1, 0, own);
    if (shared) check(tvm_deconv_set_arena(NULL) != NULL, "the arena stays until it is taken away");
    if (storm.fails >= 0 && storm.fails < storm.tasks) { /* tasks are claimed in order: the first three all run */
      check(status == -1 && raised != NULL, "a failed task fails the launch and leaves an error");
      TVMFFIObjectDecRef(raised);
      raised = NULL;
      continue;
    }
    check(status == 0 && raised == NULL, "the launch succeeds");
    check(asked ? storm.tasks == asked : storm.tasks >= 1 && storm.tasks <= 12, "the number of tasks");
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
    double pause = 19 + 0.01 * (next_random(&seed) % 300); /* workers spin for 20 us: they are just falling asleep */
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

static int empty_task(int task, Env *env, void *data) {
  (void)task, (void)env, (void)data;
  return 0;
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
  return atomic_load(&failures) != 0;
}
