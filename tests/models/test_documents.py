"""Documents that share a row have the losses that each has alone; models that can't do that are refused by name."""

from typing import Any

import pytest
import torch
from small_models import ARCHITECTURES, SEQ_LEN, Operators, build, families, materialise, shake, token_ids
from torch import Tensor

from portable_fsdp.config.schema import Model
from portable_fsdp.models.build import build_model
from portable_fsdp.models.loss import IGNORED
from portable_fsdp.runtime.errors import ConfigError

pytestmark = pytest.mark.slow

LENGTHS = [(7, 9, 5), (13, 11)]  # of the documents of two rows; three positions of padding in the first
KEPT_APART = ["llama", "qwen3", "mistral_window", "gemma2", "gemma3_text", "gpt2", "phi3", "olmo2", "smollm3"]
NOT_KEPT_APART = {
    "bloom": "BloomForCausalLM: it takes no mask of documents",
    "falcon_alibi": "FalconForCausalLM: it takes no mask of documents",
    "mamba2": "Mamba2ForCausalLM: logits differ",
    "qwen3_next": "Qwen3NextForCausalLM: logits differ",
}


def built(name: str, *, eager: bool = True, packs: bool = True, **settings: Any) -> Any:
    """A model with weights that are moved off their initial values."""
    model = materialise(build(name, keys=settings, eager=eager, packs=packs))
    shake(model)
    return model


def segments() -> Tensor:
    """`[rows, seq]`: 1, 2, ... by document, 0 for padding."""
    return _rows([[number for number, length in enumerate(row, 1) for _ in range(length)] for row in LENGTHS])


def positions() -> Tensor:
    return _rows([[place for length in row for place in range(length)] for row in LENGTHS])


def _rows(rows: list[list[int]]) -> Tensor:
    return torch.tensor([row + [0] * (SEQ_LEN - len(row)) for row in rows])


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
    model, ids, labels = built(name, eager=eager), token_ids(), token_ids().roll(-1, dims=1)
    crossing = 0
    with torch.no_grad():
        for row, number in DOCUMENTS:
            own = labels_of(row, number, labels)
            packed, count = model(ids, own, positions(), segments())
            alone, counted = model(*padded(row, number, ids, own))
            assert count == counted == LENGTHS[row][number - 1]
            assert float(packed) == pytest.approx(float(alone), rel=1e-5)
            crossing += float(model(ids, own)[0]) != pytest.approx(float(alone), rel=1e-4)
    assert crossing, "attention across documents must show, or this test couldn't fail"


@pytest.mark.parametrize("eager", [True, False])
def test_gradients_are_the_sum_of_those_of_each_document(eager: bool) -> None:
    packed, apart = built("gemma3_text", eager=eager), built("gemma3_text", eager=eager)
    ids, labels = token_ids(), token_ids().roll(-1, dims=1).masked_fill(segments() == 0, IGNORED)
    packed(ids, labels, positions(), segments())[0].backward()
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


@pytest.mark.parametrize("name", NOT_KEPT_APART)
def test_a_model_that_cannot_keep_documents_apart_is_refused_by_name(name: str) -> None:
    with pytest.raises(
        ConfigError, match=r"^data\.packing=documents: expected a model that gives documents"
    ) as refusal:
        built(name)
    assert NOT_KEPT_APART[name] in str(refusal.value)
    assert "Set data.packing=none (one document a row, padded)." in str(refusal.value)


def test_an_attention_without_a_window_is_refused_for_a_model_that_has_one() -> None:
    """transformers' own puts the window into the mask that it makes, and makes none where it is given one."""
    with pytest.raises(ConfigError, match="MistralForCausalLM: logits differ"):
        built("mistral_window", attention="sdpa")
    built("llama", attention="sdpa")


def test_the_trial_takes_large_models_and_leaves_the_random_state_alone() -> None:
    before = torch.get_rng_state()
    large = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80}
    heads = {"num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "bos_token_id": 128000}
    build(large | heads, packs=True)
    assert torch.equal(torch.get_rng_state(), before)


def test_the_trial_takes_vocabularies_smaller_than_its_own() -> None:
    section = Model(architecture=ARCHITECTURES["llama"] | {"vocab_size": 31})
    build_model(section, seed=0, seq_len=SEQ_LEN, vocabulary=31, packs_documents=True)


def test_the_mask_is_made_once_a_forward_on_the_device() -> None:
    counts: list[int] = []
    for layers in (2, 6):
        model = materialise(build("llama", packs=True, num_hidden_layers=layers))
        with torch.no_grad(), Operators() as operators:
            model(token_ids(), token_ids(), positions(), segments())
        operators.require_no_reads()
        counts.append(sum(shape == (2, 1, SEQ_LEN, SEQ_LEN) for *_, shape in operators.calls))
    assert counts[0] == counts[1] > 0


def test_layers_of_a_compiled_step_are_given_numbers_and_no_mask() -> None:
    model = built("llama", eager=False)
    masks: list[Any] = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, __, kwargs: masks.append(kwargs["attention_mask"]), with_kwargs=True)
    model(token_ids(), token_ids(), positions(), segments())
    assert [mask.shape for mask in masks] == [(2, 1, 1, SEQ_LEN)] * 2
    assert masks[0].dtype == torch.int64
