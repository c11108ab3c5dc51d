"""A plain PyTorch loop in one process, which every engine is compared with. Of ours: the weights and the rows.

The model is transformers' own with its own attention; the loss is torch's cross entropy over all logits.
"""

import functools
from dataclasses import dataclass

import torch
from cases import GLOBAL_BATCH, SEQ_LEN, Case, CaseRows
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.data.order import sample_indices
from portable_fsdp.models.build import build_model
from portable_fsdp.optim.schedule import learning_rate

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass
class Reference:
    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, torch.Tensor]  # of step 1, before clipping
    initial: dict[str, torch.Tensor]
    final: dict[str, torch.Tensor]


def _model(case: Case) -> torch.nn.Module:
    section = case.config(1).model
    built = build_model(section, seed=case.seed, seq_len=SEQ_LEN, vocabulary=256)
    architecture = dict(section.architecture or {})
    config = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
    for key in ("resid_pdrop", "embd_pdrop", "attn_pdrop", "dropout", "attention_dropout"):
        if hasattr(config, key):
            setattr(config, key, 0.0)
    # Gemma 2's softcap exists in eager only.
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager" if case.model == "gemma2" else "sdpa")
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            parameter.copy_(built.fill(fqn, tuple(slice(0, size) for size in parameter.shape)))
    return model.train()


def _optimizer(case: Case, model: torch.nn.Module) -> torch.optim.Optimizer:
    optim = case.config(1).optim
    groups = [
        {"params": [p for p in model.parameters() if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in model.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
    return torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps)


@functools.cache
def reference_of(
    model: str, steps: int, optim: tuple[tuple[str, object], ...], limit: float | None, seed: int
) -> Reference:
    case = Case(model=model, steps=steps, optim=dict(optim), max_grad_norm=limit, seed=seed)
    return _train(case)


def reference(case: Case) -> Reference:
    """The float32 run of a case; what only concerns engines (strategy, precision, micro batches) doesn't change it."""
    return reference_of(case.model, case.steps, tuple(sorted(case.optim.items())), case.max_grad_norm, case.seed)


def _train(case: Case) -> Reference:
    torch.set_num_threads(1)
    model, rows = _model(case), CaseRows()
    optimizer = _optimizer(case, model)
    out = Reference([], [], {}, {n: p.detach().clone() for n, p in model.named_parameters()}, {})
    for step in range(1, case.steps + 1):
        positions = torch.arange((step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH).numpy()
        batch = rows.rows(sample_indices(case.seed, positions, len(rows)))
        logits = model(input_ids=batch["input_ids"], use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
        loss.backward()
        if step == 1:
            out.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(case.config(1).optim, step, case.steps)
        optimizer.step()
        optimizer.zero_grad()
        out.losses.append(loss.item())
        out.grad_norms.append(norm.item())
    out.final = {n: p.detach().clone() for n, p in model.named_parameters()}
    return out
