"""A server of a tracker that the tests of remote runners share."""

import pytest
from support.cuda_kernels import compile_driver
from support.fleet import fleet_of


@pytest.fixture(scope="session")
def fleet(tmp_path_factory):
    """A fleet of one server, "alone". Its CUDA device, which has little memory, is there while `fleet.driver` is."""
    folder = tmp_path_factory.mktemp("driver")
    device = {"LD_LIBRARY_PATH": str(folder), "SHIM_MEMORY": "250000"}
    with fleet_of(device, alone=1) as made:
        made.driver = folder / "libcuda.so.1"
        made.driver.symlink_to(compile_driver())
        yield made
