"""Samples during training: greedy decoding with the sharded weights.

One program computes the next token of each row; the host appends it and runs the program again. Rows have one shape, so
XLA compiles it once. There is no KV cache: every engine runs the forward of training.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from portable_fsdp.backends.contract import Backend, Batch, Metrics
from portable_fsdp.config import schema
from portable_fsdp.data.tokenize import Tokenizer
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.limits import Limit, limited

_BLOCK = 128
"""Row lengths are multiples of it, as attention kernels require, or equal data.seq_len."""


class Sampler:
    """Completes the prompts of `train`, in rows of at most `seq_len` tokens."""

    def __init__(
        self, backend: Backend, model: nn.Module, tokenizer: Tokenizer, train: schema.Train, seq_len: int
    ) -> None:
        """Tokenize the prompts. Raises ConfigError for a prompt without tokens, or too long for its text to fit."""
        self._backend, self._tokenizer, self._tokens = backend, tokenizer, train.sample_tokens
        if train.sample_tokens >= seq_len:
            raise ConfigError(f"train.sample_tokens: expected less than data.seq_len={seq_len}, found {self._tokens}.")
        limit = Limit(len(train.sample_prompts), sum(map(len, train.sample_prompts)))
        encode = partial(tokenizer.encode_all, train.sample_prompts, special_tokens=True)
        self._prompts = [ids.tolist() for ids in limited(encode, "train.sample_prompts", limit)]
        for prompt, ids in zip(train.sample_prompts, self._prompts, strict=True):
            if not ids:
                raise ConfigError(f"train.sample_prompts: the prompt {prompt!r} has no tokens; give some text.")
            if len(ids) + train.sample_tokens > seq_len:
                raise ConfigError(
                    f"train.sample_prompts: expected at most {seq_len - train.sample_tokens} tokens in each "
                    f"(data.seq_len - train.sample_tokens), found {len(ids)} in {prompt[:40]!r}.\n"
                    "  Shorten it, or lower train.sample_tokens."
                )
        longest = max(map(len, self._prompts)) + train.sample_tokens
        self._length = min(seq_len, -(-longest // _BLOCK) * _BLOCK)
        shards = backend.row_shards
        self._rows = shards * min(train.resolved_micro_batch, -(-len(self._prompts) // shards))  # of all processes
        # Like transformers' `generate`, from the model's generation config: an id, several, or None.
        ends: Any = getattr(cast(Any, model).generation_config, "eos_token_id", None)
        self._ends = set[int | None](ends if isinstance(ends, list) else [ends])

        def sample(batch: Batch, control: Batch) -> Metrics:
            with backend.evaluate():
                tokens = model(batch["input_ids"], None).argmax(dim=-1)
            newest = (tokens * batch["is_last"]).sum(dim=1, keepdim=True)
            by_row = (newest * batch["is_row"]).sum(dim=0).float()  # exact: ids are below 2**24
            return {"tokens": torch.cat([backend.sum(by_row), backend.sum_control(control["control"])])}

        self._next = backend.compile(sample, "sample")

    def __call__(self, stop: Callable[[], bool] = lambda: False) -> list[str] | None:
        """Return one completion per prompt (prompt included), identical on all processes; None after a stop request on
        any of them. *collective*"""
        texts: list[str] = []
        for begin in range(0, len(self._prompts), self._rows):
            rows = [list(prompt) for prompt in self._prompts[begin : begin + self._rows]]
            unfinished = list(range(len(rows)))
            for _ in range(self._tokens):
                placed = self._backend.place(self._batch(rows))
                control = {"control": self._backend.place_control([float(stop())])}
                *ids, stops = self._backend.fetch(self._next(placed, control)).result()["tokens"].tolist()
                if stops:
                    return None
                for number in unfinished:
                    rows[number].append(int(ids[number]))
                unfinished = [number for number in unfinished if rows[number][-1] not in self._ends]
                if not unfinished:
                    break
            texts += map(self._tokenizer.decode, rows)
        return texts

    def _batch(self, rows: Sequence[list[int]]) -> Batch:
        """Return this process's rows: int64 `[rows, length]` `input_ids` and `is_last` (1 at a row's last token); int64
        `[rows, rows of all processes]` `is_row`."""
        ids = torch.full((self._rows, self._length), self._tokenizer.padding)
        is_last = torch.zeros_like(ids)
        for number, row in enumerate(rows):
            ids[number, : len(row)] = torch.tensor(row)
            is_last[number, len(row) - 1] = 1
        shard = self._backend.data_shard
        own = slice(self._rows * shard.index // shard.count, self._rows * (shard.index + 1) // shard.count)
        is_row = torch.eye(self._rows, dtype=torch.int64)[own]
        return {"input_ids": ids[own], "is_last": is_last[own], "is_row": is_row}
