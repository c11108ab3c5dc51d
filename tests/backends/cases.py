"""The models and rows that runs on all engines are compared on, in odd sizes: nothing divides by 3 or 4 devices.

And the global tensors that a group's processes hold together.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch.nn import functional as F

from portable_fsdp.config.schema import Config
from portable_fsdp.data.packing import Rows, sample_indices

VOCABULARY, SEQ_LEN, ROWS, GLOBAL_BATCH = 1009, 24, 60, 12
_SIZES = {"hidden_size": 72, "num_hidden_layers": 2, "num_attention_heads": 6, "vocab_size": VOCABULARY}
_COMMON = _SIZES | {"max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}
_GROUPED = _COMMON | {"intermediate_size": 150, "num_key_value_heads": 2}
ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": _GROUPED | {"model_type": "llama"},
    "llama_tied": _GROUPED | {"model_type": "llama", "num_key_value_heads": 3, "tie_word_embeddings": True},
    "qwen3": _GROUPED | {"model_type": "qwen3", "head_dim": 12},
    "gpt2": {"model_type": "gpt2", "n_embd": 72, "n_layer": 2, "n_head": 6, "vocab_size": VOCABULARY}
    | {"n_positions": 64, "bos_token_id": 1, "eos_token_id": 2},
    "opt": _COMMON | {"model_type": "opt", "ffn_dim": 150, "word_embed_proj_dim": 72},
    "mixtral": _GROUPED | {"model_type": "mixtral", "intermediate_size": 64, "num_local_experts": 4},
    # Gemma 2: window, two softcaps, scaled embeddings (a buffer), biases of none; the second layer sees all.
    "gemma2": _GROUPED | {"model_type": "gemma2", "head_dim": 12, "sliding_window": 7},
    # Two layers with a window and one that sees all, each kind with its own rotary frequencies.
    "gemma3_text": _GROUPED
    | {"model_type": "gemma3_text", "head_dim": 12, "num_hidden_layers": 3, "sliding_window": 7}
    | {"layer_types": ["sliding_attention", "sliding_attention", "full_attention"]},
    "qwen3_moe": _GROUPED
    | {"model_type": "qwen3_moe", "num_experts": 5, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 40, "decoder_sparse_step": 1},
    # Sinks, biases of the experts, transposed expert weights.
    "gpt_oss": _GROUPED
    | {"model_type": "gpt_oss", "intermediate_size": 50, "head_dim": 12, "sliding_window": 7}
    | {"num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": ["sliding_attention", "full_attention"]}
    | {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}},
    # Latent attention, a dense layer and one of experts: grouped ones, one shared, and a persistent buffer.
    "deepseek_v3": _GROUPED
    | {"model_type": "deepseek_v3", "num_key_value_heads": 6, "q_lora_rank": 24}
    | {"kv_lora_rank": 16, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "n_routed_experts": 4}
    | {"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "moe_intermediate_size": 40}
    | {"first_k_dense_replace": 1, "n_shared_experts": 1},
    "qwen2": _GROUPED | {"model_type": "qwen2"},
    "mistral": _GROUPED | {"model_type": "mistral", "sliding_window": 7},
    "phi": _GROUPED | {"model_type": "phi"},
    "phi3": _GROUPED | {"model_type": "phi3", "sliding_window": 7},
    "olmo2": _GROUPED | {"model_type": "olmo2"},
    "gpt_neox": _COMMON | {"model_type": "gpt_neox", "intermediate_size": 150},
    # Their own attention, with biases by distance (ALiBi) or rotary embeddings.
    "bloom": {"model_type": "bloom", "hidden_size": 72, "n_layer": 2, "n_head": 6, "vocab_size": VOCABULARY}
    | {"bos_token_id": 1, "eos_token_id": 2},
    "falcon": _COMMON | {"model_type": "falcon", "num_kv_heads": 1, "alibi": False},
    "falcon_alibi": _COMMON | {"model_type": "falcon", "num_kv_heads": 1, "alibi": True},
    "stablelm": _GROUPED | {"model_type": "stablelm", "num_attention_heads": 3, "num_key_value_heads": 3},
    "starcoder2": _GROUPED | {"model_type": "starcoder2", "sliding_window": 7},
    "granite": _GROUPED
    | {"model_type": "granite", "attention_multiplier": 0.4, "embedding_multiplier": 3.0}
    | {"residual_multiplier": 0.5, "logits_scaling": 2.0},
    "smollm3": _GROUPED
    | {"model_type": "smollm3", "no_rope_layers": [1, 0], "use_sliding_window": True, "sliding_window": 7}
    | {"layer_types": ["sliding_attention", "full_attention"]},
    # Linear attention in one layer, experts in both.
    "qwen3_next": _GROUPED
    | {"model_type": "qwen3_next", "head_dim": 12, "num_experts": 5, "num_experts_per_tok": 2}
    | {"moe_intermediate_size": 40, "shared_expert_intermediate_size": 40}
    | {"layer_types": ["linear_attention", "full_attention"], "linear_num_value_heads": 4, "linear_num_key_heads": 2}
    | {"linear_key_head_dim": 6, "linear_value_head_dim": 6},
    # No attention at all.
    "mamba2": {"model_type": "mamba2", "hidden_size": 72, "num_hidden_layers": 2, "vocab_size": VOCABULARY}
    | {"state_size": 10, "num_heads": 6, "head_dim": 24, "expand": 2, "n_groups": 1, "chunk_size": 8}
    | {"bos_token_id": 1, "eos_token_id": 2},
}

ONE_LAYER: dict[str, Any] = {"model.architecture": ARCHITECTURES["llama"] | {"num_hidden_layers": 1}}
"""For tests that need no second layer: XLA's compile time grows with the number of layers."""


TINY: dict[str, dict[str, Any]] = {
    "run": {"dir": "run"},
    "model": {
        "architecture": {"model_type": "llama", "vocab_size": 256, "hidden_size": 32, "intermediate_size": 64}
        | {"num_hidden_layers": 1, "num_attention_heads": 2}
    },
    "data": {"source": "python_docs", "seq_len": 32},
    "train": {"steps": 4, "global_batch": 4},
    "optim": {"warmup_steps": 1},
}
"""The config of a whole run of seconds."""


@dataclass(frozen=True)
class Case:
    """One run: what is trained, and how. Devices are not part of it."""

    model: str = "llama"
    steps: int = 10
    optim: dict[str, Any] = field(default_factory=lambda: {"name": "adamw", "lr": 1e-3, "weight_decay": 0.1})
    max_grad_norm: float | None = 0.5
    micro_batch: int | None = None  # None: all of a device's rows at once
    strategy: str = "FULL_SHARD"
    compute: str = "float32"
    reduce: str = "auto"
    checkpointing: str = "none"
    seed: int = 7
    settings: dict[str, Any] = field(default_factory=lambda: {})  # any other key, dotted: {"model.freeze": [...]}

    def config(self, devices: int) -> Config:
        values: dict[str, dict[str, Any]] = {
            "run": {"seed": self.seed},
            "model": {"architecture": ARCHITECTURES[self.model]},
            "data": {"seq_len": SEQ_LEN},
            "train": {
                "steps": self.steps,
                "global_batch": GLOBAL_BATCH,
                "micro_batch": self.micro_batch or GLOBAL_BATCH // devices,
                "max_grad_norm": self.max_grad_norm,
            },
            "optim": {"schedule": "cosine", "warmup_steps": 3, **self.optim},
            "sharding": {"strategy": self.strategy},
            "precision": {"compute": self.compute, "reduce": self.reduce},
            "memory": {"gradient_checkpointing": self.checkpointing},
        }
        for key, value in self.settings.items():
            section, _, name = key.partition(".")
            values.setdefault(section, {})[name] = value
        return Config.model_validate(values)


class CaseRows(Rows):
    """Rows that can be learnt, with counted labels that differ from row to row (a mean of means would be wrong)."""

    def __init__(self, count: int = ROWS) -> None:
        self._count = count

    def __len__(self) -> int:
        return self._count

    def rows(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        ids, labels = zip(*(self._row(int(index)) for index in indices), strict=True)
        return {"input_ids": torch.stack(ids), "labels": torch.stack(labels)}

    def order(self, seed: int, positions: np.ndarray) -> np.ndarray:
        return sample_indices(seed, positions, self._count)

    def fingerprint(self) -> str:
        return str(self._count)

    @staticmethod
    def _row(index: int) -> tuple[torch.Tensor, torch.Tensor]:
        row = _tokens(index)
        labels = row[1:].clone()
        labels[: index % (SEQ_LEN - 1)] = -100
        return row[:-1], labels


def _tokens(index: int) -> torch.Tensor:
    """`[SEQ_LEN + 1]`"""
    generator = torch.Generator().manual_seed(1000 + index)
    start, stride = torch.randint(0, VOCABULARY, (2,), generator=generator).tolist()
    return (start + (1 + stride % 3) * torch.arange(SEQ_LEN + 1)) % VOCABULARY


class PackedCaseRows(CaseRows):
    """Rows of three documents and padding, each of another length, some with labels that don't count."""

    def rows(self, indices: np.ndarray) -> dict[str, torch.Tensor]:
        rows = [self._packed(int(index)) for index in indices]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    def alone(self, indices: np.ndarray) -> list[dict[str, torch.Tensor]]:
        """Each document in a row of its own, padded: `input_ids` and `labels` `[1, seq]`."""
        return [
            {"input_ids": _filled(ids, 0)[None], "labels": _filled(labels, -100)[None]}
            for index in indices
            for ids, labels in self.documents(int(index))
        ]

    @staticmethod
    def documents(index: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Ids and labels, `[length]`."""
        row = _tokens(index)
        first, last = 3 + index % 7, SEQ_LEN - index % 4
        labels = row[1:].where(torch.arange(SEQ_LEN) % 8 != index % 8, -100)
        labels[[first - 1, 13, last - 1]] = -100  # what follows a document is another's
        return [(row[part], labels[part]) for part in (slice(0, first), slice(first, 14), slice(14, last))]

    def _packed(self, index: int) -> dict[str, torch.Tensor]:
        documents = self.documents(index)
        places = torch.cat([torch.arange(len(ids)) for ids, _ in documents])
        numbers = torch.cat([torch.full((len(ids),), number) for number, (ids, _) in enumerate(documents, 1)])
        return {
            "input_ids": _filled(torch.cat([ids for ids, _ in documents]), 0),
            "labels": _filled(torch.cat([labels for _, labels in documents]), -100),
            "positions": _filled(places, 0),
            "segments": _filled(numbers, 0),
        }


def _filled(values: torch.Tensor, padding: int) -> torch.Tensor:
    return F.pad(values, (0, SEQ_LEN - len(values)), value=padding)


def rows_of(config: Config) -> CaseRows:
    return PackedCaseRows() if config.data.resolved_packing == "documents" else CaseRows()


def assemble(states: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
    """Each tensor put together; fails unless the pieces of all processes tile it exactly once (C4)."""
    keys = {tuple(state) for state in states}
    assert len(keys) == 1, "processes name different tensors"
    whole: dict[str, torch.Tensor] = {}
    for key in states[0]:
        kinds = {(tuple(state[key][0]), state[key][1]) for state in states}
        assert len(kinds) == 1, f"{key}: processes disagree: {kinds}"
        shape, dtype = kinds.pop()
        tensor = torch.zeros(shape, dtype=getattr(torch, dtype.removeprefix("torch.")))
        written = torch.zeros(shape, dtype=torch.int32)
        for state in states:
            for offset, data in state[key][2]:
                assert data.dtype == tensor.dtype, f"{key}: piece is {data.dtype}"
                where = tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))
                tensor[where] = data
                written[where] += 1
        assert bool((written == 1).all()), f"{key}: written {written.min()} to {written.max()} times"
        whole[key] = tensor
    return whole


def assert_equal_states(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    """Bit for bit, keys and dtypes included."""
    assert actual.keys() == expected.keys()
    differ = [k for k in expected if actual[k].dtype != expected[k].dtype or not torch.equal(actual[k], expected[k])]
    assert not differ, f"{len(differ)} of {len(expected)} tensors differ: {differ[:3]}"


def size_of(shape: tuple[int, ...], shards: int = 1) -> int:
    """Elements of a tensor, its rows padded to a multiple of `shards`."""
    return -(-shape[0] // shards) * shards * torch.Size(shape[1:]).numel()
