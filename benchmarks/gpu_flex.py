"""model.attention=flex against static on this device: rows of documents, the same losses, and how long a step takes.

Part of the checks of `gpu.py`. On the CPU, where flex is refused, sdpa stands in for it: does the script itself work.
"""

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from portable_fsdp.backends.contract import Batch
from portable_fsdp.backends.open import open_backend
from portable_fsdp.config.schema import Config
from portable_fsdp.train.build import build_training

STEPS, ROWS, SEQ_LEN, DOCUMENT = 4, 4, 512, 100  # documents of so many tokens, more or less
TIMED_ROWS, TIMED_SEQ_LEN, TIMED_DOCUMENT, WARM_UP, TIMED = 4, 4096, 500, 3, 10
VOCABULARY = 1024
BOUNDS = {"float32": 1e-5, "bfloat16": 2e-3}  # relative, of each step's loss

_SIZES = {"vocab_size": VOCABULARY, "max_position_embeddings": TIMED_SEQ_LEN, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = _SIZES | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "pad_token_id": None}
_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
LLAMA: dict[str, Any] = _SMALL | _HEADS | {"model_type": "llama"}
WINDOWS = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
GEMMA2: dict[str, Any] = _SMALL | _HEADS | WINDOWS | {"model_type": "gemma2", "attn_logit_softcapping": 2.0}
GPT_OSS: dict[str, Any] = (
    _SMALL
    | _HEADS
    | WINDOWS
    | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
)
TIMED_LLAMA: dict[str, Any] = _SIZES | {
    **{"model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}
BFLOAT16 = {"precision.compute": "bfloat16"}
FULL = {"memory.gradient_checkpointing": "full"}
COMPILED = {"compile.enabled": True}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "llama": (LLAMA, {}),
    "windows, softcap": (GEMMA2, {}),
    "sinks": (GPT_OSS, {}),
    "stream": (LLAMA, {"data.packing": "stream"}),
    "checkpointing full": (GEMMA2, FULL),
    "bfloat16": (LLAMA, BFLOAT16),
    "bfloat16, compile, checkpointing full": (GEMMA2, {**BFLOAT16, **FULL, **COMPILED}),
}
TINY_CASES = ("llama", "bfloat16")


def flex_checks(device: str, tiny: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    other = "flex" if device == "cuda" else "sdpa"
    for name in CASES if not tiny else TINY_CASES:
        yield f"{other}: {name}", lambda name=name: _equal_losses(*CASES[name], other, device)
    if device == "cuda":
        yield "flex: tokens/s and peak", lambda: _beside_static(device)


def _equal_losses(architecture: dict[str, Any], settings: dict[str, Any], other: str, device: str) -> dict[str, Any]:
    """Of a few steps with static attention and with the other."""
    ways = {"static": "static", other: other}
    losses = {
        way: _steps(_config(architecture, way, settings, ROWS, SEQ_LEN), STEPS, DOCUMENT, device)[0] for way in ways
    }
    worst = max(abs(a - b) / b for a, b in zip(losses[other], losses["static"], strict=True))
    bound = BOUNDS["bfloat16" if "precision.compute" in settings else "float32"]
    if not worst <= bound:
        raise RuntimeError(f"expected losses within {bound:g} of static attention's, found {worst:.2g}: {losses}")
    return {"worst_relative_difference": worst, "bound": bound, "losses": losses}


def _beside_static(device: str) -> dict[str, Any]:
    """Tokens a second (padding counted) and peak memory of both, with documents of about 500 tokens in rows of 4096."""
    figures: dict[str, Any] = {}
    for way in ("static", "flex"):
        config = _config(TIMED_LLAMA, way, BFLOAT16, TIMED_ROWS, TIMED_SEQ_LEN)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        _, seconds = _steps(config, WARM_UP + TIMED, TIMED_DOCUMENT, device)
        figures[f"{way}: tokens_per_second"] = TIMED_ROWS * TIMED_SEQ_LEN * TIMED / sum(seconds[WARM_UP:])
        figures[f"{way}: peak_bytes"] = torch.cuda.max_memory_allocated()
    figures["flex_over_static"] = figures["flex: tokens_per_second"] / figures["static: tokens_per_second"]
    return figures


def _steps(config: Config, count: int, document: int, device: str) -> tuple[list[float], list[float]]:
    """Losses and seconds of `count` steps; the host waits for each."""
    losses: list[float] = []
    seconds: list[float] = []
    with open_backend(config, device=device, backend="native") as backend:
        training = build_training(config, backend, vocabulary=VOCABULARY)
        for number in range(count):
            rows = _batch(config, document, number)
            batch, counted = backend.place(rows), float((rows["labels"] != -100).sum())
            began = time.perf_counter()
            losses.append(backend.fetch(training.step([batch], 1e-4, [counted])).result()["loss"].item())
            seconds.append(time.perf_counter() - began)
    return losses, seconds


def _batch(config: Config, document: int, seed: int) -> Batch:
    """Rows of documents of about the same length, the last of a row cut off; 7 positions of padding."""
    rows, length = config.train.resolved_micro_batch, config.data.seq_len
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (rows, length), generator=generator)
    starts = torch.rand((rows, length), generator=generator) < 1 / document
    starts[:, 0] = True
    segments = starts.cumsum(dim=1)
    place = torch.arange(length).expand(rows, -1)
    positions = place - torch.where(starts, place, 0).cummax(dim=1).values
    padding = place >= length - 7
    ends = torch.cat([starts[:, 1:], torch.ones(rows, 1, dtype=torch.bool)], dim=1) | padding
    labels = ids.roll(-1, dims=1).masked_fill(ends, -100)
    documents: dict[str, Tensor] = {}
    if config.data.resolved_packing == "documents":
        documents = {"positions": positions.masked_fill(padding, 0), "segments": segments.masked_fill(padding, 0)}
    return {"input_ids": ids, "labels": labels, **documents}


def _config(architecture: dict[str, Any], attention: str, settings: dict[str, Any], rows: int, seq_len: int) -> Config:
    values: dict[str, dict[str, Any]] = {
        "model": {"architecture": architecture, "attention": attention},
        "data": {"seq_len": seq_len, "packing": "documents"},
        "train": {"steps": 100, "global_batch": rows, "micro_batch": rows},
    }
    for key, value in settings.items():
        section, _, leaf = key.partition(".")
        values.setdefault(section, {})[leaf] = value
    return Config.model_validate(values)
