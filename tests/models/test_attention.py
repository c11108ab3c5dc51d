"""The static attention and the dense experts give what transformers' own give, and read nothing on the host."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from small_models import Operators, build, families, logits, materialise, shake, token_ids
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.gpt_oss.modeling_gpt_oss import eager_attention_forward

from portable_fsdp.models.attention import static_attention
from portable_fsdp.runtime.errors import ConfigError

CAUSAL = cast(nn.Module, SimpleNamespace(is_causal=True))


def heads(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_sinks_equal_gpt_oss() -> None:
    query, key, value = heads(2, 4, 9, 8), heads(2, 2, 9, 8, seed=1), heads(2, 2, 9, 8, seed=2)
    sinks = heads(4, seed=3)
    layer = cast(Any, SimpleNamespace(num_key_value_groups=2, sinks=sinks, training=False))
    causal = torch.full((9, 9), -torch.inf).triu(1).expand(2, 1, 9, 9)
    expected, _ = eager_attention_forward(layer, query, key, value, causal, scaling=0.3)
    out, _ = static_attention(CAUSAL, query, key, value, scaling=0.3, s_aux=sinks)
    torch.testing.assert_close(out, expected)
    assert not torch.allclose(static_attention(CAUSAL, query, key, value, scaling=0.3)[0], expected)


@pytest.mark.parametrize("form", ["bool", "additive", "documents"])
@pytest.mark.parametrize("option", [{}, {"sliding_window": 3}, {"softcap": 1.5}, {"s_aux": torch.ones(4)}], ids=str)
def test_a_block_mask_keeps_packed_documents_apart(form: str, option: dict[str, Any]) -> None:
    query, key, value = heads(2, 4, 10, 8), heads(2, 2, 10, 8, seed=1), heads(2, 2, 10, 8, seed=2)
    cut = 4
    document = (torch.arange(10) >= cut).long()
    mask = (document[:, None] == document[None]).expand(2, 1, 10, 10)
    if form == "additive":
        mask = torch.zeros(2, 1, 10, 10).masked_fill(~mask.tril(), torch.finfo(torch.float32).min)
    if form == "documents":
        mask = document.expand(2, 1, 1, 10)
    out, _ = static_attention(CAUSAL, query, key, value, mask, **option)
    for part in (slice(0, cut), slice(cut, 10)):
        alone, _ = static_attention(CAUSAL, query[:, :, part], key[:, :, part], value[:, :, part], **option)
        torch.testing.assert_close(out[:, part], alone)


@pytest.mark.parametrize("option", [{}, {"softcap": 2.0}], ids=str)
def test_a_row_that_sees_nothing_gives_no_nan(option: dict[str, Any]) -> None:
    query = heads(1, 2, 6, 8).requires_grad_()
    key, value = heads(1, 2, 6, 8, seed=1), heads(1, 2, 6, 8, seed=2)
    mask = torch.ones(1, 1, 6, 6, dtype=torch.bool)
    mask[..., 2, :] = False
    out, _ = static_attention(CAUSAL, query, key, value, mask, **option)
    out.sum().backward()
    assert out.isfinite().all()
    assert query.grad is not None
    assert query.grad.isfinite().all()


def test_a_window_wider_than_the_row_is_plain_causal() -> None:
    query, key, value = heads(1, 2, 6, 8), heads(1, 2, 6, 8, seed=1), heads(1, 2, 6, 8, seed=2)
    wide, _ = static_attention(CAUSAL, query, key, value, sliding_window=6)
    assert torch.equal(wide, static_attention(CAUSAL, query, key, value)[0])
    narrow, _ = static_attention(CAUSAL, query, key, value, sliding_window=5)
    torch.testing.assert_close(narrow[:, :5], wide[:, :5])
    assert not torch.allclose(narrow[:, 5], wide[:, 5])


@pytest.mark.parametrize(("window", "grouped"), [(2, False), (None, True)])
def test_a_mask_comes_with_as_many_key_heads_as_query_heads(
    window: int | None, grouped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For grouped ones under a mask torch chooses its formula on GPUs, with all scores in memory."""
    seen: list[tuple[bool, bool, int]] = []
    attend = F.scaled_dot_product_attention

    def record(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **settings: Any) -> torch.Tensor:
        seen.append((settings["attn_mask"] is not None, settings["enable_gqa"], key.shape[1]))
        return attend(query, key, value, **settings)

    monkeypatch.setattr(F, "scaled_dot_product_attention", record)
    query, key = torch.ones(1, 4, 6, 8), torch.ones(1, 2, 6, 8)
    static_attention(nn.Identity(), query, key, key, is_causal=True, sliding_window=window)
    assert seen == [(window is not None, grouped, 2 if grouped else 4)]


EXPERTS = ["mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "qwen3_next"]


def build_with(name: str, experts: str, precision: dict[str, Any] | None = None, **changes: Any) -> Any:
    model = materialise(build(name, precision=precision, keys={"experts": experts}, **changes))
    shake(model)
    return model


def loss_and_gradients(model: Any) -> dict[str, torch.Tensor]:
    ids = token_ids(4)
    total, count = model(ids, ids)
    (total / count).backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": (total / count).detach()} | grads


@pytest.mark.slow
@pytest.mark.parametrize("name", families(EXPERTS))
def test_every_implementation_gives_what_the_loop_gives(name: str) -> None:
    loop = build_with(name, "auto")
    loop.set_experts_implementation("eager")
    expected = loss_and_gradients(loop)
    assert any("experts" in fqn for fqn in expected)
    for experts in ("auto", "dense", "batched_mm", "grouped_mm"):
        model = build_with(name, experts)
        ours = "grouped_mm" if experts == "auto" else experts
        assert model.config._experts_implementation == f"portable_fsdp_{ours}"
        tensors = loss_and_gradients(model)
        assert tensors.keys() == expected.keys()
        torch.testing.assert_close(tensors, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", families(EXPERTS))
def test_nothing_depends_on_the_routing(name: str) -> None:
    """The same operators on the same shapes whatever the tokens are, and none that asks the host."""
    model = build_with(name, "dense")
    runs: list[list[Any]] = []
    for ids in (token_ids(), torch.zeros_like(token_ids())):
        with Operators() as operators:
            logits(model, ids)
        operators.require_no_reads()
        runs.append(operators.calls)
    assert runs[0] == runs[1]


def test_experts_that_cannot_be_set_are_refused() -> None:
    for experts in ("dense", "batched_mm", "grouped_mm"):
        with pytest.raises(ConfigError, match=rf"model\.experts={experts}: LlamaForCausalLM has no"):
            build("llama", keys={"experts": experts})
    with pytest.raises(ConfigError, match=r"experts=grouped_mm: .*16 bytes, .* model\.layers\.0\.mlp\.experts\..*\["):
        build_with("qwen3_moe", "grouped_mm", moe_intermediate_size=18)
    with pytest.raises(ConfigError, match=r"with 2 bytes per value"):
        build_with("qwen3_moe", "grouped_mm", {"compute": "bfloat16"})  # 20 numbers: 40 bytes
