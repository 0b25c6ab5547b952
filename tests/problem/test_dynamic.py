"""Dynamic extents: which schedules an artifact has for them, and how many it may have."""

import pytest

import tvm_deconv as td


def problem(*spatial):
    rank = len(spatial)
    return td.Problem.from_torch((1, 4, *spatial), (4, 2, *(4,) * rank), stride=2, padding=1)


@pytest.mark.parametrize(
    ("spatial", "wanted"),
    [
        (("any",), [(16,), (128,), (1024,)]),
        (("any", "any"), [(8, 8), (16, 16), (32, 32), (64, 64)]),
        ((8, "any"), [(8, 8), (8, 16), (8, 32), (8, 64)]),
        (([3, 7], "any"), [(3, 64), (7, 64)]),
        (([7, 3, 7],), [(3,), (7,)]),
        (([3, 7], [9]), [(3, 9), (7, 9)]),
    ],
)
def test_an_artifact_has_a_schedule_for_each_bucket(spatial, wanted):
    assert [variant.data_spatial for variant in problem(*spatial).variants] == wanted


@pytest.mark.parametrize("shape", [("any", 4, 5, 6), (2, 4, "any", 6), (2, 4, 5, "any"), ("any", 4, "any", "any")])
def test_the_key_says_which_extents_are_dynamic(shape):
    made = td.Problem.from_torch(shape, (4, 2, 3, 3))
    key = dict(zip("ngiox", made.key.split("-"), strict=False))
    assert key["n"] == f"n{shape[0]}"
    assert key["x"] == f"x{shape[2]}x{shape[3]}"
    assert td.Problem.from_key(made.key) == made


@pytest.mark.parametrize("spatial", [(list(range(1, 17)),), (5, list(range(1, 17))), ([1, 2, 3, 4], [1, 2, 3, 4])])
def test_sixteen_schedules_are_allowed(spatial):
    assert len(problem(*spatial).variants) == 16


@pytest.mark.parametrize("spatial", [(list(range(1, 18)),), ([1, 2, 3, 4], [1, 2, 3, 4, 5])])
def test_more_are_refused(spatial):
    with pytest.raises(td.ProblemError, match=r"must have at most 16 combinations$"):
        problem(*spatial)
