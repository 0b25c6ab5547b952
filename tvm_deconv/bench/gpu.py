"""Check every kernel on a CUDA device against float64, and time it beside PyTorch: the work of ``scripts/gpu-check``.

A process of its own uses the device, one step of one row at a time. If it dies, does not answer in time or has lost the
device, its row says so, and another process, which waits already, does the next row. The result is written after every
step, and a run that was ended, by whatever, is continued from it.
"""

from __future__ import annotations

import contextlib
import json
import math
import signal
import statistics
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeAlias

from tvm_deconv.artifact import files
from tvm_deconv.artifact.select import Accepted
from tvm_deconv.compiler.process import Worker, WorkerError
from tvm_deconv.errors import BuildError, ProblemError
from tvm_deconv.problem import ACTIVATIONS, PRECISIONS, Epilogue, Problem, element_bytes
from tvm_deconv.problem.arithmetic import ceil_div
from tvm_deconv.runtime.library import load

DEVICE = "cuda"
#: Largest allowed deviation, as a part of the largest element.
TOLERANCES = {
    "float32": 1e-5,
    "tf32x3": 1e-5,
    "tf32": 1.5e-3,
    "float64": 1e-12,
    "float16": 3e-3,
    "bfloat16": 1.6e-2,
    "int8": 0.0,
    "uint8": 0.0,
}
#: Multiply-adds per second of an H100 or H200.
RATES = {
    "float32": 67e12 / 2,
    "tf32x3": 495e12 / 6,
    "tf32": 495e12 / 2,
    "float16": 990e12 / 2,
    "bfloat16": 990e12 / 2,
    "int8": 1979e12 / 2,
}
#: The settings that layers run in: type, and format of the data; and those of which PyTorch has no operator.
SETTINGS = (("float32", "NCX"), ("tf32x3", "NCX"), ("float16", "NCX"), ("tf32", "NCX"), ("float16", "NXC"))
INTEGERS = (("int8", "NCX"), ("int8", "NXC"))
_EVERY = (*SETTINGS, *INTEGERS)
ROUNDS, CALLS = 7, 10
_MOST_COPIES = 64
#: Bytes of an archive that is carried to a machine with a device, at most.
MOST_BYTES = 60_000_000
#: The directory of an archive that has a tournament's plans.
PLANS = "plans"
#: Seconds for a process to take the device, and for one step of one row.
_START, _STEP = 120.0, 60.0

Row: TypeAlias = dict[str, Any]
#: A call, and the data that it takes in turns.
Entry: TypeAlias = tuple[Callable[[Any], Any], list[Any]]
torch: Any = None  # imported by the processes that have the device


class TimeIsUp(BaseException):
    """The end of a time limit; like an interrupt, it passes handlers of errors."""


def of_type(problem: Problem, kind: str, data_format: str) -> Problem:
    """Return the problem in a type and format; tf32 and tf32x3 are float32 that permits them."""
    dtype, precision = ("float32", kind) if kind in PRECISIONS else (kind, "ieee")
    return problem.replace(dtype=dtype, precision=precision, data_format=data_format)


def kind_of(problem: Problem) -> str:
    """Return the type, the inverse of `of_type`."""
    return problem.dtype if problem.precision == "ieee" else problem.precision


def small_problems() -> list[Problem]:
    """Return problems for every family, type and layout."""
    gelu = Epilogue(True, "gelu")
    shapes = [
        Problem(2, 1, 37, 70, (9, 17), (3, 4), (2, 2), (1, 1), (1, 2), (17, 33), epilogue=gelu),
        Problem(2, 1, 64, 48, (9, 17), (4, 4), (2, 2), (1, 1), (1, 1), (18, 34), epilogue=gelu),
        Problem(1, 2, 24, 40, (130,), (9,), (4,), (1,), (2,), (521,)),
        Problem(1, 1, 16, 24, (5, 6, 7), (2, 2, 2), (2, 2, 2), (1, 1, 1), (0, 0, 0), (10, 12, 14)),
        Problem(1, 1, 2048, 8, (3, 3), (3, 3), (2, 2), (1, 1), (1, 1), (6, 6)),
        Problem(1, 64, 1, 1, (33, 40), (4, 4), (2, 2), (1, 1), (1, 1), (66, 80)),
        Problem(1, 1, 24, 1, (160, 160), (9, 9), (3, 3), (1, 1), (4, 4), (480, 480)),
        Problem(1, 1, 3, 2, (15, 15), (7, 7), (8, 8), (3, 3), (2, 3), (120, 123)),
    ]
    problems = []
    for problem in shapes:
        for kind in TOLERANCES:
            for data_format in ("NCX", "NXC"):
                epilogue = Epilogue() if kind.endswith("int8") else problem.epilogue
                problems.append(of_type(problem.replace(epilogue=epilogue), kind, data_format))
    return problems


def layers(path: Path) -> list[tuple[str, Problem]]:
    """Return the name and the problem of each layer of a list of problems, in every setting."""
    names = ("strides", "pads_begin", "pads_end", "dilations", "output_padding")
    settings = []
    for entry in json.loads(path.read_text(encoding="utf-8")):
        attributes = {name: entry[name] for name in names}
        epilogue = Epilogue(bias=entry["bias"])
        problem = Problem.from_openvino(entry["data"], entry["filter"], **attributes, epilogue=epilogue)
        settings += [(entry["name"], of_type(problem, kind, data_format)) for kind, data_format in _EVERY]
    return settings


def operands(problem: Problem) -> tuple[Any, Any, Any]:
    """Return random data, filter and bias on the device."""
    dtype, chance = getattr(torch, problem.dtype), torch.Generator(DEVICE).manual_seed(0)

    def array(shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Any:
        if not dtype.is_floating_point:
            least = -100 if dtype.is_signed else 0
            return torch.randint(least, 100, shape, device=DEVICE, generator=chance).to(dtype)
        made = torch.float64 if dtype == torch.float64 else torch.float32
        return (torch.randn(shape, device=DEVICE, dtype=made, generator=chance) * scale).to(dtype)

    scale = 1 / math.sqrt(problem.in_channels)
    bias = None
    if problem.epilogue.bias:
        bias = array(problem.bias_shape, getattr(torch, problem.accumulate_dtype))
    return array(problem.data_shape, dtype), array(problem.filter_shape, dtype, scale), bias


def _torch_filter(problem: Problem, filter: Any) -> Any:
    """Return a filter in IOX or GIOX in the shape that PyTorch takes."""
    return filter.reshape(problem.groups * problem.in_channels, problem.out_channels, *problem.kernel)


def _run_torch(problem: Problem, data: Any, filter: Any, bias: Any, pads: Any, extra: Any) -> Any:
    """Return the output of PyTorch's operator."""
    functional = torch.nn.functional
    run = (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d)[problem.rank - 1]
    return run(data, filter, bias, problem.strides, pads, extra, problem.groups, problem.dilations)


def one_call(problem: Problem, filter: Any, bias: Any) -> Callable[[Any], Any] | None:
    """Return the problem as one call of PyTorch's operator on data; None if its paddings cannot express it."""
    pads = problem.pads_begin
    uncropped = zip(problem.output_spatial, problem.uncropped_spatial, pads, strict=True)
    extra = [y - (n - 2 * p) for y, n, p in uncropped]
    largest = map(max, problem.strides, problem.dilations)
    if not all(0 <= e < most for e, most in zip(extra, largest, strict=True)):
        return None
    return lambda data: _run_torch(problem, data, filter, bias, pads, extra)


def deviation(problem: Problem, data: Any, filter: Any, bias: Any, output: Any) -> float:
    """Return how far `output` is from a result in float64, as a part of the largest element."""
    last = problem.data_format == "NXC"
    data = data.movedim(-1, 1).contiguous() if last else data
    # Without cuDNN, whose transforms would not be exact for integers, nor know all of these.
    with torch.backends.cudnn.flags(enabled=False):
        wanted = _run_torch(problem, data.double(), _torch_filter(problem, filter).double(), None, 0, 0)
    for axis in range(problem.rank):
        begin, extent = problem.pads_begin[axis], problem.output_spatial[axis]
        beyond = max(0, begin + extent - problem.uncropped_spatial[axis])
        wanted = torch.nn.functional.pad(wanted, [0, 0] * (problem.rank - 1 - axis) + [0, beyond])
        wanted = wanted.narrow(2 + axis, begin, extent)
    if bias is not None:
        wanted = wanted + bias.double().reshape(-1, *(1,) * problem.rank)
    activation = ACTIVATIONS[problem.epilogue.activation].torch_function.load()
    wanted = activation(wanted, *problem.epilogue.parameters.values())
    output = output.movedim(-1, 1) if last else output
    # A NaN stays one, and is not within any tolerance.
    return float((output.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


def _at_odd_address(array: Any) -> Any:
    """Return a copy that begins one element behind the start of an allocation."""
    whole = torch.empty(array.numel() + 1, dtype=array.dtype, device=array.device)
    view = whole[1:].view(array.shape)
    view.copy_(array)
    return view


def compare(problem: Problem, layer: Any, arrays: tuple[Any, Any, Any], row: Row) -> None:
    """Compare the output of a layer with float64, and of calls in other ways with each other; write it to `row`."""
    data, filter, bias = arrays
    result = layer(data)
    row["deviation"] = deviation(problem, data, filter, bias, result)
    row["right"] = row["deviation"] <= TOLERANCES[kind_of(problem)]
    with torch.cuda.stream(torch.cuda.Stream()):
        elsewhere = layer(data)
        torch.cuda.current_stream().synchronize()
    out, odd = torch.full_like(result, -77), _at_odd_address(result)
    layer(data, out)
    layer(data, odd.fill_(-77))
    row["same_every_run"] = bool(torch.equal(result, layer(data)) and torch.equal(result, out))
    row["same_on_a_stream"] = bool(torch.equal(result, elsewhere))
    row["same_from_an_odd_address"] = bool(torch.equal(result, layer(_at_odd_address(data))))
    row["same_to_an_odd_address"] = bool(torch.equal(result, odd))


def _rotated(problem: Problem, data: Any) -> list[Any]:
    """Return `data` and copies of it, at most 64: with their outputs, twice the size of the level-2 cache.

    Where a device has no room for as many, those for which it has.
    """
    nbytes = data.nbytes + math.prod(problem.output_shape) * element_bytes(problem.output_dtype)
    level2 = torch.cuda.get_device_properties(DEVICE).L2_cache_size
    copies = [data]
    with contextlib.suppress(torch.OutOfMemoryError):
        for _ in range(min(_MOST_COPIES, ceil_div(2 * level2, max(1, nbytes))) - 1):
            copies.append(data.clone())
    return copies


class _Contestant:
    """An operator whose calls are captured in a graph: each of them on data and an output of its own."""

    def __init__(self, call: Callable[[Any], Any], copies: Sequence[Any]) -> None:
        self.seconds: list[float] = []
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # cuDNN chooses its algorithm here, and libraries load
            for _ in range(3):
                call(copies[0])
        side.synchronize()
        several = [copies[turn % len(copies)] for turn in range(max(CALLS, len(copies)))]
        self._calls, self._graph = len(several), torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=side):
            outputs = [call(data) for data in several]
        del outputs  # none of them took the place of another

    def run(self) -> None:
        """Add the seconds of one of the calls, by events around all of them."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        self._graph.replay()
        end.record()
        end.synchronize()
        self.seconds.append(1e-3 * start.elapsed_time(end) / self._calls)


def race(entries: Mapping[str, Entry], failed: dict[str, str]) -> dict[str, float]:
    """Return the median seconds of each entry, taken in turns after a round of warming up; note those that fail."""
    contestants = {}
    for name, (call, copies) in entries.items():
        try:
            contestants[name] = _Contestant(call, copies)
        except RuntimeError as error:  # a package's: the others still run
            failed[name] = str(error)[:300]
    for _ in range(1 + ROUNDS):
        for contestant in contestants.values():
            contestant.run()
    return {name: float(statistics.median(contestant.seconds[1:])) for name, contestant in contestants.items()}


def _copy_rate() -> float:
    """Return the bytes per second of a large copy, read plus written."""
    source = torch.empty(1 << 29, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * (1 << 29) / race({"copy": (target.copy_, [source])}, {})["copy"]


class Device:
    """The device, in a process that has taken it; its methods are the steps of a row."""

    def __init__(self, directory: str) -> None:
        """Remember the directory of the artifacts."""
        self._directory = directory

    def start(self) -> Row:
        """Take the device and describe it; raises RuntimeError if PyTorch finds none."""
        global torch
        import torch

        if not torch.cuda.is_available():
            raise RuntimeError("PyTorch finds no CUDA device")
        torch.backends.cudnn.benchmark = True
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        torch.zeros(1, device=DEVICE)
        self._library = load(self._directory)
        return {
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
            "cudnn": torch.backends.cudnn.version(),
            "copy": _copy_rate(),
        }

    def check(self, _: str, problem: Problem) -> Row:
        """Compare the layer's result with others."""

        def step(row: Row) -> None:
            best = self._library.select(problem, 0)[0]
            row["algorithm"] = best.manifest.algorithm if isinstance(best, Accepted) else None
            arrays = operands(problem)
            compare(problem, self._library.bind(problem, *arrays[1:]), arrays, row)

        return _carefully(step)

    def race(self, _: str, problem: Problem) -> Row:
        """Time the layer, PyTorch's operator in both memory formats, and a plain product of as many multiply-adds.

        PyTorch has neither of integers: they race those of float16, and the row says so.
        """

        def step(row: Row) -> None:
            data, filter, bias = operands(problem)
            layer = self._library.bind(problem, filter, bias)
            calls: dict[str, Entry] = {"ours": (layer, _rotated(problem, data))}
            if not data.dtype.is_floating_point:
                row["peers"] = "float16"
                data, filter, bias = (array if array is None else array.half() for array in (data, filter, bias))
            calls |= _peers(problem, data, filter, bias)
            calls["product"] = _product(problem, data.dtype)
            permitted = problem.precision == "tf32"
            torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = permitted
            row["seconds"] = race(calls, row.setdefault("not_timed", {}))
            row["clock_MHz"] = torch.cuda.clock_rate()

        return _carefully(step)


def _peers(problem: Problem, data: Any, filter: Any, bias: Any) -> dict[str, Entry]:
    """Return PyTorch's operator in both memory formats, with data of each."""
    bias = bias if bias is None else bias.to(data.dtype)
    plain = data.movedim(-1, 1).contiguous() if problem.data_format == "NXC" else data
    formats = {"contiguous": torch.contiguous_format}
    if problem.rank > 1:
        formats["channels_last"] = torch.channels_last if problem.rank == 2 else torch.channels_last_3d
    peers: dict[str, Entry] = {}
    for name, memory_format in formats.items():
        weights = _torch_filter(problem, filter).contiguous(memory_format=memory_format)
        call = one_call(problem, weights, bias)
        if call:
            peers[f"torch_{name}"] = call, _rotated(problem, plain.contiguous(memory_format=memory_format))
    return peers


def _product(problem: Problem, dtype: Any) -> Entry:
    """Return a product of matrices with the multiply-adds of all taps at all data."""
    rows, columns = problem.batch * math.prod(problem.data_spatial), problem.out_channels * math.prod(problem.kernel)
    a = torch.randn(problem.groups, rows, problem.in_channels, device=DEVICE, dtype=dtype)
    b = torch.randn(problem.groups, problem.in_channels, columns, device=DEVICE, dtype=dtype)
    return (lambda left: torch.bmm(left, b)), [a]


def _carefully(step: Callable[[Row], None]) -> Row:
    """Return the row that `step` writes, with an error if it fails; `lost` if the device is of no more use after it."""
    row: Row = {}
    try:
        step(row)
        torch.cuda.synchronize()
    # Of any class: torch's, ours, a package's; the next row is not to suffer.
    except Exception as error:
        row["error"] = f"{type(error).__name__}: {error}"[:1000]
    try:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
    except RuntimeError:
        row["lost"] = True
    return row


class _Devices:
    """Processes that have taken the device: one that is asked, and one that waits for its turn."""

    def __init__(self, kind: type[Device], directory: Path) -> None:
        self._kind, self._directory = kind, directory
        self._threads = ThreadPoolExecutor(1)  # a process ends with the thread that started it
        self._current, self._next = self._started(), self._started()
        self.facts: Row = self._current[1].result()

    def _started(self) -> tuple[Worker, Future[Row]]:
        worker = Worker(self._kind, str(self._directory))
        return worker, self._threads.submit(worker.ask, "start", timeout=_START)

    def ask(self, step: str, name: str, problem: Problem, seconds: float) -> Row:
        """Return the row of a step; raises WorkerError if no process can take the device any more."""
        worker, started = self._current
        started.result()
        try:
            row: Row = worker.ask(step, name, problem, timeout=seconds)
        except WorkerError as error:
            row = {"error": str(error), "lost": True}
        if row.pop("lost", False):
            self._threads.submit(worker.close)
            self._current, self._next = self._next, self._started()
        return row

    def close(self) -> None:
        """End the processes."""
        for worker, _ in (self._current, self._next):
            worker.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


@contextlib.contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TimeIsUp in the with block, in the main thread, after `seconds`."""

    def raises(*_: object) -> None:
        raise TimeIsUp

    before = signal.signal(signal.SIGALRM, raises)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def build(problems: Sequence[Problem], directory: Path, target: str, jobs: int | None, seconds: float) -> Row:
    """Build `problems` for `target`, for at most `seconds`; return the counts and the failures."""
    from tvm_deconv.compiler.build import compile

    result: Row = {"target": target, "seconds": 0.0, "built": 0, "of": len(problems), "failed": []}
    start = time.monotonic()

    def note(outcome: Any) -> None:
        result["built"] += outcome.status != "failed"
        if outcome.error:
            result["failed"].append({"key": outcome.problem.key, "error": outcome.error[:2000]})
        done = result["built"] + len(result["failed"])
        print(f"{time.monotonic() - start:4.0f} s  {outcome.status} {done}: {outcome.problem.key}", flush=True)

    with contextlib.suppress(BuildError, TimeIsUp), within(seconds):
        compile(problems, target, directory, jobs=jobs, on_outcome=note)
    result["seconds"] = time.monotonic() - start
    return result


def archive(directory: Path, path: Path) -> None:
    """Write the artifacts of a directory and of those in it to a tar file; what all libraries share is stored once."""
    with tarfile.open(path, "w:xz") as tar:
        for file in sorted(directory.rglob("*")):
            if file.suffix in (".so", ".json"):
                tar.add(file, file.relative_to(directory))


def prepared(built: Row, directory: Path, path: Path) -> list[str]:
    """Write the archive of what a `build` left in a directory, and return what it lacks or is too large for."""
    archive(directory, path)
    missing, size = built["of"] - built["built"] - len(built["failed"]), path.stat().st_size
    wrong = [f"{failure['key']}: {failure['error']}" for failure in built["failed"]]
    if missing:
        wrong.append(
            f"--minutes={built['seconds'] / 60:.0f}: the time ended before {missing} of {built['of']} were built"
        )
    if size > MOST_BYTES:
        wrong.append(f"{path}: must have at most {MOST_BYTES} bytes to be carried, it has {size}")
    return wrong


def opened(artifacts: Path, scratch: Path) -> Path:
    """Return `artifacts` if it is a directory; else unpack that archive into `scratch` and return this."""
    if artifacts.is_dir():
        return artifacts
    with tarfile.open(artifacts) as tar:
        tar.extractall(scratch, filter="data")
    return scratch


def good(row: Row) -> bool:
    """Return whether a row has no error and all its comparisons are right."""
    fields = ["right", *(field for field in row if field.startswith("same_"))]
    return "error" not in row and all(row.get(field) for field in fields)


def run(
    rows: Sequence[tuple[str, Problem]],
    directory: Path,
    output: Path,
    result: Row,
    seconds: float,
    kind: type[Device] = Device,
    patience: Callable[[Problem], float] = lambda _: _STEP,
) -> None:
    """Check `rows`, and time those that have a name beside their peers, within `seconds`.

    `result` is written to the file `output` before and after every step. What that file has of the same artifacts, rows
    and device is not done again; a row of which a step was under way when a run ended comes last. A step has
    `patience(problem)` seconds. Raises ProblemError if the file is of others.
    """
    start = time.monotonic()
    blank: list[Row] = [{"name": name, "key": problem.key, "type": kind_of(problem)} for name, problem in rows]
    result |= {"rows": blank, "left_out": [], "ended": "", "under_way": [], "artifacts": load(directory).digest}
    devices = None
    try:
        with within(seconds):
            devices = _Devices(kind, directory)
            result |= devices.facts
            _go_on(output, result)
            written = result["rows"]
            for step, number in _steps(rows, result):
                row, (name, problem) = written[number], rows[number]
                if step == "race" and not good(row):
                    continue
                if [step, number] not in result["under_way"]:
                    result["under_way"].append([step, number])
                write(output, result)
                row |= devices.ask(step, name, problem, patience(problem))
                row.setdefault("done", []).append(step)
                result["under_way"].remove([step, number])
                _rate(row, problem, result["copy"])
                write(output, result)
                print(f"{time.monotonic() - start:4.0f} s  {_words(step, row, problem)}", flush=True)
    except (TimeIsUp, KeyboardInterrupt) as error:
        result["ended"] = type(error).__name__
    except WorkerError as error:
        result["ended"] = f"no process has the device: {error}"
    finally:
        if devices:
            devices.close()
    result["left_out"] = [row["key"] for row in result["rows"] if "done" not in row]
    write(output, result)


def _go_on(output: Path, result: Row) -> None:
    """Take what a run before this one has written. Raises ProblemError if that is of other artifacts or a device."""
    if not output.exists():
        return
    try:
        before = json.loads(output.read_text(encoding="utf-8"))
        same = all(before[field] == result[field] for field in ("artifacts", "device"))
        same &= [row["key"] for row in before["rows"]] == [row["key"] for row in result["rows"]]
        done, under_way = before["rows"], before["under_way"]
    except (ValueError, KeyError, TypeError):
        same = False
    if not same:
        raise ProblemError("output", output, "must be a new file, or of a run with these artifacts on this device")
    result |= {"rows": done, "under_way": under_way}


def _steps(rows: Sequence[tuple[str, Problem]], result: Row) -> list[tuple[str, int]]:
    """Return the steps that are left in order of their worth: checks, then races, of the most multiply-adds first.

    Rows of which a step was under way when a run ended come last: perhaps it ended that.
    """
    races = sorted((number for number, (name, _) in enumerate(rows) if name), key=lambda number: -rows[number][1].macs)
    every = [*(("check", number) for number in range(len(rows))), *(("race", number) for number in races)]
    left = [(step, number) for step, number in every if step not in result["rows"][number].get("done", [])]
    ended = {number for _, number in result["under_way"]}
    return sorted(left, key=lambda one: one[1] in ended)


def _rate(row: Row, problem: Problem, copied: float) -> None:
    """Compare a row's times with PyTorch's and with the device's floors, in the row; copies take `copied` bytes/s."""
    times = row.get("seconds", {})
    if "ours" not in times:
        return
    row["floors"] = {"products": problem.macs / RATES[kind_of(problem)], "memory": problem.min_bytes / copied}
    row["of_floor"] = max(row["floors"].values()) / times["ours"]
    peers = [seconds for name, seconds in times.items() if name.startswith("torch_")]
    if peers:
        row["speedup"] = min(peers) / times["ours"]


def _words(step: str, row: Row, problem: Problem) -> str:
    """Return a line for people about a step."""
    words = [row["name"] or row["key"], row["type"], problem.data_format, row.get("algorithm")]
    if step == "check":
        words[:0] = ["ok   " if good(row) else "WRONG"]
        words += [f"off by {row['deviation']:.1e}"] if "deviation" in row else []
    elif "of_floor" in row:
        words += [f"{1e6 * row['seconds']['ours']:.1f} us, {row['of_floor']:.0%} of the floor"]
        words += [f"{_rival(row)} takes {row['speedup']:.2f} times ours"] if "speedup" in row else []
    return " ".join(map(str, [*([] if step == "check" else ["time "]), *words, row.get("error", "")]))


def _rival(row: Row) -> str:
    """Return what a row raced, with its type if that is not the row's own."""
    return f"PyTorch in {row['peers']}" if "peers" in row else "PyTorch"


def write(output: Path, result: Row) -> None:
    """Write `result` to the file `output`, which is whole at any time."""
    files.write(output, (json.dumps(result, indent=1) + "\n").encode())


def summary(result: Row) -> list[str]:
    """Return the last lines that a run prints: errors, and means by setting."""
    rows = [row for row in result["rows"] if "done" in row]
    wrong = [row for row in rows if not good(row)]
    lines = [f"WRONG {row['name']} {row['key']}: {row.get('error') or row.get('deviation')}" for row in wrong]
    for kind, data_format in _EVERY:
        of = [row for row in rows if row["type"] == kind and f"-{data_format}-" in row["key"] and "of_floor" in row]
        if of:
            line = f"{kind} {data_format}: {len(of)} layers, median {_median(of, 'of_floor'):.0%} of the floor"
            timed = [row for row in of if "speedup" in row]
            if timed:
                mean = math.exp(statistics.fmean(math.log(row["speedup"]) for row in timed))
                ahead = sum(row["speedup"] > 1 for row in timed)
                line += f"; {_rival(timed[0])} takes {mean:.2f} times ours in the mean"
                line += f", and longer for {ahead} of {len(timed)}"
            lines.append(line)
    behind = sorted((row for row in rows if row.get("speedup", 1) < 1), key=lambda row: row["speedup"])
    for row in behind[:10]:
        lines.append(f"behind: {row['name']} {row['key']}: {_rival(row)} takes {row['speedup']:.2f} times ours")
    failed = len(result["build"]["failed"])
    left, ended = len(result["left_out"]), f" ({result['ended']})" if result["ended"] else ""
    alone = sum("of_floor" in row and "speedup" not in row for row in rows)
    lines.append(f"{len(rows)} run, {len(wrong)} wrong, {left} left out{ended}, {failed} failed to build")
    if "plans_left" in result:
        lines.append(f"tournament: {result['plans_left']} layers were not reached")
    lines += [f"{alone} layers are not compared with PyTorch"] if alone else []
    return lines


def _median(rows: Sequence[Row], field: str) -> float:
    return float(statistics.median(row[field] for row in rows))
