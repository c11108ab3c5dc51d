"""Documents that share a row have the losses that each has alone, by either attention; models that can't do that are
refused by name.

On the CPU torch runs flex_attention by its formula, or compiled, and only forward: torch 2.13 refuses backward there.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from typing import Any, cast
from unittest.mock import Mock

import pytest
import torch
from small_models import ARCHITECTURES, SEQ_LEN, Operators, build, families, materialise, shake, token_ids
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.utils import counters
from torch._functorch._aot_autograd.utils import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.native.units import _recomputed, recompute
from portable_fsdp.config.schema import Model
from portable_fsdp.models import document_masks
from portable_fsdp.models.attention import STATIC
from portable_fsdp.models.build import build_model
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

LENGTHS = [(7, 9, 5), (13, 11)]  # of the documents of two rows; three positions of padding in the first
KEPT_APART = ["llama", "qwen3", "mistral", "gemma2", "gemma3_text", "gpt2", "phi3", "olmo2", "smollm3"]


def built(name: str, attention: str = "auto", *, eager: bool = True, packs: bool = True, **changes: Any) -> Any:
    """A model with weights that are moved off their initial values."""
    model = materialise(build(name, keys={"attention": attention}, eager=eager, packs=packs, **changes))
    shake(model)
    return model


def segments() -> Tensor:
    """`[rows, seq]`: 1, 2, ... by document, 0 for padding."""
    return _rows([[number for number, length in enumerate(row, 1) for _ in range(length)] for row in LENGTHS])


def _rows(rows: list[list[int]]) -> Tensor:
    return torch.tensor([row + [0] * (SEQ_LEN - len(row)) for row in rows])


def batch() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ids, labels, positions and segments."""
    ids, positions = token_ids(), _rows([[place for length in row for place in range(length)] for row in LENGTHS])
    return ids, ids.roll(-1, dims=1).masked_fill(segments() == 0, IGNORED), positions, segments()


def labels_of(row: int, number: int, labels: Tensor) -> Tensor:
    """Those of one document of the batch; none of the others counts."""
    where = torch.zeros(labels.shape, dtype=torch.bool)
    where[row] = segments()[row] == number
    return labels.masked_fill(~where, IGNORED)


def padded(row: int, number: int, *tensors: Tensor) -> list[Tensor]:
    """What belongs to one document, in a row of its own: behind it other tokens, and labels that don't count."""
    where = segments()[row] == number
    rest = SEQ_LEN - int(where.sum())
    fillings = [IGNORED if (tensor == IGNORED).any() else 3 for tensor in tensors]
    parts = zip(tensors, fillings, strict=True)
    return [torch.cat([tensor[row][where], torch.full((rest,), filling)])[None] for tensor, filling in parts]


DOCUMENTS = [(row, number) for row, lengths in enumerate(LENGTHS) for number in range(1, len(lengths) + 1)]


@pytest.mark.parametrize("eager", [True, False], ids=["one mask for all layers", "numbers of documents"])
@pytest.mark.parametrize("name", families(KEPT_APART))
def test_each_document_has_the_loss_that_it_has_alone(name: str, eager: bool) -> None:
    model, crossing = built(name, eager=eager), 0
    ids, labels, *apart = batch()
    with torch.no_grad():
        for row, number in DOCUMENTS:
            own = labels_of(row, number, labels)
            packed, count = model(ids, own, *apart)
            alone, counted = model(*padded(row, number, ids, own))
            assert count == counted == LENGTHS[row][number - 1]
            assert float(packed) == pytest.approx(float(alone), rel=1e-5)
            crossing += float(model(ids, own)[0]) != pytest.approx(float(alone), rel=1e-4)
    assert crossing, "attention across documents must show, or this test couldn't fail"


@pytest.mark.parametrize("eager", [True, False])
def test_gradients_are_the_sum_of_those_of_each_document(eager: bool) -> None:
    packed, apart = built("gemma3_text", eager=eager), built("gemma3_text", eager=eager)
    ids, labels, *_ = batch()
    packed(*batch())[0].backward()
    for row, number in DOCUMENTS:
        apart(*padded(row, number, ids, labels_of(row, number, labels)))[0].backward()
    for actual, expected in zip(packed.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(actual.grad, expected.grad, rtol=1e-4, atol=1e-5 * float(expected.grad.abs().max()))


@pytest.mark.parametrize("name", families())
def test_padding_behind_a_document_changes_nothing(name: str) -> None:
    """Rows of data.packing=none need no arguments of their own, since no position sees what follows it."""
    model, length = built(name, packs=False), 9
    ids, labels = token_ids(), token_ids().roll(-1, dims=1)
    labels[:, length:] = IGNORED
    place = torch.arange(SEQ_LEN).expand(2, -1)
    inside = (place < length).long()
    with torch.no_grad():
        total, count = model(ids, labels, place * inside, inside)
        expected, counted = model(ids[:, :length], labels[:, :length])
    assert count == counted == 2 * length
    assert float(total) == pytest.approx(float(expected), rel=1e-5)


APART = (
    r"^data\.packing=documents: {}ForCausalLM doesn't keep the documents of a row apart: {}"
    r"(.|\n)*Set data\.packing=none \(one document per row, padded\)\."
)
NO_MASKS = r"model\.attention=flex: \w+ForCausalLM doesn't pass forward's .*\n  Set"
REFUSED = [  # model, attention, whether rows hold several documents
    ("bloom", "auto", True, APART.format("Bloom", "it accepts no mask of documents")),
    ("falcon_alibi", "auto", True, APART.format("Falcon", "it accepts no mask of documents")),
    ("mamba2", "auto", True, APART.format("Mamba2", "logits differ")),
    ("qwen3_next", "auto", True, APART.format("Qwen3Next", "logits differ")),
    # transformers' own puts the window into the mask that it makes, and makes none where it is given one.
    ("mistral", "sdpa", True, APART.format("Mistral", "logits differ")),
    ("stablelm", "flex", False, NO_MASKS),
    ("mamba2", "flex", False, NO_MASKS),
    ("llama", "flex", False, r"model\.attention=flex: expected a head size of at least 16, found 12"),
]


@pytest.mark.parametrize(("name", "attention", "packs", "message"), REFUSED)
def test_a_model_that_cannot_keep_documents_apart_is_refused_by_name(
    name: str, attention: str, packs: bool, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        built(name, attention, packs=packs)


def test_the_trial_takes_models_of_any_size_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    large = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "bos_token_id": 128000}
    build(large | heads, packs=True)
    section = Model(architecture=ARCHITECTURES["llama"] | {"vocab_size": 31})  # fewer than the trial's own
    build_model(section, seed=0, seq_len=SEQ_LEN, vocabulary=31, packs_documents=True)
    build("llama", packs=True, keys={"attention": "sdpa"})
    assert torch.equal(torch.get_rng_state(), before)


def test_the_mask_is_made_once_a_forward_on_the_device() -> None:
    counts: list[int] = []
    for layers in (2, 6):
        model = materialise(build("llama", packs=True, num_hidden_layers=layers))
        with torch.no_grad(), Operators() as operators:
            model(*batch())
        operators.require_no_reads()
        counts.append(sum(shape == (2, 1, SEQ_LEN, SEQ_LEN) for *_, shape in operators.calls))
    assert counts[0] == counts[1] > 0


def test_layers_of_a_compiled_step_are_given_numbers_and_no_mask() -> None:
    model = built("llama", eager=False)
    masks: list[Any] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, __, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    model(*batch())
    assert [mask.shape for mask in masks] == [(2, 1, 1, SEQ_LEN)] * 2
    assert masks[0].dtype == torch.int64


# Heads as wide as the kernel wants them, and a softcap low enough to show.
CHANGES: dict[str, dict[str, Any]] = {
    "gemma2": {"head_dim": 16, "attn_logit_softcapping": 0.1},
    "deepseek_v3": {"v_head_dim": 16},
    "mistral": {"head_dim": 16},
}
LAYERS: dict[str, Any] = {"num_hidden_layers": 3, "layer_types": [*["sliding_attention"] * 2, "full_attention"]}


@pytest.fixture(autouse=True)
def _backward_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The formula has a backward; torch 2.13 refuses it on the CPU because inductor has no kernel for it there.

    Guards of shapes stay Python's: dynamo would start a C++ compiler for those of each model.
    """
    monkeypatch.setattr("torch.nn.attention.flex_attention._validate_device", lambda *_: None)
    with cast(Any, torch._dynamo.config).patch(enable_cpp_symbolic_shape_guards=False):
        yield


def made(name: str, attention: str, packs: bool = True, **changes: Any) -> Any:
    return built(name, attention, packs=packs, **CHANGES.get(name, {}) | changes)


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
    "name", ["gpt_oss", *(pytest.param(n, marks=pytest.mark.proof) for n in ("gemma2", "mistral", "deepseek_v3"))]
)
def test_documents_have_the_losses_and_gradients_of_static_attention(name: str) -> None:
    require_equal(trained(made(name, "flex")), trained(made(name, "static")))


def test_a_stream_is_causal_and_padding_needs_no_argument() -> None:
    ids, labels, *apart = batch()
    model, static = made("gemma2", "flex", packs=False), made("gemma2", "static", packs=False)
    with torch.no_grad():
        expected = float(static(ids, labels)[0])
        assert float(model(ids, labels)[0]) == pytest.approx(expected, rel=1e-5)
        assert float(model(ids, labels, *apart)[0]) == pytest.approx(expected, rel=1e-5)


def test_masks_are_made_once_a_forward_for_each_window(monkeypatch: pytest.MonkeyPatch) -> None:
    model, counted = recomputed(made("gemma3_text", "flex", **LAYERS)), Mock(wraps=document_masks.create_block_mask)
    monkeypatch.setattr(document_masks, "create_block_mask", counted)
    loss = model(*batch())[0]
    assert counted.call_count == 2
    loss.backward()
    assert counted.call_count == 2, "a layer that runs again for its backward has its mask"


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


@pytest.mark.parametrize(
    ("save_ops", "runs_again"),
    [pytest.param((), True, marks=pytest.mark.proof), (("matmul",), True), (("matmul", "attention"), False)],
)
def test_a_compiled_layer_keeps_what_save_ops_names_of_attention_over_blocks(
    save_ops: tuple[str, ...], runs_again: bool
) -> None:
    graphs: list[str] = []

    def keep(graph: Any, _: object) -> Any:
        graphs.append(graph.code)
        return make_boxed_func(graph.forward)

    model = made("llama", "flex", head_dim=16)
    layer = model.model.layers[0]
    recompute(layer, ShardPolicy((), save_ops=save_ops), whole=False)
    parts = min_cut_rematerialization_partition
    compiler = aot_autograd(fw_compiler=keep, bw_compiler=keep, partition_fn=parts)
    layer.forward = torch.compile(layer.forward, backend=compiler, fullgraph=True, dynamic=False)
    trained(model)
    torch.compiler.reset()
    forward, backward = graphs
    assert "flex_attention(" in forward
    assert "flex_attention_backward(" in backward
    assert ("flex_attention(" in backward) == runs_again


def test_auto_computes_by_blocks_where_that_saves_a_mask() -> None:
    sizes: dict[str, Any] = {"seed": 0, "seq_len": SEQ_LEN, "vocabulary": 0}
    for name, packs, more, chosen in (
        ("llama", True, {}, document_masks.FLEX),
        ("llama", False, {}, STATIC),  # a plain causal kernel is as fast
        ("gemma2", False, {}, document_masks.FLEX),  # windows
        ("gpt_oss", False, {}, document_masks.FLEX),  # sinks
        ("llama", True, {"attention_dropout": 0.1}, STATIC),
        ("llama", True, {"head_dim": 8}, STATIC),  # too narrow
    ):
        architecture = ARCHITECTURES[name] | {"head_dim": 16} | more
        section = Model.model_validate({"architecture": architecture, "dropout": "published"})
        for blocks in (True, False):
            model: Any = build_model(section, packs_documents=packs, blocks=blocks, **sizes).model
            assert model.config._attn_implementation == (chosen if blocks else STATIC), (name, more, blocks)


def test_blocks_of_packed_chats_cost_little_more_than_their_documents() -> None:
    """Rows of 8,192 tokens that documents of 256 to 8,192 tokens fill, equally many of each power of 2."""
    generator = torch.Generator().manual_seed(0)
    needed = computed = 0.0
    for _ in range(6):
        lengths: list[int] = []
        while sum(lengths) < 8192:
            power = 8 + 5 * torch.rand((), generator=generator).item()
            lengths.append(min(int(2**power), 8192 - sum(lengths)))
        numbers = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        (mask,) = document_masks.make_masks([None], 8192, numbers.device, numbers[None]).values()
        blocks = mask.kv_num_blocks.sum() + (0 if mask.full_kv_num_blocks is None else mask.full_kv_num_blocks.sum())
        computed += float(blocks) * 128**2
        needed += sum(length * (length + 1) / 2 for length in lengths)
    assert computed / needed < 1.15
