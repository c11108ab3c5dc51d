"""Which parameters decay, and that each optimizer does what its formula says."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from portable_fsdp.config.schema import Optim
from portable_fsdp.optim.optimizer import (
    SGD,
    learning_rate_shares,
    make_optimizer,
    parameter_groups,
    set_learning_rate,
)
from portable_fsdp.runtime.errors import ConfigError

SHAPES = {
    "embed.weight": (10, 4),
    "norm.weight": (4,),
    "q.weight": (4, 4),
    "q.bias": (4,),
    "scale": (),
    "experts": (2, 3, 4),
}


def parameters() -> tuple[nn.Parameter, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return nn.Parameter(torch.randn(3, 4, generator=generator)), nn.Parameter(torch.randn(4, generator=generator))


def groups(matrix: Tensor, vector: Tensor, weight_decay: float) -> list[dict[str, Any]]:
    return [{"params": [matrix], "weight_decay": weight_decay}, {"params": [vector], "weight_decay": 0.0}]


def take_steps(optimizer: torch.optim.Optimizer, count: int = 4) -> list[Tensor]:
    """Steps with gradients that depend on the step alone; returns the parameters."""
    owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    generator = torch.Generator().manual_seed(1)
    for _ in range(count):
        for parameter in owned:
            parameter.grad = torch.randn(parameter.shape, generator=generator)
        optimizer.step()
    return [parameter.detach().clone() for parameter in owned]


def group(params: list[str], weight_decay: float, lr_share: float = 1.0) -> dict[str, Any]:
    return {"params": params, "weight_decay": weight_decay, "lr_share": lr_share}


def test_matrices_decay_and_vectors_do_not() -> None:
    assert parameter_groups(SHAPES, Optim(weight_decay=0.3)) == [
        group(["embed.weight", "q.weight", "experts"], 0.3),
        group(["norm.weight", "q.bias", "scale"], 0.0),
    ]


def test_no_group_is_empty() -> None:
    assert parameter_groups({"w": (2, 2)}, Optim()) == [group(["w"], 0.1)]
    assert parameter_groups({"b": (2,)}, Optim()) == [group(["b"], 0.0)]
    assert parameter_groups({}, Optim()) == []


def grouped(*own: dict[str, Any]) -> list[dict[str, Any]]:
    return parameter_groups(SHAPES, Optim.model_validate({"lr": 0.1, "weight_decay": 0.3, "groups": own}))


def test_the_first_group_that_matches_counts_and_null_means_as_without() -> None:
    assert grouped({"match": "q", "lr": 0.05}, {"match": "*s", "lr": 0.2}) == [
        group(["embed.weight"], 0.3),
        group(["norm.weight", "scale"], 0.0),
        group(["q.weight"], 0.3, 0.5),
        group(["q.bias"], 0.0, 0.5),
        group(["experts"], 0.3, 2.0),
    ]


def test_a_groups_decay_is_that_of_all_its_tensors() -> None:
    assert grouped({"match": "norm", "weight_decay": 0.7}, {"match": "embed", "weight_decay": 0.0}) == [
        group(["embed.weight", "q.bias", "scale"], 0.0),
        group(["norm.weight"], 0.7),
        group(["q.weight", "experts"], 0.3),
    ]


def test_a_group_that_takes_nothing_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"optim\.groups\[1\]\.match: .*'lm_head', which names nothing"):
        grouped({"match": "q", "lr": 0.2}, {"match": "lm_head", "lr": 0.2})
    with pytest.raises(ConfigError, match=r"optim\.groups\[1\]\.match: .*no earlier group has taken, found '\*bias'"):
        grouped({"match": "q", "lr": 0.2}, {"match": "*bias", "lr": 0.2})


@pytest.mark.parametrize("capturable", [False, True])
def test_each_group_takes_its_share_of_the_learning_rate(capturable: bool) -> None:
    matrix, vector = parameters()
    shares = [{"params": [matrix], "lr_share": 1.0}, {"params": [vector], "lr_share": 0.25}]
    optimizer = make_optimizer(Optim(lr=0.5, name="sgd"))(shares, capturable)
    assert learning_rate_shares(optimizer) == [0.25, 1.0]
    placed = {share: torch.tensor(0.5 * share) for share in learning_rate_shares(optimizer)}
    before = matrix.detach().clone(), vector.detach().clone()
    set_learning_rate(optimizer, 0.5, placed)
    if capturable:
        assert [group["lr"] is placed[group["lr_share"]] for group in optimizer.param_groups] == [True, True]
    matrix.grad, vector.grad = torch.ones_like(matrix), torch.ones_like(vector)
    optimizer.step()
    torch.testing.assert_close(matrix.detach(), before[0] - 0.5)
    torch.testing.assert_close(vector.detach(), before[1] - 0.125)


def test_adamw_is_torchs_with_the_configs_numbers() -> None:
    config = Optim(lr=0.01, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.5)
    ours = take_steps(make_optimizer(config)(groups(*parameters(), 0.5), False))
    by_hand = torch.optim.AdamW(groups(*parameters(), 0.5), lr=0.01, betas=(0.8, 0.9), eps=1e-3)
    for found, expected in zip(ours, take_steps(by_hand), strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_sgd_without_decay_is_torchs(momentum: float) -> None:
    make = make_optimizer(Optim(name="sgd", lr=0.1, momentum=momentum))
    found = take_steps(make(groups(*parameters(), 0.0), False))
    expected = take_steps(torch.optim.SGD(groups(*parameters(), 0.0), lr=0.1, momentum=momentum))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


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


def test_sgd_keeps_momentum_where_there_is_some_and_skips_what_has_no_gradient() -> None:
    matrix, vector = parameters()
    optimizer = SGD(groups(matrix, vector, 0.1), lr=0.1, momentum=0.9)
    matrix.grad = torch.ones_like(matrix)
    before = vector.detach().clone()
    optimizer.step()
    assert {name: tensor.shape for name, tensor in optimizer.state[matrix].items()} == {"momentum_buffer": (3, 4)}
    assert vector not in optimizer.state
    assert torch.equal(vector.detach(), before)
    plain = SGD(groups(matrix, vector, 0.1), lr=0.1, momentum=0.0)
    plain.step()
    assert not plain.state


def test_a_learning_rate_on_the_device_gives_the_same_sgd() -> None:
    make = make_optimizer(Optim(name="sgd", lr=0.1, momentum=0.9))
    found = take_steps(make(groups(*parameters(), 0.5), True))
    expected = take_steps(make(groups(*parameters(), 0.5), False))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_learning_rate_of_a_compiled_step_is_a_tensor_that_it_takes_as_input(name: str) -> None:
    optimizer = make_optimizer(Optim.model_validate({"name": name, "lr": 0.25}))(groups(*parameters(), 0.1), True)
    rates = [group["lr"] for group in optimizer.param_groups]
    assert all(rate.dtype == torch.float32 and rate.shape == () and float(rate) == 0.25 for rate in rates)
    placed = torch.tensor(0.125)
    set_learning_rate(optimizer, 0.125, {1.0: placed})
    assert all(group["lr"] is placed for group in optimizer.param_groups)
    assert all(group.get("capturable", True) for group in optimizer.param_groups)


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_the_learning_rate_of_an_eager_step_is_a_number(name: str) -> None:
    optimizer = make_optimizer(Optim.model_validate({"name": name, "lr": 0.25}))(groups(*parameters(), 0.1), False)
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25]
    set_learning_rate(optimizer, 0.125, {1.0: torch.tensor(0.5)})
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_parameters_without_memory_give_an_optimizer_too(name: str) -> None:
    """Backends learn the optimizer's state from a step on the meta device."""
    matrix = nn.Parameter(torch.empty(3, 4, device="meta"))
    config = Optim.model_validate({"name": name, "momentum": 0.9})
    optimizer = make_optimizer(config)([{"params": [matrix], "weight_decay": 0.1}], False)
    matrix.grad = torch.zeros_like(matrix)
    optimizer.step()
    shapes = {key: tuple(value.shape) for key, value in optimizer.state[matrix].items()}
    adamw: dict[str, tuple[int, ...]] = {"step": (), "exp_avg": (3, 4), "exp_avg_sq": (3, 4)}
    assert shapes == ({"momentum_buffer": (3, 4)} if name == "sgd" else adamw)


def test_betas_out_of_range_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"optim\.betas: .* found \[0\.9, 1\.0\]"):
        make_optimizer(Optim(betas=(0.9, 1.0)))
