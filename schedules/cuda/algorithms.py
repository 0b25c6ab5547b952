"""The algorithms for CUDA devices."""

from tvm_deconv.schedules.contract import AnyAlgorithm
from tvm_deconv.schedules.cuda import gathered, generic, held, held_merged, merged, narrow, product, tensor, wgmma

#: In order of preference.
ALGORITHMS: tuple[AnyAlgorithm, ...] = (
    narrow.ALGORITHM,
    tensor.ALGORITHM,
    merged.ALGORITHM,
    wgmma.ALGORITHM,
    gathered.ALGORITHM,
    held.ALGORITHM,
    held_merged.ALGORITHM,
    product.ALGORITHM,
    generic.ALGORITHM,
)
