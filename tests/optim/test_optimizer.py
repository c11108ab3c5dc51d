"""Which parameters decay, that each optimizer does what its formula says, and the learning rate of each step."""

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from portable_fsdp.config.schema import Optim
from portable_fsdp.optim.counting import set_step_numbers, step_numbers
from portable_fsdp.optim.optimizer import check_schedule, learning_rate, make_optimizer, parameter_groups
from portable_fsdp.optim.own import AdamW
from portable_fsdp.runtime.errors import ConfigError

SHAPES = {
    **{"embed.weight": (10, 4), "norm.weight": (4,), "q.weight": (4, 4), "q.bias": (4,)},
    **{"scale": (), "experts": (2, 3, 4)},
}
# A large eps and decay: their places in the formula then show.
ADAMW = Optim(lr=0.01, betas=(0.8, 0.9), eps=0.1, weight_decay=0.5)
MOMENTS = ("exp_avg", "exp_avg_sq")


def parameters() -> tuple[nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(3, 4, generator=generator)), nn.Parameter(torch.randn(4, generator=generator))


def groups(matrix: Tensor, vector: Tensor, weight_decay: float) -> list[dict[str, Any]]:
    return [{"params": [matrix], "weight_decay": weight_decay}, {"params": [vector], "weight_decay": 0.0}]


def take_steps(optimizer: torch.optim.Optimizer, count: int = 4, lr: float | None = None) -> list[Tensor]:
    """Steps with gradients that depend on the step alone; returns the parameters.

    With an lr, the numbers of each step come as the loop brings them, lr growing with the step.
    """
    owned = in_groups(optimizer)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, count + 1):
        for parameter in owned:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        if lr is not None:
            bring_numbers(optimizer, lr * step)
        optimizer.step()
    return [parameter.detach().clone() for parameter in owned]


def in_groups(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def bring_numbers(optimizer: torch.optim.Optimizer, lr: float) -> dict[str, Tensor]:
    numbers = step_numbers(optimizer, lr)
    placed = {name: torch.tensor(number) for name, number in numbers.items()}
    set_step_numbers(optimizer, numbers, placed)
    return placed


def group(params: list[str], weight_decay: float, lr_share: float = 1.0) -> dict[str, Any]:
    return {"params": params, "weight_decay": weight_decay, "lr_share": lr_share}


def test_matrices_decay_and_vectors_do_not() -> None:
    assert parameter_groups(SHAPES, Optim(weight_decay=0.3)) == [
        group(["embed.weight", "q.weight", "experts"], 0.3),
        group(["norm.weight", "q.bias", "scale"], 0.0),
    ]
    assert parameter_groups({"w": (2, 2)}, Optim()) == [group(["w"], 0.1)]  # no group is empty
    assert parameter_groups({"b": (2,)}, Optim()) == [group(["b"], 0.0)]
    assert parameter_groups({}, Optim()) == []


def grouped(*own: dict[str, Any]) -> list[dict[str, Any]]:
    return parameter_groups(SHAPES, Optim.model_validate({"lr": 0.1, "weight_decay": 0.3, "groups": own}))


def test_the_first_group_that_matches_counts_and_one_that_takes_nothing_is_refused() -> None:
    assert grouped({"match": "q", "lr": 0.05}, {"match": "*s", "lr": 0.2}) == [
        group(["embed.weight"], 0.3),
        group(["norm.weight", "scale"], 0.0),
        group(["q.weight"], 0.3, 0.5),
        group(["q.bias"], 0.0, 0.5),
        group(["experts"], 0.3, 2.0),
    ]
    # A group's decay is that of all its tensors.
    assert grouped({"match": "norm", "weight_decay": 0.7}, {"match": "embed", "weight_decay": 0.0}) == [
        group(["embed.weight", "q.bias", "scale"], 0.0),
        group(["norm.weight"], 0.7),
        group(["q.weight", "experts"], 0.3),
    ]
    with pytest.raises(ConfigError, match=r"optim\.groups\[1\]\.match: .*'lm_head' matches nothing"):
        grouped({"match": "q", "lr": 0.2}, {"match": "lm_head", "lr": 0.2})
    with pytest.raises(ConfigError, match=r"optim\.groups\[1\]\.match: '\*bias' matches only parameters of earlier"):
        grouped({"match": "q", "lr": 0.2}, {"match": "*bias", "lr": 0.2})


def test_a_group_names_a_tied_weight_by_any_of_its_names() -> None:
    ties = {"head.weight": "embed.weight"}
    own = Optim.model_validate({"lr": 0.1, "groups": [{"match": "head", "lr": 0.2}]})
    shapes = {"embed.weight": (8, 4), "q.weight": (4, 4)}
    assert parameter_groups(shapes, own, ties=ties) == [group(["embed.weight"], 0.1, 2.0), group(["q.weight"], 0.1)]
    with pytest.raises(ConfigError, match=r"match: 'head' matches only frozen parameters .*: embed\.weight\."):
        parameter_groups({"q.weight": (4, 4)}, own, ties=ties, frozen=["embed.weight"])


def test_eager_optimizers_are_torchs_with_the_configs_numbers() -> None:
    config = Optim(lr=0.01, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5)
    adamw = take_steps(make_optimizer(config)(groups(*parameters(), 0.5), False))
    by_hand = torch.optim.AdamW(groups(*parameters(), 0.5), lr=0.01, betas=(0.8, 0.9), eps=1e-3)
    torch.testing.assert_close(adamw, take_steps(by_hand), rtol=0, atol=0)
    for momentum in (0.0, 0.9):
        make = make_optimizer(Optim(name="sgd", lr=0.1, momentum=momentum))
        sgd = take_steps(make(groups(*parameters(), 0.0), False))
        torchs = torch.optim.SGD(groups(*parameters(), 0.0), lr=0.1, momentum=momentum)
        torch.testing.assert_close(sgd, take_steps(torchs), rtol=1e-6, atol=1e-7)
        eager, compiled = (take_steps(make(groups(*parameters(), 0.5), is_compiled)) for is_compiled in (False, True))
        torch.testing.assert_close(compiled, eager, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgds_decay_is_decoupled_from_its_momentum(momentum: float) -> None:
    """With no gradient at all the matrix shrinks by 1 - lr * weight_decay a step, and the vector stays."""
    matrix, vector = parameters()
    before = matrix.detach().clone(), vector.detach().clone()
    optimizer = make_optimizer(Optim(name="sgd", lr=0.1, momentum=momentum))(groups(matrix, vector, 0.5), False)
    for _ in range(3):
        matrix.grad, vector.grad = torch.zeros_like(matrix), torch.zeros_like(vector)
        optimizer.step()
    torch.testing.assert_close(matrix.detach(), before[0] * 0.95**3)
    assert torch.equal(vector.detach(), before[1])


@pytest.mark.parametrize(
    ("momentum", "state"), [(0.9, {"momentum_buffer": (3, 4)}), (0.0, {}), (None, dict.fromkeys(MOMENTS, (3, 4)))]
)
def test_state_is_that_of_the_formula_and_what_has_no_gradient_is_left_alone(
    momentum: float | None, state: dict[str, tuple[int, ...]]
) -> None:
    """Momentum None: AdamW of a compiled step."""
    matrix, vector = parameters()
    config = ADAMW if momentum is None else Optim(name="sgd", lr=0.1, momentum=momentum)
    optimizer = make_optimizer(config)(groups(matrix, vector, 0.1), momentum is None)
    matrix.grad = torch.ones_like(matrix)
    before = vector.detach().clone()
    bring_numbers(optimizer, 0.1)
    optimizer.step()
    shapes = {name: tuple(tensor.shape) for name, tensor in optimizer.state.get(matrix, {}).items() if tensor.dim()}
    assert shapes == state
    assert vector not in optimizer.state
    assert torch.equal(vector.detach(), before)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adam", "adafactor", "lion"])
def test_the_numbers_of_a_compiled_step_are_tensors_that_it_takes_as_inputs(name: str) -> None:
    optimizer = make_optimizer(Optim.model_validate({"name": name, "lr": 0.25}))(groups(*parameters(), 0.1), True)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert all(rate.dtype == torch.float32 and rate.shape == () and float(rate) == 0.25 for rate in rates)
    for step in (1, 2):
        placed = bring_numbers(optimizer, 0.125 * step)
        assert all(group["lr"] is placed["lr * 1.0"] for group in optimizer.param_groups)
        assert len(placed) == 3, "the rate, the step's number, and how many steps were skipped"
        versions = {name: tensor._version for name, tensor in placed.items()}
        matrix, vector = in_groups(optimizer)
        matrix.grad, vector.grad = torch.ones_like(matrix), torch.ones_like(vector)
        optimizer.step()
        assert {name: tensor._version for name, tensor in placed.items()} == versions, "an input was written to"
    eager = make_optimizer(Optim.model_validate({"name": name, "lr": 0.25}))(groups(*parameters(), 0.1), False)
    assert [group["lr"] for group in eager.param_groups] == [0.25, 0.25], "a number"
    assert bring_numbers(eager, 0.125).keys() == {"lr * 1.0"}
    assert [group["lr"] for group in eager.param_groups] == [0.125, 0.125]


def shared() -> list[dict[str, Any]]:
    return [one | {"lr_share": share} for one, share in zip(groups(*parameters(), 0.5), (1.0, 0.25), strict=True)]


def by_torch() -> torch.optim.AdamW:
    return torch.optim.AdamW(shared(), lr=ADAMW.lr, betas=ADAMW.betas, eps=ADAMW.eps)


def assert_equal(ours: torch.optim.Optimizer, torchs: torch.optim.Optimizer) -> None:
    """Parameters and state: the same names, shapes, dtypes and devices, the same values but for rounding."""
    for actual, expected in zip(in_groups(ours), in_groups(torchs), strict=True):
        torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-7)
        torch.testing.assert_close(dict(ours.state[actual]), dict(torchs.state[expected]), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("compiled_first", [False, True])
def test_either_adamw_goes_on_from_the_others_state(compiled_first: bool) -> None:
    ours, torchs, uninterrupted = make_optimizer(ADAMW)(shared(), True), by_torch(), by_torch()
    assert isinstance(ours, AdamW)
    first, then = (ours, torchs) if compiled_first else (torchs, ours)
    take_steps(first, 3, lr=0.01)
    for saved, parameter in zip(in_groups(first), in_groups(then), strict=True):
        parameter.data = saved.detach().clone()
        then.state[parameter] = {name: value.clone() for name, value in first.state[saved].items()}
    take_steps(then, 5, lr=0.01)
    take_steps(uninterrupted, 3, lr=0.01)
    take_steps(uninterrupted, 5, lr=0.01)
    assert_equal(then, uninterrupted)
    assert {float(state["step"]) for state in then.state.values()} == {8.0}


def test_parameters_of_different_counts_are_corrected_by_their_own() -> None:
    """As where some parameters are new to training: the vector's moments are young, the matrix's old."""
    ours, torchs = make_optimizer(ADAMW)(shared(), True), by_torch()
    for optimizer in (ours, torchs):
        matrix, vector = in_groups(optimizer)
        for _ in range(6):
            matrix.grad, vector.grad = torch.ones_like(matrix), None
            bring_numbers(optimizer, 0.01)
            optimizer.step()
    assert len(step_numbers(ours, 0.01)) == 2 + 2 + 1  # shares, counts, and how many steps were skipped
    take_steps(ours, 5, lr=0.01)
    take_steps(torchs, 5, lr=0.01)
    assert_equal(ours, torchs)
    assert [float(state["step"]) for state in ours.state.values()] == [11.0, 5.0]


SCHEDULES = ["constant", "linear", "cosine", "wsd"]
LR = 0.5


def optim(schedule: str, **keys: Any) -> Optim:
    return Optim.model_validate({"lr": LR, "min_lr_ratio": 0.2, "schedule": schedule, **keys})


def rates(config: Optim, total: int) -> list[float]:
    return [learning_rate(config, step, total) for step in range(1, total + 1)]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_warmup_is_linear_and_ends_at_the_peak(schedule: str) -> None:
    actual = rates(optim(schedule, warmup_steps=4), 20)
    assert actual[:4] == pytest.approx([LR / 4, LR / 2, 3 * LR / 4, LR])
    assert max(actual) == actual[3]
    for warmup in (0, 1, 7, 19):  # the last step, and whatever follows, has the floor
        config, floor = optim(schedule, warmup_steps=warmup, decay_ratio=0.05), LR if schedule == "constant" else 0.1
        assert [learning_rate(config, step, 20) for step in (20, 25)] == pytest.approx([floor] * 2), warmup
    # It is never zero and never rises after warmup.
    assert all(later <= earlier for earlier, later in pairwise(rates(optim(schedule, warmup_steps=3), 50)[2:]))
    for warmup, total in ((0, 1), (1, 1), (3, 3), (0, 7), (6, 7)):
        config = optim(schedule, warmup_steps=warmup, min_lr_ratio=1e-6)
        assert all(learning_rate(config, step, total) > 0 for step in range(1, total + 3)), (warmup, total)


WSD = {**dict.fromkeys(range(5, 31), LR), **{30 + i: LR - 0.04 * i for i in range(1, 11)}}
SHAPES_OF_DECAY: list[tuple[Optim, int, dict[int, float]]] = [
    (optim("linear", warmup_steps=2), 10, {2 + i: LR - 0.05 * i for i in range(9)}),
    (optim("linear"), 10, {1: LR - 0.04}),  # without warmup the first step has begun to decay
    (optim("constant"), 10, {1: LR}),
    (optim("cosine", warmup_steps=10), 110, {60: 0.3, 35: 0.3 + 0.2 * math.sqrt(0.5), 85: 0.3 - 0.2 * math.sqrt(0.5)}),
    (optim("wsd", warmup_steps=5, decay_ratio=0.25), 40, WSD),
]


def test_the_decay_has_the_shape_of_its_schedule_and_a_share_of_warmup_is_rounded_up_as_by_the_trainer() -> None:
    for config, total, expected in SHAPES_OF_DECAY:
        assert {step: learning_rate(config, step, total) for step in expected} == pytest.approx(expected), config
    config = optim("linear", warmup_steps="5%")
    for steps in (1, 20, 21, 61):
        assert rates(config, steps) == rates(optim("linear", warmup_steps=math.ceil(0.05 * steps)), steps)
    check_schedule(config, 1)


def test_parts_that_do_not_fit_are_refused() -> None:
    check_schedule(optim("cosine", warmup_steps=10), 10)
    with pytest.raises(ConfigError, match=r"optim\.warmup_steps: expected at most 10 .*, found 11\.\n"):
        check_schedule(optim("cosine", warmup_steps=11), 10)
    check_schedule(optim("wsd", warmup_steps=8, decay_ratio=0.2), 10)
    check_schedule(optim("linear", warmup_steps=9, decay_ratio=0.2), 10)
    with pytest.raises(ConfigError, match=r"optim\.decay_ratio: .* 10 steps, found 9 steps of warmup and 2 of decay"):
        check_schedule(optim("wsd", warmup_steps=9, decay_ratio=0.2), 10)
