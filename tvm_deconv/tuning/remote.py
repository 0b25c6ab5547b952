"""Measuring at servers that a TVM tracker hands out (`tvm.exec.rpc_tracker` and `tvm.exec.rpc_server`).

A server needs TVM and nothing of ours: what it lacks (which CPU it is, threads of our launcher, guards around an
output, rates of the machine) is in a *probe*, a small library that is sent first. A server forks a process for each
session. The probe ends that process, quietly, when a candidate crashes or takes too long, since TVM's server gives up
altogether when one of its processes fails. So when a session breaks off and the server still answers, it was the
candidate; when nothing answers, it was the server.
"""

from __future__ import annotations

import contextlib
import socket
import struct
import subprocess
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tvm_deconv.errors import BuildError, ProblemError, RemoteError
from tvm_deconv.problem import Array
from tvm_deconv.targets import Host, parse_cpuinfo
from tvm_deconv.tuning.workers import Bound

_ANSWER_SECONDS = 5.0  # within which a tracker answers, and a server that has nothing else to do
_NOTICE_SECONDS = 30.0  # within which a server whose session has ended turns to who calls next

# Functions as `tvm_ffi` calls them. Rates are measured on the launcher's threads.
_PROBE = r"""
#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>
#include <tvm/ffi/c_api.h>

#define FUNCTION(name)                   \
  __attribute__((visibility("default"))) \
  int __tvm_ffi_##name(void *self, const TVMFFIAny *args, int32_t count, TVMFFIAny *result)

typedef int (*task_fn)(int task, void *group, void *data);
extern int (*__TVMBackendParallelLaunch)(task_fn, void *, int);
extern int tvm_deconv_set_num_threads(int count);

static int fails(const char *what) {
  TVMFFIErrorSetRaisedFromCStr("RuntimeError", what);
  return -1;
}

static void returns(TVMFFIAny *result, double value) {
  result->type_index = kTVMFFIFloat;
  result->v_float64 = value;
}

/* A string of more than seven characters. */
static const char *text_of(const TVMFFIAny *value) {
  if (value->type_index == kTVMFFIRawStr) return value->v_c_str;
  return ((const TVMFFIByteArray *)(value->v_obj + 1))->data;
}

static double now(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

static double shortest(task_fn task, void *data, int threads) {
  double best = 1e300;
  for (int trial = 0; trial < 7; ++trial) {
    double start = now();
    __TVMBackendParallelLaunch(task, data, threads);
    double taken = now() - start;
    best = taken < best ? taken : best;
  }
  return best;
}

static void leave(int number) {
  (void)number;
  _exit(0);
}

/* limit(seconds): this process ends after so many, 0 for never, and when it crashes. */
FUNCTION(limit) {
  static const int numbers[] = {SIGALRM, SIGSEGV, SIGBUS, SIGILL, SIGFPE, SIGABRT, SIGTRAP};
  for (size_t i = 0; i < sizeof numbers / sizeof *numbers; ++i) signal(numbers[i], leave);
  double seconds = args[0].v_float64;
  struct itimerval timer = {.it_value = {(time_t)seconds, (suseconds_t)(1e6 * (seconds - (time_t)seconds))}};
  return setitimer(ITIMER_REAL, &timer, NULL) ? fails("setitimer") : 0;
}

FUNCTION(threads) {
  result->type_index = kTVMFFIInt;
  result->v_int64 = tvm_deconv_set_num_threads((int)args[0].v_int64);
  return 0;
}

FUNCTION(cpuinfo) {
  size_t size = 0, room = 1 << 16;
  char *text = malloc(room);
  FILE *file = fopen("/proc/cpuinfo", "r");
  if (!file) return fails("/proc/cpuinfo cannot be read");
  for (size_t got; (got = fread(text + size, 1, room - size, file)) > 0;) {
    size += got;
    if (size == room) text = realloc(text, room *= 2);
  }
  fclose(file);
  TVMFFIByteArray bytes = {text, size};
  int status = TVMFFIStringFromByteArray(&bytes, result);
  free(text);
  return status;
}

struct fma { double (*run)(long, double, double); long steps; };

static int fma_task(int task, void *group, void *data) {
  struct fma *fma = data;
  (void)task, (void)group;
  fma->run(fma->steps, 0.5, 0.25);
  return 0;
}

/* fma(path, threads): multiply-adds per second of the kernel in that library. */
FUNCTION(fma) {
  void *library = dlopen(text_of(args), RTLD_NOW | RTLD_LOCAL);
  if (!library) return fails(dlerror());
  struct fma fma = {(double (*)(long, double, double))dlsym(library, "run"), 2000000};
  long per_step = *(long *)dlsym(library, "fmas_per_step");
  int threads = (int)args[1].v_int64;
  returns(result, threads * (double)fma.steps * per_step / shortest(fma_task, &fma, threads));
  return 0;
}

struct copy { char *from, *to; size_t share; };

static int copy_task(int task, void *group, void *data) {
  struct copy *copy = data;
  (void)group;
  memcpy(copy->to + task * copy->share, copy->from + task * copy->share, copy->share);
  return 0;
}

/* copy(threads): bytes per second, read plus written, of copies that no cache serves. */
FUNCTION(copy) {
  int threads = (int)args[0].v_int64;
  long cache = sysconf(_SC_LEVEL3_CACHE_SIZE), size = 4 * cache;
  size = size < 64l << 20 ? 64l << 20 : size > 1l << 30 ? 1l << 30 : size;
  struct copy copy = {malloc(size), malloc(size), size / threads};
  if (!copy.from || !copy.to) return fails("no memory");
  memset(copy.from, 1, size);
  memset(copy.to, 1, size);
  returns(result, 2.0 * copy.share * threads / shortest(copy_task, &copy, threads));
  free(copy.from);
  free(copy.to);
  return 0;
}

enum { GUARD = 256 };  /* bytes */

static void release(DLManagedTensor *tensor) {
  free((char *)tensor->dl_tensor.data - GUARD);
  free(tensor->dl_tensor.shape);
  free(tensor);
}

static size_t bytes_of(const DLTensor *tensor) {
  size_t bytes = tensor->dtype.bits / 8;
  for (int i = 0; i < tensor->ndim; ++i) bytes *= tensor->shape[i];
  return bytes;
}

/* output(code, bits, extent...): an array between guards. */
FUNCTION(output) {
  DLManagedTensor *tensor = calloc(1, sizeof *tensor);
  int64_t *shape = calloc(2 * count, sizeof *shape);
  int axes = count - 2;
  for (int i = 0; i < axes; ++i) shape[i] = args[2 + i].v_int64;
  for (int64_t i = axes, stride = 1; i-- > 0; stride *= shape[i]) shape[axes + i] = stride;
  DLDataType type = {(uint8_t)args[0].v_int64, (uint8_t)args[1].v_int64, 1};
  tensor->dl_tensor = (DLTensor){NULL, {kDLCPU, 0}, axes, type, shape, shape + axes, 0};
  tensor->deleter = release;
  char *memory;
  if (posix_memalign((void **)&memory, 64, bytes_of(&tensor->dl_tensor) + 2 * GUARD)) return fails("no memory");
  tensor->dl_tensor.data = memory + GUARD;
  TVMFFIObjectHandle made;
  if (TVMFFITensorFromDLPack(tensor, 0, 0, &made)) return -1;
  result->type_index = kTVMFFITensor;
  result->v_obj = made;
  return 0;
}

/* poison(output, byte) */
FUNCTION(poison) {
  const DLTensor *tensor = args[0].v_ptr;
  memset((char *)tensor->data - GUARD, (int)args[1].v_int64, bytes_of(tensor) + 2 * GUARD);
  return 0;
}

/* intact(output, byte): whether the guards hold that byte. */
FUNCTION(intact) {
  const DLTensor *tensor = args[0].v_ptr;
  const unsigned char *before = (unsigned char *)tensor->data - GUARD, *behind = before + GUARD + bytes_of(tensor);
  int whole = 1;
  for (int i = 0; i < GUARD; ++i) whole &= before[i] == args[1].v_int64 && behind[i] == args[1].v_int64;
  result->type_index = kTVMFFIInt;
  result->v_int64 = whole;
  return 0;
}
"""


def build_probe(cc: str, launcher: Path, directory: Path) -> Path:
    """Compile the probe, with the launcher's object, into `directory`. Raises BuildError."""
    import tvm_ffi

    library = directory / "probe.so"
    includes = {tvm_ffi.libinfo.find_include_path(), tvm_ffi.libinfo.find_dlpack_include_path()}
    flags = ["-std=gnu11", "-O2", "-shared", "-fPIC", "-pthread", *(f"-I{path}" for path in sorted(includes))]
    command = [cc, *flags, "-x", "c", "-", "-x", "none", str(launcher), "-ldl", "-o", str(library)]
    done = subprocess.run(command, input=_PROBE, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BuildError("cc", cc, f"does not compile the probe for servers: {done.stderr.strip()}")
    return library


class Tracker(NamedTuple):
    """A TVM tracker, and the key that its servers are asked for by. All methods raise RemoteError."""

    host: str
    port: int
    key: str

    @staticmethod
    def parse(address: str, key: str) -> Tracker:
        """Read HOST:PORT; ProblemError."""
        host, colon, port = address.rpartition(":")
        if not (host and colon and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise ProblemError("rpc_tracker", address, "must be HOST:PORT")
        return Tracker(host.strip("[]"), int(port), key)

    @property
    def address(self) -> str:
        """HOST:PORT."""
        return f"{self.host}:{self.port}"

    def servers(self) -> set[tuple[str, int]]:
        """Return the addresses of the servers with this key, those in use too."""
        everything = self._ask("SUMMARY")["server_info"]
        return {(found["addr"][0], found["addr"][1]) for found in everything if found["key"] == f"server:{self.key}"}

    def free(self) -> int:
        """Return how many servers wait for a session."""
        return int(self._ask("SUMMARY")["queue_info"].get(self.key, {"free": 0})["free"])

    def request(self) -> tuple[str, int, str]:
        """Take a free server: its address, and what it knows its next client by."""
        host, port, match = self._ask("REQUEST", self.key, "", 1)
        return host, port, match

    def _ask(self, code: str, *message: object) -> Any:
        from tvm.rpc import base

        try:
            with socket.create_connection((self.host, self.port), timeout=_ANSWER_SECONDS) as connection:
                connection.sendall(struct.pack("<i", base.RPC_TRACKER_MAGIC))
                if struct.unpack("<i", base.recvall(connection, 4))[0] != base.RPC_TRACKER_MAGIC:
                    raise OSError("another program answers")
                base.sendjson(connection, [getattr(base.TrackerCode, code), *message])
                succeeded, answer = base.recvjson(connection)
        except (OSError, ValueError) as error:
            raise RemoteError("rpc_tracker", self.address, f"no TVM tracker answers there: {error}") from error
        assert succeeded == base.TrackerCode.SUCCESS
        return answer


class Servers(NamedTuple):
    """Which servers to use, and the probe to send them."""

    tracker: Tracker
    probe: Path


class Server:
    """A session at one server, as a `Place`. The process ends where the server is lost, saying so."""

    def __init__(self, threads: int, servers: Servers) -> None:
        from tvm import rpc

        self._tracker = servers.tracker
        self._threads = threads
        host, port, match = self._tracker.request()
        self._address = (host, port)
        self._session = rpc.connect(host, port, match)
        self._device = self._session.cpu()
        self._probe = self._load(servers.probe)
        self._probe["threads"](threads)

    def host(self) -> Host:
        """Return the server's machine."""
        return parse_cpuinfo(str(self._probe["cpuinfo"]()))

    def fma(self, library: Path) -> float:
        """Measure the multiply-adds per second there."""
        self._session.upload(str(library))
        path = self._session.get_function("tvm.rpc.server.workpath")(library.name)
        return float(self._probe["fma"](path, self._threads))

    def copy(self) -> float:
        """Measure the bytes per second of copies there."""
        return float(self._probe["copy"](self._threads))

    @contextlib.contextmanager
    def attempt(self, seconds: float) -> Iterator[None]:
        """Let the server end the session after so long, and find out whose fault it is when one breaks off.

        TimeoutError, RuntimeError: the candidate's. Where the server was lost this process ends (SystemExit).
        """
        import tvm

        start = time.monotonic()
        try:
            self._probe["limit"](float(seconds))
            yield
            self._probe["limit"](0.0)
        except (tvm.error.InternalError, OSError) as error:
            taken = time.monotonic() - start
            if not self._survived():
                at = ":".join(map(str, self._address))
                raise SystemExit(f"the server {at} was lost: {error}") from None
            if taken >= seconds:
                raise TimeoutError(f"did not end within {seconds:g} s") from None
            raise RuntimeError("its process at the server ended") from None

    def _survived(self) -> bool:
        """Whether the server has outlived the session: it then turns whoever calls without its key away."""
        from tvm.rpc import base

        key = b"client:"
        end = time.monotonic() + _NOTICE_SECONDS
        try:
            with socket.create_connection(self._address, timeout=_NOTICE_SECONDS) as connection:
                connection.sendall(struct.pack("<ii", base.RPC_MAGIC, len(key)) + key)
                connection.settimeout(_ANSWER_SECONDS)
                while self._address in self._tracker.servers():
                    with contextlib.suppress(TimeoutError):
                        return bool(struct.unpack("<i", base.recvall(connection, 4))[0] == base.RPC_CODE_MISMATCH)
                    if time.monotonic() > end:  # it serves another client by now
                        return True
        except OSError:
            pass
        return False

    def put(self, array: Array) -> Any:
        """Send an array."""
        import tvm

        return tvm.runtime.tensor(array, self._device)

    def output(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> _OutputThere:
        """Allocate an array for results."""
        code = "iuf".index(dtype.kind)  # as DLPack has it
        return _OutputThere(self._probe, self._probe["output"](code, 8 * dtype.itemsize, *shape))

    def bind(self, library: Path, name: str, arguments: Sequence[Any]) -> Bound:
        """Send a library, and return its function with its arguments."""
        module = self._load(library)
        function = module[name]

        def sample(number: int, repeat: int) -> Sequence[float]:
            found: Sequence[float] = module.time_evaluator(name, self._device, number, repeat)(*arguments).results
            return found

        return Bound(lambda: function(*arguments), sample)

    def _load(self, library: Path) -> Any:
        self._session.upload(str(library))
        module = self._session.load_module(library.name)
        self._session.remove(library.name)
        return module


class _OutputThere:
    def __init__(self, probe: Any, argument: Any) -> None:
        self.argument = argument
        self._probe = probe

    def poison(self, byte: int) -> None:
        self._probe["poison"](self.argument, byte)

    def intact(self, byte: int) -> bool:
        return bool(self._probe["intact"](self.argument, byte))

    def read(self) -> Array:
        array: Array = self.argument.numpy()
        return array
