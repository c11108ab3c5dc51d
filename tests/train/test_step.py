"""The train step against a plain one, on the native engine with one device in this process."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.backends.contract import Backend, Batch, Metrics
from portable_fsdp.backends.open import open_backend
from portable_fsdp.config.schema import Config
from portable_fsdp.layout import full_region
from portable_fsdp.models.build import build_model
from portable_fsdp.models.loss import Loss
from portable_fsdp.models.weights import BuiltModel
from portable_fsdp.optim.counting import LossScaler
from portable_fsdp.optim.optimizer import make_optimizer, parameter_groups
from portable_fsdp.train.build import shard_policy
from portable_fsdp.train.step import TrainStep, train_step

VOCABULARY, SEQ_LEN, ROWS, LR = 67, 12, 4, 0.1
ARCHITECTURE: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 40},
    **{"num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1},
    **{"max_position_embeddings": SEQ_LEN, "bos_token_id": 1, "eos_token_id": 2},
}


@pytest.fixture(scope="module")
def backend() -> Iterator[Backend]:
    with open_backend(config(), device="cpu", backend="native") as opened:
        yield opened


class Run(NamedTuple):
    built: BuiltModel
    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    step: TrainStep


def config(model: dict[str, Any] | None = None, groups: list[dict[str, Any]] | None = None) -> Config:
    return Config.model_validate(
        {
            "model": model or {"architecture": ARCHITECTURE},
            "data": {"seq_len": SEQ_LEN},
            "train": {"steps": 10, "global_batch": ROWS, "micro_batch": ROWS},
            "optim": {"name": "sgd", "lr": LR, "weight_decay": 0.0, "groups": groups or []},
        }
    )


def run(
    backend: Backend,
    accumulation: int = 1,
    max_grad_norm: float | None = None,
    model: dict[str, Any] | None = None,
    groups: list[dict[str, Any]] | None = None,
    loss: Loss | None = None,
) -> Run:
    settings = config(model, groups)
    built = build_model(settings.model, seed=3, seq_len=SEQ_LEN, vocabulary=VOCABULARY, loss=loss)
    shapes = {fqn: tuple(weight.shape) for fqn, weight in built.model.named_parameters() if weight.requires_grad}
    sharded = backend.shard_model(built.model, shard_policy(settings, built.model), built.fill)
    groups = parameter_groups(shapes, settings.optim)
    optimizer = backend.build_optimizer(make_optimizer(settings.optim), groups, sharded)
    step = train_step(backend, sharded, optimizer, accumulation=accumulation, max_grad_norm=max_grad_norm)
    return Run(built, sharded, optimizer, step)


def batches(accumulation: int = 1) -> list[Batch]:
    """Rows that hold different numbers of counted labels, cut into micro batches as data/batches.py cuts them."""
    ids = torch.randint(0, VOCABULARY, (ROWS, SEQ_LEN + 1), generator=torch.Generator().manual_seed(4))
    labels = ids[:, 1:].clone()
    for row in range(ROWS):
        labels[row, : 3 * row] = -100
    size = ROWS // accumulation
    cuts = [slice(begin, begin + size) for begin in range(0, ROWS, size)]
    return [{"input_ids": ids[cut, :-1], "labels": labels[cut]} for cut in cuts]


def take(trained: Run, accumulation: int = 1, lr: float | Tensor = LR) -> Metrics:
    """A step of the run over the rows."""
    micro_batches = batches(accumulation)
    return trained.step(micro_batches, lr, counted(micro_batches))


def counted(micro_batches: list[Batch]) -> list[float]:
    """The control numbers of a step without votes."""
    return [float(sum((batch["labels"] != -100).sum().item() for batch in micro_batches))]


class Plain(NamedTuple):
    loss: float
    grad_norm: float
    weights: dict[str, Tensor]  # after one SGD update


def plain(built: BuiltModel, limit: float | None = None, label_smoothing: float = 0.0) -> Plain:
    """One step of plain PyTorch from the same weights on the same rows."""
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURE), attn_implementation="eager")
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            parameter.copy_(built.fill(fqn, full_region(parameter.shape)))
    (batch,) = batches()
    logits = model(input_ids=batch["input_ids"], use_cache=False).logits
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=label_smoothing)
    loss.backward()
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), limit or float("inf"))
    torch.optim.SGD(model.parameters(), lr=LR).step()
    return Plain(loss.item(), norm.item(), {name: p.detach() for name, p in model.named_parameters()})


def weights(model: torch.nn.Module) -> dict[str, Tensor]:
    """Copies of the whole parameters."""
    return {name: p.detach().clone() for name, p in model.named_parameters()}  # one device holds all of them


def fetched(backend: Backend, metrics: Metrics) -> dict[str, Any]:
    return {name: value.tolist() for name, value in backend.fetch(metrics).result().items()}


def smoothed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    flat, targets = logits.float().flatten(0, 1), labels.flatten()
    return F.cross_entropy(flat, targets, label_smoothing=0.1, reduction="sum"), (targets != -100).sum()


@pytest.mark.parametrize("accumulation", [1, 2, 4])
@pytest.mark.parametrize(("limit", "loss"), [(None, None), (0.01, None), (None, smoothed)])
def test_one_step_equals_plain_pytorch(
    backend: Backend, accumulation: int, limit: float | None, loss: Loss | None
) -> None:
    trained = run(backend, accumulation, limit, loss=loss)
    before = weights(trained.model)
    values = fetched(backend, take(trained, accumulation, LR))
    truth = plain(trained.built, limit, label_smoothing=0.1 if loss else 0.0)
    assert truth.grad_norm > 0.1, "the limit of 0.01 must clip"
    assert values["loss"] == pytest.approx(truth.loss, rel=1e-6)
    assert values["grad_norm"] == pytest.approx(truth.grad_norm, rel=1e-5)
    if loss:
        assert truth.grad_norm != pytest.approx(plain(trained.built).grad_norm, rel=1e-2), "smoothing must show"
    for name, weight in weights(trained.model).items():
        torch.testing.assert_close(weight - before[name], truth.weights[name] - before[name], rtol=1e-3, atol=3e-7)
        assert not torch.equal(weight, before[name]), name


class Rate(Tensor):
    """A learning rate on the device: each read waits for it."""

    reads = 0

    def __float__(self) -> float:
        Rate.reads += 1
        return super().__float__()


@pytest.mark.parametrize("accumulation", [1, 2])
def test_gradients_of_others_do_not_count_and_rates_of_groups_stay_the_users(
    backend: Backend, accumulation: int
) -> None:
    """A user's own backward before a step changes neither the step nor its gradient norm; a tensor lr is read once."""
    plainly, among_others = run(backend, accumulation), run(backend, accumulation)
    group = among_others.optimizer.param_groups[0]
    for _ in range(2):
        Rate.reads = 0
        (ours,) = batches()
        among_others.model(ours["input_ids"], ours["labels"])[0].backward()
        group["lr"] = 0.25
        actual = fetched(backend, take(among_others, accumulation, torch.tensor(LR).as_subclass(Rate)))
        assert (group["lr"], Rate.reads) == (0.25, 1)
        assert actual == fetched(backend, take(plainly, accumulation, LR))
    for name, weight in weights(among_others.model).items():
        assert torch.equal(weight, plainly.model.get_parameter(name)), name


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_step_in_which_no_label_counts_changes_nothing(backend: Backend, accumulation: int) -> None:
    trained = run(backend, accumulation)
    take(trained, accumulation, LR)
    before = weights(trained.model)
    nothing = [{**batch, "labels": batch["labels"] * 0 - 100} for batch in batches(accumulation)]
    metrics = fetched(backend, trained.step(nothing, LR, [0.0]))
    assert [metrics[name] for name in ("loss", "grad_norm", "is_empty")] == [0, 0, 1]
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trained.model).items())
    assert fetched(backend, take(trained, accumulation, LR))["is_empty"] == 0


def test_an_empty_step_leaves_the_loss_scale_and_its_window() -> None:
    scaler, no, yes = LossScaler(64.0, 2, torch.device("cpu")), torch.tensor(False), torch.tensor(True)
    scaler.update(no, no)
    for _ in range(3):
        scaler.update(no, yes)
    assert scaler.state() == {"scale": 64.0, "finite_steps": 1, "skipped_steps": 0}
    scaler.update(no, no)
    assert scaler.state() == {"scale": 128.0, "finite_steps": 0, "skipped_steps": 0}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_groups_take_their_share_of_it_and_what_is_frozen_stays(backend: Backend, accumulation: int) -> None:
    frozen = {"architecture": ARCHITECTURE, "freeze": ["model.embed_tokens"]}
    groups = [{"match": "*norm*", "lr": LR / 4}, {"match": "lm_head", "lr": 2 * LR}]
    first, other = run(backend, accumulation), run(backend, accumulation, model=frozen, groups=groups)
    before = weights(first.model)
    take(first, accumulation, LR / 2)
    take(other, accumulation, LR / 2)
    after = weights(other.model)
    assert torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])
    for name, weight in weights(first.model).items():
        share = 0.25 if "norm" in name else 2.0 if "lm_head" in name else 1.0
        if name != "model.embed_tokens.weight":
            expected = (weight - before[name]) * share
            torch.testing.assert_close(after[name] - before[name], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("accumulation", [1, 4])
@pytest.mark.parametrize("stop", [0.0, 1.0])
def test_metrics_stay_on_the_device_with_what_rides_along(backend: Backend, accumulation: int, stop: float) -> None:
    micro_batches = batches(accumulation)
    metrics = run(backend, accumulation).step(micro_batches, LR, [*counted(micro_batches), stop, 2.0, 3.0])
    assert metrics.keys() == {"loss", "grad_norm", "is_empty", "votes"}
    assert all(type(value) is Tensor and not value.requires_grad for value in metrics.values())
    assert {name for name, value in metrics.items() if value.dim()} == {"votes"}
    assert fetched(backend, metrics)["votes"] == [stop, 2.0, 3.0]
