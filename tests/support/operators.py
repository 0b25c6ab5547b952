"""What tests of operators in C and C++ share: layers whose functions are Python's, and references that are counted."""

import ctypes

from tvm_deconv.runtime import facts
from tvm_deconv.runtime.layer import native


def intercept(monkeypatch, function):
    """Let operators of new models call `function(layer, deconv, *arguments)`; `deconv()` is what they would call."""
    import tvm_ffi

    kept, real = [], facts.facts

    def made_of(layer, limit):
        made, (deconv, _) = real(layer, limit), native(layer)
        kept.append(tvm_ffi.convert_func(lambda *given: function(layer, lambda: deconv(*given), *given)))
        made.deconv = kept[-1].__chandle__()
        return made

    monkeypatch.setattr(facts, "facts", made_of)


def use_count(constant):
    """Return the strong references to an object of tvm_ffi: the low half of its first word."""
    return ctypes.c_uint32.from_address(constant.__chandle__()).value
