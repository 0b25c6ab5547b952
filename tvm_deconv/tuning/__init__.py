"""The search for schedules."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm_deconv.tuning.session import Trial, Tuned, tune

__all__ = ["Trial", "Tuned", "tune"]


def __getattr__(name: str) -> Any:
    # A search imports TVM, which takes seconds. The processes that run candidates import this package without it.
    if name in __all__:
        from tvm_deconv.tuning import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
