"""Records of tuning logs, of problems that are quick to build and run."""

import itertools

import msgspec
import pytest
from support.strategies import operands
from support.tolerances import assert_close

import tvm_deconv as td
from tvm_deconv.compiler.fingerprint import kernel_digest
from tvm_deconv.compiler.records import Cpu, Record
from tvm_deconv.compiler.selection import space
from tvm_deconv.targets import CPU_TARGETS, detect_host

V3 = CPU_TARGETS["x86-64-v3"]
SMALL = td.Problem(1, 1, 4, 6, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (9, 11))
OTHER = SMALL.replace(out_channels=8)

ZEN3 = Cpu(name="AMD EPYC", vendor="AuthenticAMD", family=25, model=1, stepping=1, microarchitecture="zen3")
#: The fields of a record that these kernels made, in turns with the default, which took 1.3 times as long.
VERDICT = {"sources": kernel_digest("x86"), "default_ratio": 1.3}

runs_v3 = pytest.mark.skipif(not V3.features <= detect_host().features, reason="this CPU does not run x86-64-v3")


def schedules_of(problem, count):
    return [candidate.schedule for candidate in itertools.islice(space(problem, V3), count)]


def record(problem=SMALL, schedule=None, seconds=1e-3, **changes):
    schedule = schedule or schedules_of(problem, 1)[0]
    made = Record(
        problem=problem.artifact_key,
        target=V3.name,
        algorithm=schedule.algorithm,
        knobs=dict(schedule.knobs),
        seconds=seconds,
        spread=0.01,
        runs=9,
        error="",
        threads=1,
        host="a CPU",
        sources="0123456789ab",
        commit="fedcba987654",
        seed=3,
        versions={"tvm_deconv": "0.1.0"},
        when="2026-01-02T03:04:05.678+00:00",
    )
    return msgspec.structs.replace(made, **changes)


def run(problem, directory):
    data, weights, bias = operands(problem, 0)
    found = td.load(directory).bind(problem, weights, bias)(data)
    assert_close(found, td.reference(problem, data, weights, bias))
