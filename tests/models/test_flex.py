"""Attention over blocks gives what the static one gives; its masks are made once a forward, and nothing compiles twice.

On the CPU torch runs flex_attention by its formula, or compiled, and only forward: torch 2.13 refuses backward there.
"""

import multiprocessing
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from typing import Any

import pytest
import torch
from small_models import SEQ_LEN, Operators, build, materialise, shake, token_ids
from test_documents import DOCUMENTS, labels_of, padded, positions, segments
from torch import Tensor
from torch._dynamo.utils import counters

from portable_fsdp.backends.native.units import _recomputed
from portable_fsdp.models import document_masks
from portable_fsdp.models.loss import IGNORED
from portable_fsdp.runtime.errors import ConfigError

pytestmark = [
    pytest.mark.slow,
    # torch, of the formula that stands in for the kernel here: there is no GPU.
    pytest.mark.filterwarnings(r"ignore:flex_attention called without torch\.compile:UserWarning"),
    # torch's own tracer, of what it looks at; autograd goes on without it.
    pytest.mark.filterwarnings(r"ignore:The \.grad attribute of a Tensor that is not a leaf:UserWarning"),
    # torch's own tracer, of a class of torch's.
    pytest.mark.filterwarnings(
        r"ignore:.*autograd\.function\.Function.* should not be instantiated:DeprecationWarning"
    ),
]
# Heads as wide as the kernel wants them, and a softcap low enough to show.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 0.1},
    "deepseek_v3": {"v_head_dim": 16},
    "mistral_window": {"head_dim": 16},
}
LAYERS: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": [*["sliding_attention"] * 2, "full_attention"]}


@pytest.fixture(autouse=True)
def _backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The formula has a backward; torch 2.13 refuses it on the CPU because inductor has no kernel for it there."""
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)


def made(name: str, attention: str, packs: bool = True, **changes: Any) -> Any:
    model = materialise(build(name, keys={"attention": attention}, packs=packs, **CHANGES.get(name, {}) | changes))
    shake(model)
    return model


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ids = token_ids()
    return ids, ids.roll(-1, dims=1).masked_fill(segments() == 0, IGNORED), positions(), segments()


def trained(model: Any) -> tuple[Tensor, list[Tensor]]:
    """Loss and gradients of one batch of documents."""
    model.zero_grad()
    loss = model(*batch())[0]
    loss.backward()
    return loss.detach(), [parameter.grad for parameter in model.parameters()]


def require_equal(actual: Any, expected: Any) -> None:
    torch.testing.assert_close(actual[0], expected[0], rtol=1e-5, atol=0)
    for gradient, other in zip(actual[1], expected[1], strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-5, atol=1e-5 * float(other.abs().max()))


def recomputed(model: Any) -> Any:
    """The model under gradient checkpointing, as the engine does it."""
    again: Callable[..., Any] = _recomputed(type(model.model.layers[0]).forward, (), False)
    for layer in model.model.layers:
        layer.forward = again.__get__(layer)
    return model


# Sinks; windows, softcap and grouped heads (per commit in the compiled tests below); a window in every layer; values of
# another width than keys.
@pytest.mark.parametrize(
    "name",
    ["gpt_oss", *(pytest.param(n, marks=pytest.mark.proof) for n in ("gemma2", "mistral_window", "deepseek_v3"))],
)
def test_documents_have_the_losses_and_gradients_of_static_attention(name: str) -> None:
    model, static = made(name, "flex"), made(name, "static")
    require_equal(trained(model), trained(static))
    ids, labels, *_ = batch()
    with torch.no_grad():
        for row, number in DOCUMENTS[1:3]:  # each has one before it
            own = labels_of(row, number, labels)
            packed = float(model(ids, own, positions(), segments())[0])
            assert packed == pytest.approx(float(static(*padded(row, number, ids, own))[0]), rel=1e-5)
            assert packed != pytest.approx(float(model(ids, own)[0]), rel=1e-4), "what crosses must show"


def test_a_stream_is_causal_and_padding_needs_no_argument() -> None:
    ids, labels, *apart = batch()
    model, static = made("gemma2", "flex", packs=False), made("gemma2", "static", packs=False)
    with torch.no_grad():
        expected = float(static(ids, labels)[0])
        assert float(model(ids, labels)[0]) == pytest.approx(expected, rel=1e-5)
        assert float(model(ids, labels, *apart)[0]) == pytest.approx(expected, rel=1e-5)


def test_masks_are_made_once_a_forward_for_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    model = recomputed(made("gemma3_text", "flex", **LAYERS))
    make, calls = document_masks.create_block_mask, 0

    def counted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        return make(*args)

    monkeypatch.setattr(document_masks, "create_block_mask", counted)
    loss = model(*batch())[0]
    assert calls == 2
    loss.backward()
    assert calls == 2, "a layer that runs again for its backward has its mask"


def test_nothing_is_read_on_the_host() -> None:
    with Operators() as operators:
        document_masks.make_masks([None, 5], SEQ_LEN, torch.device("cpu"), segments())
    operators.require_no_reads()


def test_compiled_attention_runs_again_in_backward_without_another_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """What GPUs run, but for inductor, which has no backward on the CPU.

    torch's formula alone, not compiled, gives wrong gradients here (2.9 and 2.13): checkpoint's hooks take part while
    it traces the softcap. Compiling shuts them out.
    """
    model, expected = recomputed(made("gemma2", "flex")), trained(made("gemma2", "static"))
    compiled = cache(partial(torch.compile, backend="aot_eager", dynamic=False, fullgraph=True))
    monkeypatch.setattr(document_masks, "_for_device", lambda function, _: compiled(function))
    torch._dynamo.reset()
    graphs: set[int] = set()
    for _ in range(2):
        require_equal(trained(model), expected)
        with torch.no_grad():  # an evaluation in between
            model(*batch())
        graphs.add(counters["stats"]["unique_graphs"])
    assert len(graphs) == 1


def test_compiled_layers_take_new_masks_without_another_program() -> None:
    """As the engine compiles them (aot_eager in the place of inductor, which has no backward on the CPU)."""
    model, static = made("gemma2", "flex"), made("gemma2", "static")
    for layer in model.model.layers:
        layer.forward = torch.compile(layer.forward, backend="aot_eager", fullgraph=True, dynamic=False)
    torch._dynamo.reset()
    require_equal(trained(model), trained(static))
    graphs = counters["stats"]["unique_graphs"]
    require_equal(trained(model), trained(static))
    assert counters["stats"]["unique_graphs"] == graphs > 0


def _by_inductor() -> list[tuple[float, float, int]]:
    """For a child, since inductor leaves threads behind: losses of three batches, of static attention, and programs."""
    model, static = made("gemma2", "flex"), made("gemma2", "static")
    losses: list[tuple[float, float, int]] = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(document_masks, "_for_device", lambda function, _: document_masks._compiled(function))
        for turn in range(3):
            rows = [tensor.roll(turn, 0) for tensor in batch()]
            both = float(model(*rows)[0]), float(static(*rows)[0])
            losses.append((*both, counters["stats"]["unique_graphs"]))
    return losses


@pytest.mark.proof
def test_what_runs_on_gpus_is_compiled_once() -> None:
    """Attention and masks by inductor, on the CPU; forward alone."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        losses = pool.submit(_by_inductor).result()
    for loss, expected, _ in losses:
        assert loss == pytest.approx(expected, rel=1e-5)
    assert losses[0][2] == losses[2][2] > 0


@pytest.mark.parametrize("name", ["stablelm", "mamba2"])
def test_a_model_whose_layers_get_no_masks_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=r"model\.attention=flex: .*found \w+ForCausalLM, which doesn't\.\n  Set"):
        made(name, "flex", packs=False)


def test_heads_that_are_too_narrow_for_the_kernel_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.attention=flex: expected heads of at least 16 numbers, found 12"):
        made("llama", "flex", packs=False)
