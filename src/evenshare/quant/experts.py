"""The quantised weights of a mixture of experts, stacked."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from evenshare.quant.weight import QuantizedWeight


@dataclass(frozen=True, eq=False)
class ExpertWeights:
    """`num_experts` weights [n, k] of one form.

    weight: all of them, [num_experts * n, k]: expert e has the rows [e n, (e + 1) n). `concatenate` makes it of single ones, which
        have to agree in everything but their values, in the permutation too.

    Raises TypeError for a weight that is none, ValueError for rows that are no multiple of num_experts.
    """

    weight: QuantizedWeight
    num_experts: int

    def __post_init__(self) -> None:
        if not isinstance(self.weight, QuantizedWeight):
            raise TypeError(f"weight: got {type(self.weight).__name__}, want a QuantizedWeight")
        if self.num_experts < 1 or self.weight.n % self.num_experts:
            raise ValueError(
                f"num_experts: got {self.num_experts}, want at least 1 and a divisor of the {self.weight.n} rows of weight"
            )

    @property
    def n(self) -> int:
        """Rows of one expert's weight."""
        return self.weight.n // self.num_experts

    @property
    def k(self) -> int:
        return self.weight.k

    @cached_property
    def experts(self) -> tuple[QuantizedWeight, ...]:
        """Each expert's weight, sharing memory; what the CPU packs one by one."""
        return tuple(self.weight.narrow(i * self.n, (i + 1) * self.n) for i in range(self.num_experts))
