"""The fields of a manifest that reads."""

from tvm_deconv.artifact.manifest import library_name, stem
from tvm_deconv.problem import Problem
from tvm_deconv.targets import CPU_TARGETS

P = Problem(1, 2, 3, 4, (5, 6), (3, 3), (2, 2), (1, 1), (1, 1), (10, 12), filter_format="IOX")


def fields(problem=P, target="x86-64-v3", /, **changes):
    features = sorted(CPU_TARGETS[target].features) if target in CPU_TARGETS else []
    return {
        "format": 2,
        "problem": problem.artifact_key,
        "layers": ["decoder.0"],
        "target": target,
        "features": features,
        "needs": {"GLIBC": "2.17"},
        "library": library_name(stem(problem.artifact_key, target), "ab" * 32),
        "sha256": "ab" * 32,
        "size": 20480,
        "algorithm": "direct",
        "origin": "default",
        "knobs": {"tile": 8, "offset": -1},
        "packed_shape": [2, 3, 4, 9],
        "packed_dtype": "float32",
        "scratch_bytes": 0,
        "shared_bytes": 0,
        "macs": problem.macs,
        "versions": {"tvm": "0.27.0.post1"},
        "recipe": "cd" * 32,
    } | changes
