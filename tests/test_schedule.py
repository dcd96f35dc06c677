import itertools

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from certtool import recipe
from certtool.training.schedule import EpsSchedule, Schedule

MNIST = EpsSchedule(target=0.4, start=1, length=20, steps_per_epoch=235)
CIFAR = EpsSchedule(target=8 / 255, start=2, length=80, steps_per_epoch=391)
# Values of the method's published scheduler.
PUBLISHED = [
    (MNIST, 100, 1.6142291016406762e-06),
    (MNIST, 235, 4.923076923076923e-05),
    (MNIST, 1175, 0.030769230769230767),
    (MNIST, 2350, 0.15384615384615385),
    (MNIST, 4700, 0.4),
    (CIFAR, 391, 0.0),
    (CIFAR, 782, 1.5082956259426848e-08),
    (CIFAR, 8211, 0.0024132730015082957),
    (CIFAR, 15640, 0.011583710407239819),
    (CIFAR, 31671, 8 / 255),
]


@pytest.mark.parametrize(("schedule", "step", "eps"), PUBLISHED)
def test_published_values(schedule: EpsSchedule, step: int, eps: float) -> None:
    assert schedule.eps(step) == pytest.approx(eps, abs=1e-12, rel=1e-12)


@given(st.integers(1, 5), st.integers(1, 30), st.integers(1, 50))
@example(1, 1, 2)
@example(1, 1, 3)  # a warmup too short for a quartic
def test_grows_from_zero_to_target(start: int, length: int, steps: int) -> None:
    schedule = EpsSchedule(0.1, start, length, steps)
    values = [schedule.eps(step) for step in range((start + length + 1) * steps)]
    assert values[: (start - 1) * steps + 1] == [0.0] * ((start - 1) * steps + 1)
    assert values[(start + length - 1) * steps :] == [0.1] * (2 * steps)
    assert all(a <= b for a, b in itertools.pairwise(values))


def test_learning_rate_falls_after_its_milestones() -> None:
    schedule = Schedule(recipe.load("tiny_cnn7"), steps_per_epoch=10)
    assert schedule.lr(75 * 10 - 1) == 1e-3
    assert schedule.lr(75 * 10) == pytest.approx(2e-4)
    assert schedule.lr(90 * 10) == pytest.approx(4e-5)


def test_lambda_falls_to_zero_with_eps() -> None:
    schedule = Schedule(recipe.load("tiny_cnn7"), steps_per_epoch=10)
    assert schedule.weight(0) == 0.5
    assert schedule.weight(41 * 10) == 0.0
    middle = 20 * 10
    assert schedule.weight(middle) == pytest.approx(0.5 * (1 - schedule.eps(middle) / 0.1))


def test_vanilla_and_natural_have_no_lambda() -> None:
    vanilla = Schedule(recipe.load("tiny_cnn7", ["train.regularizers.terms=[]"]), 10)
    natural = Schedule(recipe.load("tiny_cnn7", ["train.method=natural"]), 10)
    assert vanilla.weight(0) == natural.weight(0) == 0.0
    assert natural.eps(500) == 0.0
    assert natural.phase(500) == "natural"
    assert [vanilla.phase(step) for step in (0, 100, 900)] == ["start", "warmup", "final"]


def test_train_eps_is_the_target() -> None:
    schedule = Schedule(recipe.load("tiny_cnn7", ["threat.train_eps=0.2"]), 10)
    assert schedule.eps(10**6) == 0.2
