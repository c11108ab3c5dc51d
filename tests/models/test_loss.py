"""The summed cross entropy against torch's own: values, gradients, and the memory it takes."""

import math
import operator
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small_models import VOCABULARY as MODEL_VOCABULARY
from small_models import Operators, build, families, logits, materialise, shake, token_ids
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from portable_fsdp.models import loss
from portable_fsdp.models.loss import attach_loss, cross_entropy_sum, cross_entropy_with_gradient, trace_logits

ROWS, SEQ_LEN, VOCABULARY = 3, 22, 37
MEBIBYTE = 2**20


def case(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(ROWS, SEQ_LEN, VOCABULARY, generator=generator).mul(3).to(dtype).requires_grad_()
    labels = torch.randint(0, VOCABULARY, (ROWS, SEQ_LEN), generator=generator)
    labels[torch.rand(ROWS, SEQ_LEN, generator=generator) < 0.3] = -100
    return logits, labels


def torchs_own_sum(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def torchs_own(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum and its gradient, all in float32."""
    wide = logits.detach().float().requires_grad_()
    total = torchs_own_sum(wide, labels)
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
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sum_count_and_gradient_equal_torchs(chunks: int, chunked: bool, dtype: torch.dtype) -> None:
    logits, labels = case(dtype)
    total, count = cross_entropy_sum(logits, labels, chunked)
    (total / 7).backward()
    expected, gradient = torchs_own(logits, labels)
    assert total.dtype == count.dtype == torch.float32
    assert count == (labels != -100).sum()
    torch.testing.assert_close(total.detach(), expected)
    assert logits.grad is not None
    assert logits.grad.dtype == dtype
    rtol, atol = (1.3e-6, 1e-5) if dtype == torch.float32 else (2**-7, 1e-6)
    torch.testing.assert_close(logits.grad.float(), gradient / 7, rtol=rtol, atol=atol)
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
    plain, _ = gradients(torchs_own_sum)
    torch.testing.assert_close(ours, plain)
    assert is_changed == is_over


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


# ---------------------------------------------------------------------------------------- the head and the loss in one

LORA: dict[str, Any] = {"r": 3, "alpha": 6, "targets": ["lm_head", "*.q_proj"]}
TRAINED: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "softcap, tied": ("gemma2", {"final_logit_softcapping": 2.0}, {}),
    "scale": ("granite", {}, {}),
    "bias": ("phi", {}, {}),
    "frozen head": ("llama", {}, {"freeze": ["lm_head"]}),
    "head alone": ("llama", {}, {"freeze": ["model"]}),
    "adapters": ("llama", {}, {"lora": LORA}),
}


@pytest.mark.parametrize("name", ["one chunk", *TRAINED, *families()])
def test_a_model_has_the_loss_and_gradients_of_all_logits_and_never_makes_them(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    count = 1 if name == "one chunk" else 5
    family, changes, keys = TRAINED.get(name, (name if count > 1 else "llama", {}, {}))
    model = materialise(build(family, keys=keys, **changes))
    shake(model)
    ids = token_ids(rows=3)
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = labels[0, :9] = -100
    every_logit = ids.numel() * MODEL_VOCABULARY
    monkeypatch.setattr(loss, "CHUNK_BYTES", -(-every_logit * 4 // count))

    def gradients() -> dict[str, Tensor]:
        trained = {fqn: weight for fqn, weight in model.named_parameters() if weight.requires_grad}
        made = {fqn: weight.grad for fqn, weight in trained.items() if weight.grad is not None}
        assert made.keys() == trained.keys()
        model.zero_grad()
        return made

    with Operators() as operators:
        total, tokens = model(ids, labels)
        (total / 7).backward()
    made = [math.prod(shape) for _, _, shape in operators.calls if shape and shape[-1] == MODEL_VOCABULARY]
    assert (max(made) < every_logit) == (count > 1)
    ours = gradients()
    assert tokens == (labels != -100).sum()
    plain = torchs_own_sum(logits(model, ids), labels)
    torch.testing.assert_close(total.detach(), plain.detach())
    (plain / 7).backward()
    largest = max(gradient.abs().max().item() for gradient in ours.values())
    torch.testing.assert_close(ours, gradients(), rtol=1e-4, atol=1e-6 * largest)
    with torch.no_grad():
        assert torch.equal(model(ids, None), logits(model, ids))
        torch.testing.assert_close(model(ids, labels), (plain.detach(), tokens))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_head_computes_the_same_loss(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    before = counters["stats"]["unique_graphs"]
    monkeypatch.setattr(loss, "CHUNK_BYTES", 7 * MODEL_VOCABULARY * 4)
    ids = token_ids(rows=3)
    labels = ids.roll(-1, dims=1)
    labels[:, -1] = labels[0, :4] = -100
    made: list[tuple[Tensor, Tensor | None]] = []
    for compiler in (None, "aot_eager"):
        torch.manual_seed(1)
        model: Any = OneHead(lambda head, x: 5 * head(x)).to(dtype)
        attach_loss(model, steps=(partial(operator.mul, 5),), compiler=compiler)
        total, _ = model(ids, labels)
        total.backward()
        made.append((total.detach(), model.head.weight.grad))
    assert counters["stats"]["unique_graphs"] - before == 2  # all chunks, and the last, smaller one
    torch.testing.assert_close(made[1], made[0], rtol=1e-5 if dtype == torch.float32 else 2**-7, atol=1e-5)


class OneHead(nn.Module):
    """Logits of a linear layer and whatever comes after it."""

    def __init__(self, after: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.head, self.after = nn.Linear(4, MODEL_VOCABULARY), after

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        hidden = F.one_hot(input_ids % 4, 4).to(self.head.weight.dtype)
        return SimpleNamespace(logits=self.after(self.head, hidden))


def changed_in_place(logits: Tensor) -> Tensor:
    logits.view(-1).mul_(0.5)
    return logits


AFTER: dict[str, tuple[bool, Callable[[nn.Linear, Tensor], Tensor]]] = {
    "nothing": (True, lambda head, x: head(x)),
    "scales": (True, lambda head, x: 3 * (head(x) / 2).mul(0.7).float()),
    "softcap": (True, lambda head, x: torch.tanh(torch.div(head(x).contiguous(), 3)) * 3),
    "in place": (False, lambda head, x: head(x).mul_(2)),
    "a view in place": (False, lambda head, x: changed_in_place(head(x))),
    "rows of the vocabulary": (False, lambda head, x: head(x)[..., : MODEL_VOCABULARY - 8]),
    "a tensor": (False, lambda head, x: head(x) * torch.arange(MODEL_VOCABULARY)),
    "another dtype": (False, lambda head, x: head(x).to(torch.bfloat16)),
    "rounded": (False, lambda head, x: torch.div(head(x), 0.1, rounding_mode="floor")),
    "an inverse": (False, lambda head, x: 2 / head(x)),
    "twice": (False, lambda head, x: head(x) + head(2 * x)),
    "the second": (False, lambda head, x: (head(x), head(2 * x))[1]),
    "another layer": (False, lambda head, x: F.linear(x, head.weight)),
}


@pytest.mark.parametrize("name", AFTER)
def test_where_a_model_does_something_unknown_with_its_logits_all_exist(name: str) -> None:
    is_known, after = AFTER[name]
    with torch.device("meta"):
        steps = trace_logits(OneHead(after), torch.zeros(1, 5, dtype=torch.int64))
    assert (steps is not None) == is_known
    model: Any = OneHead(after)
    assert "forward" not in vars(model.head)
    ids = token_ids() % 29
    expected = torchs_own_sum(OneHead.forward(model, ids, use_cache=False).logits, ids)
    attach_loss(model, steps=steps)
    torch.testing.assert_close(model(ids, ids)[0], expected)


def test_hooks_in_the_head_autocast_and_losses_of_ones_own_get_all_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hook on an adapter would run once a chunk; autocast would keep the first chunk's graph with its copy of W."""
    monkeypatch.setattr(loss, "CHUNK_BYTES", 4 * MODEL_VOCABULARY * 9)
    model = materialise(build("llama", keys={"lora": LORA}))
    seen: list[Tensor] = []
    model.lm_head.lora_B.default.register_forward_hook(lambda _, __, out: seen.append(out))
    ids = token_ids()
    model(ids, ids)
    assert [tuple(out.shape) for out in seen] == [(*ids.shape, MODEL_VOCABULARY)]
    with torch.autocast("cpu", torch.bfloat16):
        total, _ = materialise(build("llama"))(ids, ids)
        total.backward()
    own: Any = OneHead(AFTER["nothing"][1])
    attach_loss(own, steps=(), loss=lambda logits, labels: (logits.sum(), labels.numel() * torch.ones(())))
    assert own(ids, ids)[0] == OneHead.forward(own, ids, use_cache=False).logits.sum()


@pytest.mark.parametrize("output", ["auto", "float32", "bfloat16"])
@pytest.mark.parametrize("master", ["float32", "bfloat16"])
def test_the_loss_takes_logits_in_the_dtype_of_output(
    monkeypatch: pytest.MonkeyPatch, master: str, output: str
) -> None:
    taken = getattr(torch, master if output == "auto" else output)
    seen: list[Tensor] = []

    def spy(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(logits)
        return cross_entropy_with_gradient(logits, labels)

    monkeypatch.setattr(loss, "cross_entropy_with_gradient", spy)
    model = materialise(build("llama", precision={"master": master, "output": output}))
    ids = token_ids()
    total, count = model(ids, ids)
    total.backward()
    assert seen[0].dtype == taken
    expected = torchs_own(logits(model, ids).to(taken), ids)[0]
    torch.testing.assert_close(total.detach(), expected)
    assert count == ids.numel()
    assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {getattr(torch, master)}
