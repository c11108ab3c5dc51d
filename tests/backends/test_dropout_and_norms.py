"""Modules that draw random numbers or count over rows: recomputation, evaluation, and what the docs say of them."""

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import portable_fsdp as pf
from portable_fsdp.backends.contract import dropouts
from portable_fsdp.backends.native.units import local_part
from portable_fsdp.backends.torch_xla.runtime import require_no_dropout
from portable_fsdp.config.schema import Train
from portable_fsdp.data.packing import Rows
from portable_fsdp.models.factory import open_factory
from portable_fsdp.models.tasks import Task
from portable_fsdp.runtime.errors import BackendError, ConfigError
from portable_fsdp.train.evaluate import Evaluator


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.dropout = nn.Linear(8, 8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.dropout(self.linear(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        for block in self.blocks:
            x = block(x)
        return x


def squares(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    y = model(batch["x"])
    return y.square().sum(), y.new_ones(len(y)).sum()


def x_of(seed: int) -> Tensor:
    return torch.randn(16, 8, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_recomputed_layers_draw_the_same_numbers_again(checkpointing: str) -> None:
    """Against the gradient by hand, with the same masks."""
    with pf.open_backend(pf.make_config(), device="cpu", backend="native") as engine:
        config = pf.make_config(memory={"gradient_checkpointing": checkpointing})
        model, optimizer = pf.shard(Net, config, engine)
        step = pf.train_step(engine, model, optimizer, accumulation=1, max_grad_norm=None, task=squares)
        torch.manual_seed(3)
        actual = engine.fetch(step([{"x": x_of(0)}], 1e-3)).result()
    plain = Net()
    _, fill = open_factory("test", Net, 0, torch.float32)
    with torch.no_grad():
        for name, weight in plain.named_parameters():
            weight.copy_(fill(name, tuple(slice(0, size) for size in weight.shape)))
    torch.manual_seed(3)
    total, count = squares(plain, {"x": x_of(0)})
    (total / count).backward()
    norm = torch.cat([p.grad.flatten() for p in plain.parameters() if p.grad is not None]).norm()
    torch.testing.assert_close(actual["loss"], (total / count).detach())
    torch.testing.assert_close(actual["grad_norm"], norm)


def test_xla_refuses_to_recompute_dropout() -> None:
    require_no_dropout(Net(), ["norm"])
    with pytest.raises(BackendError, match=r"expected layers without dropout, found it in blocks\.1: dropout"):
        require_no_dropout(Net(), ["norm", "blocks.1"])


def test_numbers_called_dropout_count_and_zeros_do_not() -> None:
    assert dropouts(nn.MultiheadAttention(8, 2, dropout=0.1)) == ["MultiheadAttention"]
    assert dropouts(nn.Sequential(nn.Dropout(0.0), nn.Linear(1, 1), nn.AlphaDropout(0.2))) == ["2"]


def test_an_evaluation_is_plain_pytorchs_eval_and_changes_nothing() -> None:
    train = Train.model_validate({"steps": 1, "global_batch": 8, "micro_batch": 8})
    with pf.open_backend(pf.make_config(), device="cpu", backend="native") as engine:
        model, _ = pf.shard(Net, pf.make_config(), engine)
        model.get_submodule("blocks.1").eval()  # as its author left it
        evaluate = Evaluator(engine, model, OwnRows(), train, Task("squares", squares, counts_labels=False))
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        evaluation = evaluate()
        assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
        assert [model.get_submodule(f"blocks.{number}").training for number in range(3)] == [True, False, True]
        weights = {name: local_part(weight).clone() for name, weight in model.named_parameters()}
    plain = Net().eval()
    plain.load_state_dict({**weights, **before})
    with torch.no_grad():
        total, count = squares(plain, {"x": x_of(1)})
    assert evaluation is not None
    assert evaluation.loss == pytest.approx((total / count).item(), rel=1e-6)


class OwnRows(Rows):
    """Sixteen rows of eight numbers."""

    def __len__(self) -> int:
        return 16

    def rows(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        return {"x": x_of(1)[torch.from_numpy(indices)]}

    def order(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return positions

    def fingerprint(self) -> str:
        return "own"


def test_a_step_takes_as_many_micro_batches_as_it_was_made_for() -> None:
    with pf.open_backend(pf.make_config(), device="cpu", backend="native") as engine:
        model, optimizer = pf.shard(Net, pf.make_config(), engine)
        step = pf.train_step(engine, model, optimizer, accumulation=2, max_grad_norm=None, task=squares)
        with pytest.raises(ValueError, match="expected 2 micro batches"):
            step([{"x": x_of(0)}], 1e-3)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: nn.Linear(2, int("two")), "ValueError"),
        (nn.Linear(2, 2), "found a Linear"),
        (lambda: nn.LazyLinear(2), "of a lazy module"),
    ],
)
def test_what_makes_no_module_is_refused(make: Any, words: str) -> None:
    config = pf.make_config()
    with pf.open_backend(config, device="cpu", backend="native") as engine, pytest.raises(ConfigError, match=words):
        pf.shard(make, config, engine)
