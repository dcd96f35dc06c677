"""The radius of a perturbation: exact, in pixel units of [0, 1], and spelled as the user spelled it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from certtool.errors import InputError
from certtool.plain_text import plain

_NUMBER = r"\d{1,40}(?:\.\d{0,40})?(?:[eE][+-]?\d{1,3})?|\.\d{1,40}(?:[eE][+-]?\d{1,3})?"
_SPELLING = re.compile(rf"({_NUMBER})(?:\s*/\s*({_NUMBER}))?")


@dataclass(frozen=True)
class Epsilon:
    """An l-infinity radius. `8/255` stays the fraction 8/255 from the recipe to the certificate."""

    value: Fraction
    text: str

    @classmethod
    def parse(cls, text: str) -> Epsilon:
        """Read `8/255`, `0.1` or `1e-3`; anything that cannot be a radius in [0, 1] is an InputError."""
        spelling = text.strip()
        match = _SPELLING.fullmatch(spelling)
        if match is None:
            reason = "is negative" if spelling.startswith("-") else "is not a number"
            raise InputError(
                f"eps `{plain(spelling)}` {reason}", "write it as `8/255` or `0.03`, in pixel units of [0, 1]"
            )
        numerator, denominator = Fraction(match[1]), Fraction(match[2] or 1)
        if denominator == 0:
            raise InputError(f"eps `{spelling}` divides by zero", "write it as `8/255` or `0.03`")
        value = numerator / denominator
        if value > 1:
            hint = f"did you mean `{spelling}/255`?" if match[2] is None and value <= 255 else None
            raise InputError(f"eps `{spelling}` is larger than 1; pixels lie in [0, 1]", hint)
        return cls(value, re.sub(r"\s", "", spelling))

    def __float__(self) -> float:
        return float(self.value)

    def __str__(self) -> str:
        return self.text
