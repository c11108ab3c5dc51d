"""A trial that static attention computes what a model's own does: its mask may say more than attention's arguments.

A small copy of the model runs with both (Doge adds its own mask, Llama 4 attends within chunks of a row).
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

_TOKENS, _VOCABULARY = 16, 64  # more tokens than any window and chunk of a small copy
_BOUND = 1e-4  # relative to the largest logit: a hundred times float32's rounding

KNOWN = frozenset(
    {"deepseek_v3", "gemma2", "gemma3_text", "gpt2", "gpt_neox", "gpt_oss", "granite", "llama", "mistral", "mixtral"}
    | {"olmo2", "opt", "phi", "phi3", "qwen2", "qwen3", "qwen3_moe", "smollm3", "stablelm", "starcoder2"}
)
"""Types of models for which both are equal. A test runs the trial for each."""


def find_difference(model: Any, build: Callable[..., Any], known: frozenset[str] = KNOWN) -> str:
    """Describe how a small copy's logits under static attention differ from those under its own; empty: they don't.

    `build(config, attention=...)` returns a model of that transformers config on the host, in float32.
    """
    if model.config.model_type in known:
        return ""
    from portable_fsdp.models.document_masks import try_small_copies  # a run of a known type doesn't load it

    def compare(copied: Any, ours: Tensor) -> str:
        own = build(copied.config, attention="eager").eval()
        own.load_state_dict(copied.state_dict())
        if not (_logits(own) - ours).abs().max() < _BOUND * ours.abs().max():
            return _sees_later(ours) or "its mask says more than causality and windows"
        return ""

    return try_small_copies(model, partial(build, attention="static"), _logits, compare)


def is_causal(model: Any, build: Callable[..., Any]) -> bool:
    """Whether a small copy with the model's own attention doesn't see later tokens. `build`: as above."""
    from portable_fsdp.models.document_masks import try_small_copies

    own = partial(build, attention="eager")
    return not try_small_copies(model, own, _logits, lambda _, logits: _sees_later(logits))


def _logits(copied: Any) -> Tensor:
    """The logits of two rows that differ in their last token."""
    ids = torch.randint(1, _VOCABULARY, (1, _TOKENS), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, -1] = (changed[:, -1] + 1) % _VOCABULARY
    return torch.cat([copied(input_ids=rows, use_cache=False).logits for rows in (ids, changed)])


def _sees_later(logits: Tensor) -> str:
    apart = (logits[0, :-1] - logits[1, :-1]).abs().max()
    return "" if apart < _BOUND * logits.abs().max() else "tokens would see later ones"
