"""A plain PyTorch loop in one process, which every engine is compared with. Of ours: the weights and the rows.

The model is transformers' own with its own attention and experts, the loss torch's cross entropy over all logits.
"""

from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import numpy as np
import torch
import transformers
from cases import GLOBAL_BATCH, SEQ_LEN, Case, CaseRows, PackedCaseRows, rows_of
from plain_dropout import PlainDropout
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.backends.state import dropouts
from portable_fsdp.config.describe import matches
from portable_fsdp.config.schema import Precision
from portable_fsdp.data.packing import sample_indices
from portable_fsdp.models.build import build_model
from portable_fsdp.models.lora import peft_keys
from portable_fsdp.optim.optimizer import learning_rate

# Settings that change what is computed; all others only say how an engine does it.
OF_THE_LOOP = (
    "model.architecture",
    "model.pretrained",
    "model.router_bias_rate",
    "model.freeze",
    "model.train_only",
    "model.lora",
    "model.dropout",
    "model.attention",
    "precision.frozen",
    "optim.groups",
    "data.packing",
    "train.global_batch",
)
# Softcap, sinks and ALiBi exist in eager only; the last attends to nothing.
OWN_ATTENTION = {"gemma2": "eager", "gpt_oss": "eager", "bloom": "eager", "mamba2": "eager"}


@dataclass
class Reference:
    losses: list[float]
    grad_norms: list[float]
    gradients: dict[str, Tensor]  # of step 1, before clipping
    initial: dict[str, Tensor]
    router_losses: list[float] = field(default_factory=list[float])
    loads: list[Tensor] = field(default_factory=list[Tensor])  # `[layers, experts]` choices of each step
    biases: dict[str, Tensor] = field(default_factory=dict[str, Tensor])  # after the last step


def _model(case: Case) -> nn.Module:
    section, precision = case.config(1).model, Precision(frozen=case.config(1).precision.frozen)
    built = build_model(section, precision, seed=case.seed, seq_len=SEQ_LEN, vocabulary=256)
    architecture = built.config if section.architecture is None else section.architecture
    assert isinstance(architecture, dict)
    architecture = dict(architecture)
    config = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
    for key in config.to_dict():
        if "drop" in key and isinstance(getattr(config, key), float) and key != "layerdrop":
            is_drawn = "att" not in key or section.attention == "static"  # with model.attention=auto no kernel draws
            setattr(config, key, section.dropout if section.dropout and is_drawn else 0.0)
    config._experts_implementation = "eager"
    attention = "eager" if section.dropout else OWN_ATTENTION.get(config.model_type, "sdpa")
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention)
    if section.lora is not None:
        import peft

        lora = section.lora
        settings = peft.LoraConfig(
            r=lora.r,
            lora_alpha=cast(int, lora.alpha),
            use_rslora=lora.rslora,
            use_dora=lora.dora,
            lora_dropout=lora.dropout,
            rank_pattern=dict(lora.rank_pattern),
            alpha_pattern=dict(lora.alpha_pattern),
            target_modules="all-linear"
            if lora.targets == ("all-linear",)
            else lora.targets
            if isinstance(lora.targets, str)
            else [n for n in lora.targets if "." not in n],
            target_parameters=None if isinstance(lora.targets, str) else [n for n in lora.targets if "." in n] or None,
            modules_to_save=[*lora.train_whole] or None,
            ensure_weight_tying=config.tie_word_embeddings and bool(lora.train_whole),
            fan_in_fan_out=config.model_type == "gpt2",
        )
        peft.inject_adapter_in_model(settings, model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            fqn = _ours(name, built.model)
            parameter.copy_(built.fill(fqn, tuple(slice(0, size) for size in parameter.shape)))
            if any(matches(pattern, fqn) for pattern in section.freeze):
                parameter.requires_grad_(False)
            if section.train_only and not any(matches(pattern, fqn) for pattern in section.train_only):
                parameter.requires_grad_(False)
    return model.train()


def _ours(name: str, model: nn.Module) -> str:
    """Our FQN of a parameter of peft's model: it has copies of modules that train whole, and nests those of experts."""
    names = [fqn for fqn, _ in model.named_parameters()]
    trained = {fqn for fqn, weight in model.named_parameters() if weight.requires_grad and ".lora_of." in fqn}
    for ours, theirs in (peft_keys(model, trained) if trained else {}).items():
        if theirs == f"base_model.model.{name.replace('.default', '')}":
            return ours
    name = name.replace(".modules_to_save.default", "").replace(".original_module", "")
    return name if name in names else name.replace(".base_layer", "")


def _optimizer(case: Case, model: nn.Module) -> torch.optim.Optimizer:
    """One group a parameter; `share`: of the schedule's learning rate."""
    optim = case.config(1).optim
    groups: list[dict[str, Any]] = []
    for fqn, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        decay, share = (optim.weight_decay if parameter.dim() >= 2 else 0.0), 1.0
        own = next((group for group in optim.groups if matches(group.match, fqn)), None)
        if own is not None:
            decay = decay if own.weight_decay is None else own.weight_decay
            share = 1.0 if own.lr is None else own.lr / optim.lr
        groups.append({"params": [parameter], "weight_decay": decay, "share": share})
    if optim.name == "sgd":
        return torch.optim.SGD(groups, lr=optim.lr, momentum=optim.momentum)
    if optim.name == "adafactor":  # as transformers' Trainer makes it
        return transformers.Adafactor(groups, lr=optim.lr, scale_parameter=False, relative_step=False)
    moments: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas}
    if optim.name == "lion" or optim.factory is not None:  # own_optimizers.py
        return PlainLion(groups, moments | ({"betas": (0.9, 0.99)} if optim.factory else {}))
    if optim.name == "muon":
        tables = [getattr(model, way)() for way in ("get_input_embeddings", "get_output_embeddings")]
        outer = {id(table.weight) for table in tables}
        for group in groups:
            group["is_matrix"] = group["params"][0].dim() == 2 and id(group["params"][0]) not in outer
        return PlainMuon(groups, {**moments, "eps": optim.eps, "momentum": optim.momentum})
    torchs = torch.optim.Adam if optim.name == "adam" else torch.optim.AdamW
    return torchs(groups, **moments, eps=optim.eps)


class PlainLion(torch.optim.Optimizer):
    """Program 1 of arXiv 2302.06675."""

    @torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                update = torch.sign(beta1 * m + (1 - beta1) * p.grad)
                m.copy_(beta2 * m + (1 - beta2) * p.grad)
                p -= lr * (update + group["weight_decay"] * p)


class PlainMuon(torch.optim.Optimizer):
    """torch.optim.Muon(adjust_lr_fn="match_rms_adamw"), but in float32, of matrices; AdamW of the rest."""

    @torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
    def step(self, closure: None = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            lr, (beta1, beta2), mu = group["lr"], group["betas"], group["momentum"]
            for p in group["params"]:
                g, state = p.grad, self.state[p]
                state["t"] = state.get("t", 0) + 1
                m, v = (state.setdefault(key, torch.zeros_like(p)) for key in ("m", "v"))
                p *= 1 - lr * group["weight_decay"]
                if group["is_matrix"]:
                    m.copy_(mu * m + (1 - mu) * g)
                    x = (1 - mu) * g + mu * m
                    x = x / x.norm()
                    for _ in range(5):
                        a = x @ x.T
                        x = 3.4445 * x - 4.775 * a @ x + 2.0315 * a @ a @ x
                    p -= lr * 0.2 * max(p.shape) ** 0.5 * x
                else:
                    m.copy_(beta1 * m + (1 - beta1) * g)
                    v.copy_(beta2 * v + (1 - beta2) * g * g)
                    root = (v / (1 - beta2 ** state["t"])).sqrt() + group["eps"]
                    p -= lr * m / (1 - beta1 ** state["t"]) / root


def loss_of_step(case: Case, model: nn.Module, step: int) -> Tensor:
    """The mean loss over the counted labels of a step's global batch, by the model's own logits."""
    return _loss(model, _batch_of_step(case, step))


def _batch_of_step(case: Case, step: int) -> dict[str, Tensor]:
    rows = rows_of(case.config(1))
    indices = _indices(case, step)
    return _together(rows.alone(indices)) if isinstance(rows, PackedCaseRows) else rows.rows(indices)


def _indices(case: Case, step: int) -> np.ndarray:
    global_batch = case.config(1).train.global_batch
    positions = np.arange((step - 1) * global_batch, step * global_batch)
    return sample_indices(case.seed, positions, len(rows_of(case.config(1))))


def _loss(model: nn.Module, batch: dict[str, Tensor], reduction: str = "mean") -> Tensor:
    return _both_losses(model, batch, reduction)[0]


def _both_losses(model: nn.Module, batch: dict[str, Tensor], reduction: str = "mean") -> tuple[Tensor, Tensor]:
    """The cross entropy, and the model's own auxiliary loss of its routers, times its coefficient; 0 if it has none."""
    out = model(input_ids=batch["input_ids"], use_cache=False)
    loss = F.cross_entropy(out.logits.float().flatten(0, 1), batch["labels"].flatten(), reduction=reduction)
    of_routers = getattr(out, "aux_loss", None)
    return loss, torch.zeros(()) if of_routers is None else cast(Any, model).router_aux_loss_coef * of_routers


def _holding(case: Case, weights: dict[str, Tensor]) -> nn.Module:
    model = _model(case)
    with torch.no_grad():
        for fqn, parameter in model.named_parameters():
            parameter.copy_(weights[fqn])
    return model


def evaluate(case: Case, weights: dict[str, Tensor], rows: CaseRows) -> tuple[float, int]:
    """The mean loss over the counted labels of all rows, and their number, row by row."""
    model, total, tokens = _holding(case, weights), 0.0, 0
    for index in range(len(rows)):
        batch = rows.rows(np.array([index]))
        with torch.no_grad():
            total += _loss(model, batch, "sum").item()
        tokens += int((batch["labels"] != -100).sum())
    return total / tokens, tokens


def generate(case: Case, weights: dict[str, Tensor]) -> list[str]:
    """The ids that transformers generates after each of train.sample_prompts, whose ids are their bytes."""
    model, train = _holding(case, weights).eval(), case.config(1).train
    texts: list[str] = []
    for prompt in train.sample_prompts:
        ids = torch.tensor([list(prompt.encode())])
        [text] = cast(Any, model).generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=train.sample_tokens
        )
        texts.append(" ".join(map(str, text.tolist())))
    return texts


def reference(case: Case, skipped: tuple[int, ...] = ()) -> Reference:
    """The float32 run of a case; what only concerns engines (strategy, precision, micro batches) doesn't change it.

    `skipped`: steps without an update.
    """
    settings = {key: value for key, value in case.settings.items() if key in OF_THE_LOOP}
    plain = Case(case.model, case.steps, case.optim, case.max_grad_norm, seed=case.seed, settings=settings)
    key = f"{plain} {skipped}"
    if key not in _trained:
        _trained[key] = _train(plain, skipped)
    return _trained[key]


_trained: dict[str, Reference] = {}


class Scaled(NamedTuple):
    """Results of each step under loss scaling."""

    losses: list[float]
    scales: list[float]
    skipped: tuple[int, ...]  # the steps without an update


def train_by_grad_scaler(case: Case, parts: int) -> Scaled:
    """Products in float16 of float32 weights, scaled by torch.amp.GradScaler. The rows of a step come in `parts`, one
    after another, as the devices have them."""
    torch.set_num_threads(1)
    model, precision, out = _model(case), case.config(1).precision, Scaled([], [], ())
    optimizer = _optimizer(case, model)
    window = precision.loss_scale_window
    scaler = torch.GradScaler("cpu", init_scale=precision.loss_scale, growth_interval=window)
    for step in range(1, case.steps + 1):
        batch = CaseRows().rows(_indices(case, step))
        count, loss, scale = (batch["labels"] != -100).sum(), 0.0, scaler.get_scale()
        for ids, labels in zip(*(batch[name].chunk(parts) for name in ("input_ids", "labels")), strict=True):
            halves = {name: weight.half() for name, weight in model.named_parameters()}
            logits = torch.func.functional_call(model, halves, (ids,), {"use_cache": False}).logits
            losses = F.cross_entropy(logits.float().flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
            scaler.scale(losses / count).backward()
            loss += losses.item() / count.item()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(case.config(1).optim, step, case.steps) * group["share"]
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        was_skipped = (step,) if scaler.get_scale() < scale else ()
        out = Scaled([*out.losses, loss], [*out.scales, scale], (*out.skipped, *was_skipped))
    return out


@torch.no_grad()  # pyright: ignore[reportUntypedFunctionDecorator]
def losses_of_documents(case: Case) -> list[float]:
    """Return the losses of the first, second and third documents, each in its own row, with the initial weights."""
    model, alone = _model(case), PackedCaseRows().alone(np.arange(GLOBAL_BATCH))
    return [_loss(model, _together(alone[number::3])).item() for number in range(3)]


def _together(batches: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.cat([batch[name] for batch in batches]) for name in batches[0]}


def _train(case: Case, skipped: tuple[int, ...]) -> Reference:
    torch.set_num_threads(1)
    model = _model(case)
    optimizer = _optimizer(case, model)
    out = Reference([], [], {}, {n: p.detach().clone() for n, p in model.named_parameters()})
    chosen, global_batch = _chosen_by_layer(model), case.config(1).train.global_batch
    drawn = PlainDropout(model, case.seed) if dropouts(model) else None
    for step in range(1, case.steps + 1):
        chosen.clear()
        with drawn.of_step((step - 1) * global_batch, global_batch) if drawn else nullcontext():
            loss, of_routers = _both_losses(model, _batch_of_step(case, step))
        (loss + of_routers).backward()
        if step == 1:
            out.gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(case.config(1).optim, step, case.steps) * group["share"]
        if step not in skipped:
            optimizer.step()
        optimizer.zero_grad()
        biases = {n: b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")}
        if chosen:
            out.loads.append(torch.stack(chosen))
            for bias, load in zip(biases.values(), chosen, strict=False):
                bias += case.config(1).model.router_bias_rate * torch.sign(load.mean() - load)
        out.biases = {name: bias.clone() for name, bias in biases.items()}
        out.losses.append(loss.item())
        out.grad_norms.append(norm.item())
        out.router_losses.append(of_routers.item())
    return out


def _chosen_by_layer(model: nn.Module) -> list[Tensor]:
    """A list to which each forward adds the number of tokens of each expert, layer by layer."""
    chosen: list[Tensor] = []

    def count(module: Any, args: tuple[Tensor, ...]) -> None:
        chosen.append(torch.bincount(args[1].flatten(), minlength=module.num_experts).float())

    for module in model.modules():
        if hasattr(module, "_apply_gate") and hasattr(module, "is_transposed"):
            module.register_forward_pre_hook(count)
    return chosen
