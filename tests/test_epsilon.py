from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from certtool.epsilon import Epsilon
from certtool.errors import InputError


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8/255", Fraction(8, 255)),
        ("0.1", Fraction(1, 10)),
        ("1e-3", Fraction(1, 1000)),
        (" 2 / 255 ", Fraction(2, 255)),
        ("0", Fraction(0)),
        (".5", Fraction(1, 2)),
        ("1", Fraction(1)),
        ("0.5/255", Fraction(1, 510)),
    ],
)
def test_exact(text: str, value: Fraction) -> None:
    assert Epsilon.parse(text).value == value


def test_keeps_its_spelling() -> None:
    assert str(Epsilon.parse(" 8 / 255 ")) == "8/255"
    assert float(Epsilon.parse("8/255")) == 8 / 255


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("8", "larger than 1", "did you mean `8/255`?"),
        ("-0.1", "negative", "8/255"),
        ("nan", "not a number", "8/255"),
        ("inf", "not a number", "8/255"),
        ("1/0", "divides by zero", "8/255"),
        ("", "not a number", "8/255"),
        ("1e-999999999", "not a number", "8/255"),
        ("3/2", "larger than 1", None),
    ],
)
def test_refuses(text: str, message: str, hint: str | None) -> None:
    with pytest.raises(InputError, match=message) as caught:
        Epsilon.parse(text)
    assert hint is None or hint in str(caught.value.problems[0].hint)


@given(st.integers(0, 255), st.integers(255, 10**6))
def test_every_fraction_survives(numerator: int, denominator: int) -> None:
    epsilon = Epsilon.parse(f"{numerator}/{denominator}")
    assert epsilon.value == Fraction(numerator, denominator)
    assert Epsilon.parse(str(epsilon)) == epsilon
