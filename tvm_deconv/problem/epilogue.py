"""The epilogue of a problem: bias, then activation."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass

import numpy as np

from tvm_deconv.errors import ProblemError
from tvm_deconv.problem.activations import ACTIVATIONS
from tvm_deconv.problem.checks import one_of, real

_TEXT = re.compile(r"(?P<bias>bias(?:\+(?=.)|$))?(?:(?P<name>[a-z_]+)(?:\((?P<numbers>[^()]+)\))?)?")


@dataclass(frozen=True, slots=True)
class Epilogue:
    """The work on an element after the last product: bias, then activation.

    `activation` is a name in `ACTIVATIONS`. `alpha`, `minimum` and `maximum` are parameters of some activations:
    `alpha` is the slope of leaky_relu and the scale of elu, the others are the bounds of clip. A parameter that is left
    out takes the activation's default; one that the activation does not have becomes None, so that equal epilogues
    compare equal. Raises ProblemError.
    """

    bias: bool = False
    activation: str = "none"
    alpha: float | None = None
    minimum: float | None = None
    maximum: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.bias, (bool, np.bool_)):
            raise ProblemError("bias", self.bias, "must be True or False: the values come with the filter, at bind")
        one_of("activation", self.activation, ACTIVATIONS)
        object.__setattr__(self, "bias", bool(self.bias))
        activation = ACTIVATIONS[self.activation]
        for name in (field.name for field in dataclasses.fields(self)[2:]):
            value = None
            if name in activation.parameters:
                given = getattr(self, name)
                value = real(name, activation.parameters[name] if given is None else given)
            object.__setattr__(self, name, value)
        activation.check(**self.parameters)

    @property
    def parameters(self) -> dict[str, float]:
        """The parameters of the activation by name, in the order in which functions take them."""
        return {name: getattr(self, name) for name in ACTIVATIONS[self.activation].parameters}

    def __str__(self) -> str:
        activation = self.activation
        if self.parameters:
            activation += f"({','.join(map(repr, self.parameters.values()))})"
        if self.bias:
            return "bias" if activation == "none" else f"bias+{activation}"
        return activation

    @staticmethod
    def parse(text: str) -> Epilogue:
        """Return the epilogue that prints as `text`, such as ``bias+leaky_relu(0.1)``; else raise ProblemError.

        Without the parentheses the numbers are the activation's defaults.
        """
        match = _TEXT.fullmatch(text) if isinstance(text, str) else None
        if match is None:
            raise ProblemError("epilogue", text, "must look like none, bias, relu or bias+leaky_relu(0.1)")
        try:
            numbers = [float(number) for number in (match["numbers"] or "").split(",") if number]
        except ValueError:
            raise ProblemError("epilogue", text, "what stands in parentheses must be numbers") from None
        activation = match["name"] or "none"
        names = [*ACTIVATIONS[activation].parameters] if activation in ACTIVATIONS else []
        if len(numbers) not in (0, len(names)):
            parameters = f"{' and '.join(names)}, or " if names else ""
            raise ProblemError("epilogue", text, f"{activation} takes {parameters}no numbers")
        epilogue = Epilogue(match["bias"] is not None, activation, **dict(zip(names, numbers, strict=False)))
        written = str(epilogue) if numbers else str(epilogue).partition("(")[0]
        if written != text:
            raise ProblemError("epilogue", text, f"must be written {written}")
        return epilogue
