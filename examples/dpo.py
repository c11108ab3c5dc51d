"""Direct preference optimization (arXiv 2305.18290): two forwards and a frozen reference, see dpo.yaml beside it."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, logsigmoid
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM

import portable_fsdp as pf


class Preference(nn.Module):
    """The log-probability of a text by the policy, less that by the model that it started from."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.policy: nn.Module = LlamaForCausalLM(config)
        self.reference = copy.deepcopy(self.policy).requires_grad_(False)

    def forward(self, ids: Tensor) -> Tensor:
        with torch.no_grad():
            before = self.log_probability(self.reference, ids)
        return self.log_probability(self.policy, ids) - before

    def log_probability(self, model: nn.Module, ids: Tensor) -> Tensor:
        logits: Tensor = model(input_ids=ids[:, :-1], use_cache=False).logits
        return -cross_entropy(logits.transpose(1, 2), ids[:, 1:], reduction="none").sum(dim=1)


class Pairs(Dataset[dict[str, Tensor]]):
    """Preferred texts use the lower half of the vocabulary."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(index)
        draws = {"chosen": 32, "rejected": 64}
        return {name: torch.randint(0, words, (16,), generator=generator) for name, words in draws.items()}


def model() -> nn.Module:
    sizes: dict[str, Any] = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 64}
    # transformers' own attention would read a mask on the host, which XLA can't.
    sizes |= {"num_attention_heads": 4, "attn_implementation": pf.register_static_attention()}
    return Preference(LlamaConfig(**sizes))


def data(split: str) -> Pairs:
    return Pairs()


def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    margin = model(batch["chosen"]) - model(batch["rejected"])
    losses = -logsigmoid(0.1 * margin)  # beta
    return losses.sum(), torch.ones_like(losses).sum(), {"accuracy": (margin > 0).sum()}
