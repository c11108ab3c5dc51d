"""The summed cross entropy against torch's own: values, gradients, and the memory it takes."""

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from small_models import build, logits, materialise, token_ids
from torch import Tensor
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from portable_fsdp.models import loss
from portable_fsdp.models.loss import cross_entropy_sum

ROWS, SEQ_LEN, VOCABULARY = 3, 22, 37
MEBIBYTE = 2**20


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(ROWS, SEQ_LEN, VOCABULARY, generator=generator).mul(3).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (ROWS, SEQ_LEN), generator=generator)
    labels[torch.rand(ROWS, SEQ_LEN, generator=generator) < 0.3] = -100
    return logits, labels


def torchs_own(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum and its gradient, all in float32."""
    wide = logits.detach().float().requires_grad_()
    total = F.cross_entropy(wide.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
    total.backward()
    assert wide.grad is not None
    return total.detach(), wide.grad


@pytest.fixture(params=[1, 2, 7, 22], ids=lambda count: f"chunks-{count}")
def chunks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    """Lets the loss cut this many chunks, uneven ones included."""
    positions = -(-SEQ_LEN // request.param)
    monkeypatch.setattr(loss, "CHUNK_BYTES", positions * ROWS * VOCABULARY * 4)
    return request.param


@pytest.mark.parametrize("chunked", [True, False])
def test_sum_count_and_gradient_equal_torchs(chunks: int, chunked: bool) -> None:
    logits, labels = case()
    total, count = cross_entropy_sum(logits, labels, chunked)
    (total / 7).backward()
    expected, gradient = torchs_own(logits, labels)
    assert total.dtype == count.dtype == torch.float32
    assert count == (labels != -100).sum()
    torch.testing.assert_close(total.detach(), expected)
    torch.testing.assert_close(logits.grad, gradient / 7)
    with torch.no_grad():
        without = cross_entropy_sum(logits, labels, chunked)
    torch.testing.assert_close(without, (total.detach(), count))


HEADS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], bool]] = {
    "linear": (F.linear, True),
    "linear with a bias": (lambda x, weight: F.linear(x, weight, weight[:, 0]), True),
    "scaled": (lambda x, weight: F.linear(x, weight) * 0.5, True),
    "softcap": (lambda x, weight: torch.tanh(F.linear(x, weight) / 3) * 3, True),
    "rounded": (lambda x, weight: F.linear(x, weight).bfloat16(), True),
    "tanh": (lambda x, weight: torch.tanh(F.linear(x, weight)), False),
    "a view of tanh": (lambda x, weight: torch.tanh(F.linear(x, weight).flatten(0, 1)).view(ROWS, SEQ_LEN, -1), False),
    "leaf": (lambda x, weight: x, False),
}


@pytest.mark.parametrize("name", HEADS)
def test_the_gradient_is_written_over_logits_that_no_backward_reads(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    head, is_over = HEADS[name]
    _, labels = case()
    monkeypatch.setattr(loss, "CHUNK_BYTES", ROWS * VOCABULARY * 4 * 5)

    def gradients(summed: Callable[[Tensor, Tensor], Tensor]) -> tuple[Tensor, bool]:
        x = torch.linspace(-1, 1, ROWS * SEQ_LEN * VOCABULARY).view(ROWS, SEQ_LEN, VOCABULARY).requires_grad_()
        weight = torch.linspace(-1, 1, VOCABULARY**2).view(VOCABULARY, VOCABULARY).sin().requires_grad_()
        logits = head(x, weight)
        before = logits.detach().clone()
        summed(logits, labels).backward()
        assert x.grad is not None
        return x.grad, not torch.equal(before, logits.detach())

    ours, is_changed = gradients(lambda logits, labels: cross_entropy_sum(logits, labels)[0])
    plain, _ = gradients(
        lambda logits, labels: F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), reduction="sum")
    )
    torch.testing.assert_close(ours, plain)
    assert is_changed == is_over


def test_bfloat16_logits_are_summed_in_float32(chunks: int) -> None:
    logits, labels = case(torch.bfloat16)
    total, _ = cross_entropy_sum(logits, labels)
    total.backward()
    expected, gradient = torchs_own(logits, labels)
    assert logits.grad is not None
    assert logits.grad.dtype == torch.bfloat16
    torch.testing.assert_close(total.detach(), expected)
    torch.testing.assert_close(logits.grad.float(), gradient, rtol=2**-7, atol=1e-6)


def test_gradients_of_float16_logits_are_those_of_a_scaled_loss(chunks: int) -> None:
    """Probabilities of 1e-8 to 1e-5, which float16 itself holds with few digits or none."""
    logits = torch.linspace(-18, -11, 2 * 22 * 9).view(2, 22, 9)
    logits[..., 0] = 0.0
    labels = torch.zeros(2, 22, dtype=torch.int64)
    gradients: list[Tensor] = []
    for dtype in (torch.float16, torch.float64):
        leaf = logits.half().to(dtype).requires_grad_()
        total, count = cross_entropy_sum(leaf, labels)
        (total / count * 2.0**16).backward()
        gradients.append(cast(Tensor, leaf.grad).double())
    assert torch.allclose(gradients[0][..., 1:], gradients[1][..., 1:], rtol=2e-3, atol=0)


def test_no_counted_label_gives_zero_and_no_nan(chunks: int) -> None:
    logits, labels = case()
    total, count = cross_entropy_sum(logits, torch.full_like(labels, -100))
    total.backward()
    assert (total, count) == (0, 0)
    assert logits.grad is not None
    assert not logits.grad.any()


def peak_extra_bytes(logits: Tensor, labels: Tensor) -> int:
    """What forward and backward of the loss allocate at most, beyond what was there."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        cross_entropy_sum(logits, labels)[0].backward()
    events: list[Any] = cast(Any, profiler).profiler.kineto_results.events()
    now, peak = 0, 0
    for event in sorted((e for e in events if e.name() == "[memory]"), key=lambda e: e.start_ns()):
        now += event.nbytes()
        peak = max(peak, now)
    return peak


def test_no_float32_copy_of_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(2, 128, 16_384, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.zeros(2, 128, dtype=torch.int64)
    gradient = logits.numel() * 2
    assert gradient == 8 * MEBIBYTE
    assert peak_extra_bytes(logits, labels) >= 4 * gradient, "in one chunk: the measure would show a copy"
    monkeypatch.setattr(loss, "CHUNK_BYTES", MEBIBYTE)
    logits.grad = None
    # The gradient itself, and of one chunk: float32 logits, log-softmax, gradient, and the last in bfloat16.
    assert gradient <= peak_extra_bytes(logits, labels) <= gradient + 5 * MEBIBYTE


def test_a_model_returns_the_sum_over_its_own_logits() -> None:
    model = materialise(build("llama"))
    ids = token_ids()
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = -100
    total, count = model(ids, labels)
    expected = F.cross_entropy(logits(model, ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(total / count, expected)
    total.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


OUTPUTS = [
    ("float32", "auto", torch.float32),
    ("float32", "bfloat16", torch.bfloat16),
    ("bfloat16", "auto", torch.bfloat16),
    ("bfloat16", "float32", torch.float32),
]


@pytest.mark.parametrize(("master", "output", "taken"), OUTPUTS)
def test_the_loss_takes_logits_in_the_dtype_of_output(
    monkeypatch: pytest.MonkeyPatch, master: str, output: str, taken: torch.dtype
) -> None:
    seen: list[Tensor] = []

    def spy(logits: Tensor, labels: Tensor, chunked: bool) -> tuple[Tensor, Tensor]:
        seen.append(logits)
        return cross_entropy_sum(logits, labels, chunked)

    monkeypatch.setattr(loss, "cross_entropy_sum", spy)
    model = materialise(build("llama", precision={"master": master, "output": output}))
    ids = token_ids()
    total, count = model(ids, ids)
    total.backward()
    assert seen[0].dtype == taken
    expected = torchs_own(logits(model, ids).to(taken), ids)[0]
    torch.testing.assert_close(total.detach(), expected)
    assert count == ids.numel()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {getattr(torch, master)}
