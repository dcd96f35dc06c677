"""What the engine makes of other people's networks: names, rules of their own, and refusals that say why."""

import pytest
import torch
from torch import Tensor, nn

import certtool
from certtool.bounds import Interval, ball, graph_of, propagate
from certtool.bounds.rules import RULES
from certtool.errors import InputError


class Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x)
        return result


def test_an_op_without_a_rule_names_itself_and_its_path() -> None:
    with pytest.raises(InputError, match=r"`inner.1`: there is no interval rule for Softplus") as caught:
        graph_of(Wrapper(nn.Sequential(nn.Linear(2, 2), nn.Softplus())))
    assert "@certtool.bounds.rule(nn.Softplus)" in str(caught.value.problems[0].hint)


def test_a_function_without_a_rule_names_itself() -> None:
    class Odd(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sin(x)

    with pytest.raises(InputError, match="there is no interval rule for sin"):
        propagate(graph_of(Odd()), ball(torch.rand(1, 2), 0.1))


def test_a_users_rule() -> None:
    class Cube(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x**3

    @certtool.bounds.rule(Cube)
    def cube(layer: Cube, z: Interval) -> Interval:
        return Interval.from_bounds(layer(z.lower), layer(z.upper))

    try:
        model, x = nn.Sequential(nn.Linear(3, 4), Cube()).double(), torch.rand(2, 3, dtype=torch.float64)
        output = propagate(graph_of(model), ball(x, 0.1)).output
        assert (output.lower <= model(x)).all()
        assert (model(x) <= output.upper).all()
    finally:
        del RULES[Cube]


def test_a_subclass_inherits_a_rule_only_with_its_forward() -> None:
    class Named(nn.ReLU):
        pass

    class Leaky(nn.ReLU):
        def forward(self, x: Tensor) -> Tensor:
            return torch.sigmoid(x)

    x = torch.randn(2, 3)
    assert torch.equal(propagate(graph_of(nn.Sequential(Named())), Interval(x, x * 0)).output.center, x.relu())
    with pytest.raises(InputError, match="sigmoid"):
        propagate(graph_of(nn.Sequential(Leaky())), ball(x, 0.1))


def test_hooks_are_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].register_forward_hook(lambda module, args, output: output * 2)
    with pytest.raises(InputError, match=r"`0` .Linear. has forward hooks"):
        graph_of(model)


def test_control_flow_is_refused() -> None:
    class Branch(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x if x.sum() > 0 else -x

    with pytest.raises(InputError, match="cannot be traced"):
        graph_of(Branch())


def test_dropout_in_training_is_refused() -> None:
    model = nn.Sequential(nn.Dropout(0.5), nn.Linear(2, 2))
    with pytest.raises(InputError, match="Dropout draws at random"):
        propagate(graph_of(model.train()), ball(torch.rand(1, 2), 0.1))
    propagate(graph_of(model.eval()), ball(torch.rand(1, 2), 0.1))


def test_products_of_perturbed_tensors_are_refused() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * x

    with pytest.raises(InputError, match="product of two perturbed tensors"):
        propagate(graph_of(Square()), ball(torch.rand(1, 2), 0.1))


def test_batch_norm_without_running_statistics_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2, track_running_stats=False)).eval()
    with pytest.raises(InputError, match="keeps no running statistics"):
        propagate(graph_of(model), ball(torch.rand(2, 2), 0.1))


def test_a_network_of_one_layer_and_a_shared_layer() -> None:
    x = torch.rand(2, 3)
    layer = nn.Linear(3, 3)
    assert torch.allclose(propagate(graph_of(layer), Interval(x, x * 0)).output.center, layer(x))
    relu = nn.ReLU()
    shared = nn.Sequential(layer, relu, layer, relu)
    graph = graph_of(shared)
    assert [step.name for step in graph.relus] == ["1", "1#2"] or len({step.name for step in graph.relus}) == 2
    assert torch.allclose(propagate(graph, Interval(x, x * 0)).output.center, shared(x))


def test_in_place_layers_do_not_spoil_the_clean_pass() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(72, 3))
    x = torch.rand(4, 1, 8, 8)
    bounds = propagate(graph_of(model.train()), ball(x, 0.01), clean=x)
    assert bounds.clean is not None
    bounds.clean.sum().backward()
    assert torch.allclose(bounds.clean, model.train()(x), atol=1e-5)


def test_only_what_is_asked_for_is_kept() -> None:
    model = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))
    bounds = propagate(graph_of(model), ball(torch.rand(1, 2), 0.1), keep={"0"})
    assert set(bounds.kept) == {"0"}


# --- networks whose bounds would be about another function -----------------------------------------------------------


def holds(model: nn.Module, x: Tensor, eps: float = 0.2) -> None:
    """Sampled points stay inside the bounds."""
    output = propagate(graph_of(model.double().eval()), ball(x.double(), eps)).output
    for _ in range(50):
        point = (x + (torch.rand_like(x) * 2 - 1) * eps).clamp(0, 1).double()
        value = model(point)
        assert (value >= output.lower - 1e-9).all()
        assert (value <= output.upper + 1e-9).all()


def test_a_module_and_a_function_of_the_same_name_are_two_steps() -> None:
    class Same(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.a, self.b, self.c, self.relu = nn.Linear(3, 4), nn.Linear(4, 4), nn.Linear(4, 2), nn.ReLU()
            self.x = nn.Identity()

        def forward(self, x: Tensor) -> Tensor:
            h = torch.relu(self.a(self.x(x)))
            g = self.relu(self.b(h))
            result: Tensor = self.c(g + h - 0.25)
            return result

    graph = graph_of(Same())
    assert len({step.name for step in graph.steps}) == len(graph.steps)
    holds(Same(), torch.rand(4, 3))


def test_a_batch_norm_with_a_forward_of_its_own_is_not_batch_norm() -> None:
    class NormAct(nn.BatchNorm1d):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(super().forward(x))

    with pytest.raises(InputError):
        propagate(graph_of(nn.Sequential(nn.Linear(2, 3), NormAct(3)).eval()), ball(torch.rand(2, 2), 0.1))


class _InPlace(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.act = kind, nn.ReLU(inplace=True)

    def forward(self, v: Tensor) -> Tensor:
        y = v - 0.6
        if self.kind == "relu":
            z = self.act(y)
            return v - y + z * 0
        if self.kind == "method":
            z = y.view(y.size(0), -1)
            z.add_(1)
            return y
        self.act(y)
        return y


@pytest.mark.parametrize("kind", ["relu", "method", "unused"])
def test_in_place_operations_that_other_names_see_are_refused(kind: str) -> None:
    with pytest.raises(InputError, match="in place"):
        graph_of(_InPlace(kind))


def test_in_place_operations_that_nobody_else_sees_are_fine() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.act = nn.Linear(3, 3), nn.ReLU(inplace=True)

        def forward(self, x: Tensor) -> Tensor:
            out = self.a(x)
            out += x
            result: Tensor = self.act(out)
            return result

    holds(Block(), torch.rand(4, 3))


@pytest.mark.parametrize("name", ["data", "T", "real"])
def test_attributes_of_a_perturbed_tensor_are_not_constants(name: str) -> None:
    class Leak(nn.Module):
        def forward(self, v: Tensor) -> Tensor:
            return v * 0.0 + getattr(v, name)

    with pytest.raises(InputError, match="no interval rule for getattr"):
        propagate(graph_of(Leak()), ball(torch.rand(3, 3), 0.1))


def test_what_is_called_must_be_what_is_traced() -> None:
    replaced = nn.Sequential(nn.Linear(2, 2))
    replaced[0].forward = lambda x: x  # type: ignore[method-assign]
    with pytest.raises(InputError, match="replaced on the instance"):
        graph_of(replaced)
    hooked = nn.Sequential(nn.Linear(2, 2))
    hooked.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
    with pytest.raises(InputError, match="forward hooks"):
        graph_of(hooked)

    class Twice(nn.Conv2d):
        def _conv_forward(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            return 2 * super()._conv_forward(x, weight, bias)

    with pytest.raises(InputError):
        propagate(graph_of(nn.Sequential(Twice(1, 1, 1))), ball(torch.rand(1, 1, 2, 2), 0.1))
