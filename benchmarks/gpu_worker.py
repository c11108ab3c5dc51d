"""The measurements of `gpu.py`, one function each, called in a separate process (runtime/child.py)."""

import gc
import os
import platform
import re
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import cache, partial
from importlib.metadata import version
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from types import MethodType
from typing import Any, cast
from unittest.mock import patch

import numpy as np
import torch
import torch.cuda.nccl as nccl
from loop_overhead import OurStep
from measuring import ROOT, Steps
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.backends.contract import Backend
from portable_fsdp.backends.open import open_backend
from portable_fsdp.config.describe import autos, changed_values, without_plan
from portable_fsdp.config.schema import Config
from portable_fsdp.convert.read import load_config
from portable_fsdp.data.build import Corpus
from portable_fsdp.data.packing import IGNORED, Rows
from portable_fsdp.data.tokenize import load_tokenizer
from portable_fsdp.models.architecture import architecture_mapping
from portable_fsdp.models.build import build_model
from portable_fsdp.models.flops import model_flops_per_token, peak_flops
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.optim.optimizer import learning_rate
from portable_fsdp.train.auto import resolve_auto
from portable_fsdp.train.build import build_training, open_batches
from portable_fsdp.train.measures import control_numbers

sys.path.insert(0, str(ROOT / "tests" / "backends"))
import jobs
from cases import ARCHITECTURES, Case, CaseRows, assemble, assert_equal_states
from reference import _batch_of_step, _loss, _model, _optimizer

CONFIG = ROOT / "configs" / "llama_1b.yaml"
PACKAGES = ("torch", "transformers", "accelerate", "triton", "numpy", "pydantic", "safetensors")
Row = dict[str, Any]
BFLOAT16 = {"precision.compute": "bfloat16"}
SELECTIVE = {"memory.gradient_checkpointing": "selective"}
EVERY_2 = {**SELECTIVE, "memory.every": 2}
SAVE_MATMUL = {**SELECTIVE, "memory.save_ops": ["matmul"]}
SAVE_ATTENTION = {**SELECTIVE, "memory.save_ops": ["attention"]}
FULL = {"memory.gradient_checkpointing": "full"}
COMPILED = {"compile.enabled": True}
OFFLOADED = {"memory.cpu_offload": True}


def sized(architecture: Row, seq_len: int, rows: int, settings: Row, *, steps: int = 20) -> Case:
    """A case of this shape with `rows` a step; `settings` have dotted keys."""
    size = {"data.seq_len": seq_len, "train.micro_batch": rows, "train.global_batch": rows}
    optim = {"name": "adamw", "lr": 1e-4}
    return Case(steps=steps, optim=optim, settings={"model.architecture": architecture, **size, **settings})


def train(config: Config, device: str, rows: Rows, steps: int) -> tuple[list[float], list[float]]:
    """Losses and seconds of the steps; the host waits for each."""
    losses: list[float] = []
    seconds: list[float] = []
    with ExitStack() as held:
        step = Steps(config, held, device=device, corpus=Corpus(rows, None))
        for _ in range(steps):
            began = time.perf_counter()
            losses.append(step()["loss"].item())
            seconds.append(time.perf_counter() - began)
    return losses, seconds


class Documents(CaseRows):
    """Rows of documents of about `document` tokens, the last of a row cut off; 7 positions of padding. Or of one text,
    without `document`. Low ids come more often, so that there is something to learn."""

    def __init__(self, config: Config, document: int | None, vocabulary: int = 256) -> None:
        super().__init__(1024)
        self._length, self._document, self._vocabulary = config.data.seq_len, document, vocabulary
        self._packed = config.data.resolved_packing == "documents"

    def rows(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        made = [self._made(int(index)) for index in indices]
        return {name: torch.stack([row[name] for row in made]) for name in made[0]}

    def _made(self, index: int) -> dict[str, Tensor]:
        """`[seq_len]` each"""
        generator, place = torch.Generator().manual_seed(index), torch.arange(self._length)
        ids = (torch.rand(self._length, generator=generator) ** 2 * self._vocabulary).long()
        starts, padding = place == 0, place >= self._length - (7 if self._document else 0)
        if self._document:
            starts |= torch.rand(self._length, generator=generator) < 1 / self._document
        ends = torch.cat([starts[1:], torch.ones(1, dtype=torch.bool)]) | padding
        row = {"input_ids": ids, "labels": ids.roll(-1).masked_fill(ends, IGNORED)}
        if self._packed:
            positions = place - torch.where(starts, place, 0).cummax(dim=0).values
            row |= {
                "positions": positions.masked_fill(padding, 0),
                "segments": starts.cumsum(0).masked_fill(padding, 0),
            }
        return row

    def unshifted(self, config: Config, steps: int) -> dict[str, Tensor]:
        """The rows of all steps in our order, with labels as transformers' models take them: they shift by one."""
        ids = self.rows(self.order(config.run.seed, np.arange(steps * config.train.global_batch)))["input_ids"]
        labels = ids.clone()
        labels[:, 0] = IGNORED  # never a target; and a Trainer that counts it would divide by too much
        return {"input_ids": ids, "labels": labels}


# ---------------------------------------------------------------------------------------------------------- checks
# The curves are those of tests/backends, whose models and rows these are, held against a plain loop on this device.

BOUNDS = {"float32": 1e-5, "bfloat16": 2e-3}  # relative, of each step's loss: tests/backends/test_curves.py
STEPS, TINY_STEPS = 20, 4
LEARNT = 0.05  # nats; a curve that falls by less would show no fault
CURVES: dict[str, Case] = {
    "FULL_SHARD": Case(),
    "SHARD_GRAD_OP": Case(strategy="SHARD_GRAD_OP"),
    "NO_SHARD": Case(strategy="NO_SHARD"),
    "HYBRID_SHARD": Case(strategy="HYBRID_SHARD", settings={"sharding.replicas": 1}),
    "HYBRID_SHARD_ZERO2": Case(strategy="HYBRID_SHARD_ZERO2", settings={"sharding.replicas": 1}),
    "SIZE_BASED_WRAP": Case(settings={"sharding.wrap": "SIZE_BASED_WRAP", "sharding.min_num_params": 12000}),
    "NO_WRAP": Case(settings={"sharding.wrap": "NO_WRAP"}),
    "wrap_classes": Case(settings={"sharding.wrap_classes": ["LlamaMLP", "LlamaAttention"]}),
    "wrap_modules": Case(settings={"sharding.wrap_modules": ["model.layers.*.mlp"]}),
    **{model: Case(model=model) for model in ("llama_tied", "qwen3", "gpt2", "opt", "gemma2", "mixtral")},
    "sgd": Case(optim={"name": "sgd", "lr": 0.5, "weight_decay": 0.0}, max_grad_norm=None),
    "three micro batches": Case(micro_batch=4),
    "forward_prefetch 2": Case(settings={"sharding.forward_prefetch": 2}),
    "backward_prefetch_units 2": Case(settings={"sharding.backward_prefetch_units": 2}),
    "BACKWARD_POST": Case(settings={"sharding.backward_prefetch": "BACKWARD_POST"}),
    "NO_PREFETCH": Case(settings={"sharding.backward_prefetch": "NO_PREFETCH"}),
    "checkpointing full": Case(settings=FULL),
    "checkpointing every 2": Case(settings=EVERY_2),
    "save_ops matmul": Case(settings=SAVE_MATMUL),
    "save_ops attention": Case(settings=SAVE_ATTENTION),
    "cpu_offload": Case(settings=OFFLOADED),
    "cpu_offload, three micro batches": Case(micro_batch=4, settings=OFFLOADED),
    "cpu_offload, SHARD_GRAD_OP, checkpointing full": Case(strategy="SHARD_GRAD_OP", settings={**OFFLOADED, **FULL}),
    "compile eager": Case(settings={**COMPILED, "compile.backend": "eager"}),
    "compile aot_eager": Case(settings={**COMPILED, "compile.backend": "aot_eager"}),
    "compile inductor": Case(settings=COMPILED),
    "compile inductor, checkpointing full": Case(settings={**COMPILED, **FULL}),
    "bfloat16": Case(settings=BFLOAT16),
    "bfloat16, reduce bfloat16": Case(settings={**BFLOAT16, "precision.reduce": "bfloat16"}),
    "bfloat16, norms float32": Case(settings={**BFLOAT16, "precision.modules": {"*norm*": "float32"}}),
    "bfloat16, output float32": Case(settings={**BFLOAT16, "precision.output": "float32"}),
    "bfloat16, SHARD_GRAD_OP": Case(strategy="SHARD_GRAD_OP", settings=BFLOAT16),
    "bfloat16, checkpointing full": Case(settings={**BFLOAT16, **FULL}),
    "bfloat16, cpu_offload": Case(settings={**BFLOAT16, **OFFLOADED}),
    "bfloat16, compile inductor": Case(settings={**BFLOAT16, **COMPILED}),
}
TINY_CURVES = ("FULL_SHARD", "checkpointing full", "bfloat16")

# model.attention=flex against static, on rows of documents. On the CPU, where flex is refused, sdpa stands in for it.
FLEX_SHAPE = {
    **{"vocab_size": 1024, "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64},
    **{"num_key_value_heads": 2, "max_position_embeddings": 4096},
}
WINDOWS = FLEX_SHAPE | {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
LLAMA = ARCHITECTURES["llama"] | FLEX_SHAPE
GEMMA2 = ARCHITECTURES["gemma2"] | WINDOWS | {"attn_logit_softcapping": 2.0}
FLEX_CASES: dict[str, tuple[Row, Row]] = {
    "llama": (LLAMA, {}),
    "windows, softcap": (GEMMA2, {}),
    "sinks": (ARCHITECTURES["gpt_oss"] | WINDOWS, {}),
    "stream": (LLAMA, {"data.packing": "stream"}),
    "checkpointing full": (GEMMA2, FULL),
    "bfloat16": (LLAMA, BFLOAT16),
    "bfloat16, compile, checkpointing full": (GEMMA2, {**BFLOAT16, **FULL, **COMPILED}),
}
TINY_FLEX_CASES = ("llama", "bfloat16")
TIMED_LLAMA = LLAMA | {
    **{"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4},
    **{"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
}
FLEX_WARM_UP, FLEX_TIMED = 3, 10  # steps

# Peaks of curves' options on a model of 0.07 billion parameters, large enough to show what an option moves.
LARGE = LLAMA | {
    **{"vocab_size": 256, "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 8},
    **{"num_attention_heads": 12, "num_key_value_heads": 4},
}
# The first needs at least that many bytes a parameter less than the second: a mistake in an option moves far more.
LESS_MEMORY: tuple[tuple[str, str, float], ...] = (
    ("FULL_SHARD", "SHARD_GRAD_OP", 1.0),  # its bfloat16 copies of all layers but the last stay: up to 2 bytes
    ("FULL_SHARD", "NO_WRAP", 1.0),
    ("cpu_offload", "FULL_SHARD", 10.0),  # master weights and two moments in float32: 12 bytes
    ("checkpointing full", "save_ops attention", 0.0),
    ("save_ops attention", "save_ops matmul", 0.0),
    ("save_ops matmul", "FULL_SHARD", 0.0),
    ("checkpointing full", "checkpointing every 2", 0.0),
    ("checkpointing every 2", "FULL_SHARD", 0.0),
)


@cache
def all_checks(device: str, tiny: bool) -> dict[str, Callable[[], Row]]:
    """Checks by name. Compiling comes last: it takes longest."""
    on_cuda, other = device == "cuda", "flex" if device == "cuda" else "sdpa"
    curves = {
        name: replace(case, steps=TINY_STEPS if tiny else STEPS)
        for name, case in CURVES.items()
        if not tiny or name in TINY_CURVES
    }
    curve_checks = {f"curve: {name}": partial(_curve, case, device) for name, case in curves.items()}
    checks: dict[str, Callable[[], Row]] = {
        **({"torch.compile": partial(_compiles, device)} if on_cuda else {}),  # on CPU the backend refuses inductor
        **{name: check for name, check in curve_checks.items() if "compile" not in name},
        **{f"checkpoint: {name}": partial(_checkpoint, curves[name], device) for name in ("FULL_SHARD", "bfloat16")},
        **{
            f"{other}: {name}": partial(_flex, name, other, device)
            for name in (TINY_FLEX_CASES if tiny else FLEX_CASES)
        },
    }
    if on_cuda:
        checks |= {f"memory: {row[0]} < {row[1]}": partial(_less_memory, *row) for row in LESS_MEMORY}
        checks["flex: tokens/s and peak"] = partial(_flex_beside_static, device)
    return checks | curve_checks


def checks(device: str, tiny: bool) -> list[str]:
    return [*all_checks(device, tiny)]


@cache
def _hold_process_group(device: str) -> Backend:
    """For all checks of this process: each would begin another."""
    return open_backend(Case().config(1), device=device, backend="native").__enter__()


def check(name: str, device: str, tiny: bool) -> Row:
    """Figures of one check, and `mismatch` in words where it failed."""
    _hold_process_group(device)
    os.environ |= {"GROUP_BACKEND": "native", "GROUP_DEVICE": device, "CPU_NUM_DEVICES": "1"}  # for jobs.py
    try:
        return all_checks(device, tiny)[name]()
    finally:
        if "torch._dynamo" in sys.modules:  # each check compiles and allocates for itself
            torch._dynamo.reset()
        gc.collect()
        _empty_cache()


def _compiles(device: str) -> Row:
    """Inductor works here at all; without a C compiler it fails, and the timed runs go without it."""
    weight = torch.ones(64, 64, device=device, requires_grad=True)

    def double(x: Tensor) -> Tensor:
        return torch.tanh(x @ weight) * 2

    torch.compile(double)(torch.ones(64, 64, device=device)).sum().backward()
    return {"backend": "inductor"}


def _compared(case: Case, losses: list[float], truth: list[float], whose: str) -> Row:
    """How far losses are from `whose`; `mismatch` in words where that is beyond the bound of the case's precision."""
    worst = max(abs(found - expected) / expected for found, expected in zip(losses, truth, strict=True))
    bound = BOUNDS[case.config(1).precision.compute]
    figures: Row = {"worst_relative_difference": worst, "bound": bound, "first": losses[0], "last": losses[-1]}
    if not worst <= bound:
        figures["mismatch"] = f"expected losses within {bound:g} of {whose}, found {worst:.2g}"
    return figures


def _curve(case: Case, device: str) -> Row:
    truth = _plain_losses(case, device)
    figures = _compared(case, _losses(jobs.train(case)["metrics"]), truth, "a plain loop's")
    if case.steps == STEPS and truth[0] - truth[-1] < LEARNT:
        figures["mismatch"] = "the plain loop learnt nothing: its curve would show no fault"
    return figures


def _losses(metrics: list[dict[str, float]]) -> list[float]:
    return [step["loss"] for step in metrics]


_plain: dict[str, list[float]] = {}


def _plain_losses(case: Case, device: str) -> list[float]:
    """The loop of tests/backends/reference.py, on the device: transformers' model, torch's loss and optimizer."""
    plain = Case(case.model, case.steps, case.optim, case.max_grad_norm)  # of the others it doesn't depend
    if repr(plain) in _plain:
        return _plain[repr(plain)]
    model = _model(case).to(device)
    optimizer = _optimizer(case, model)
    losses: list[float] = []
    for step in range(1, case.steps + 1):
        loss = _loss(model, {name: values.to(device) for name, values in _batch_of_step(case, step).items()})
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(case.config(1).optim, step, case.steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return _plain.setdefault(repr(plain), losses)


def _checkpoint(case: Case, device: str) -> Row:
    """Save half-way; check that a new model which loads it (here, offloaded, on the CPU) is bit-equal and trains on
    identically."""
    middle, readers = case.steps // 2, {device: (case, device)}
    if device != "cpu":
        offloaded = replace(case, settings={**case.settings, **OFFLOADED})
        readers |= {f"{device}, offloaded": (offloaded, device), "cpu": (case, "cpu")}
    with tempfile.TemporaryDirectory() as folder:
        written = jobs.write(case, folder, middle)
        saved = assemble([written["state"]])
        figures: Row = {"tensors": len(saved)}
        for name, (reader, where) in readers.items():
            with patch.dict(os.environ, GROUP_DEVICE=where):
                resumed = jobs.read(reader, {name: folder}, middle)[name]
            assert_equal_states(assemble([resumed["state"]]), saved)
            losses, expected = _losses(resumed["metrics"]), _losses(written["metrics"])
            compared = _compared(reader, losses, expected, f"those before ({name})")
            figures[f"{name}: worst relative difference after"] = compared["worst_relative_difference"]
            figures |= {key: compared[key] for key in compared if key == "mismatch"}
    return figures


@cache
def _peak(name: str) -> tuple[int, int]:
    """Peak of allocated bytes over two steps (the optimizer's state exists before them), and parameters."""
    case = CURVES[name]
    config = replace(case, settings=sized(LARGE, 1024, 8, {**BFLOAT16, **case.settings}).settings).config(1)
    _empty_cache()
    before = torch.cuda.memory_allocated()
    with ExitStack() as held:
        step = Steps(config, held, device="cuda", corpus=Corpus(Documents(config, 500), None))
        _reset_peak()
        for _ in range(2):
            step()
        return torch.cuda.max_memory_allocated() - before, step.training.built.size.parameters


def _less_memory(less: str, more: str, bytes_each: float) -> Row:
    (low, _), (high, parameters) = _peak(less), _peak(more)
    saved = (high - low) / parameters
    figures: Row = {f"{less}: peak_bytes": low, f"{more}: peak_bytes": high, "bytes_per_parameter": saved}
    if saved <= bytes_each:
        figures["mismatch"] = f"expected over {bytes_each:g} bytes a parameter less, found {saved:.2f}"
    return figures


def _flex(name: str, other: str, device: str) -> Row:
    """Losses of four steps with static attention and with the other."""
    (architecture, settings), seq_len = FLEX_CASES[name], 512 if device == "cuda" else 64
    packed = {"data.packing": "documents", **settings}
    cases = {
        way: sized(architecture, seq_len, 4, {**packed, "model.attention": way}, steps=4) for way in ("static", other)
    }
    losses: dict[str, list[float]] = {}
    for way, case in cases.items():
        config = case.config(1)
        losses[way] = train(config, device, Documents(config, seq_len // 5), case.steps)[0]
    return _compared(cases[other], losses[other], losses["static"], "static attention's") | {"losses": losses}


def _flex_beside_static(device: str) -> Row:
    """Tokens a second (padding counted) and peak memory of both, with documents of about 500 tokens in rows of 4096."""
    figures: Row = {}
    for way in ("static", "flex"):
        settings = {**BFLOAT16, "data.packing": "documents", "model.attention": way}
        config = sized(TIMED_LLAMA, 4096, 4, settings).config(1)
        _empty_cache()
        seconds = train(config, device, Documents(config, 500), FLEX_WARM_UP + FLEX_TIMED)[1]
        figures[f"{way}: tokens_per_second"] = 4 * 4096 * FLEX_TIMED / sum(seconds[FLEX_WARM_UP:])
        figures[f"{way}: peak_bytes"] = torch.cuda.max_memory_allocated()
    figures["flex_over_static"] = figures["flex: tokens_per_second"] / figures["static: tokens_per_second"]
    return figures


# ----------------------------------------------------------------------------------------------------------- speed
# Alike in all loops: the weights they start from (a folder in Hugging Face format), the rows and their order, the loss
# (mean over the tokens that have a next one), AdamW with its settings, clipping, sdpa attention, float32 master weights
# and bfloat16 compute: by casting each unit's weights in ours, by autocast in the others, as people write them.

ATTENTION = re.compile(r"flash|fmha|cudnn.*(attention|sdpa)|scaled_dot_product", re.IGNORECASE)


@dataclass(frozen=True)
class Job:
    """One timed run of one way."""

    loop: str  # of LOOPS
    compile: bool  # by the other loops; ours has it in its config
    rows: int  # in a step
    vocabulary: int
    overrides: Sequence[str]  # `section.key=value` for all
    options: Sequence[str]  # `section.key=value` for our loop alone
    warm_up: int  # steps before the timed ones; compilation falls into the first
    timed: int  # steps
    device: str  # "cuda" or "cpu"
    folder: str  # for the initial weights and the run's own files

    @property
    def steps(self) -> int:
        return self.warm_up + self.timed + 1  # the last one under torch's profiler

    def read_config(self, weights: Path | None, options: Sequence[str] = ()) -> Config:
        """The config of our run; without `weights` that of the model's architecture."""
        overrides = [*self.overrides, f"run.dir='{self.folder}/run'"]
        if weights is not None:
            overrides += ["model.architecture=null", f"model.pretrained='{weights}'"]
        return load_config(CONFIG, [*overrides, *options])

    def initial_weights(self) -> Path:
        """The folder that all start from; the first job writes it."""
        folder = Path(self.folder) / f"weights_{self.vocabulary}"
        if not folder.is_dir():
            architecture = architecture_mapping(self.read_config(None).model.architecture or {})
            torch.manual_seed(0)
            with torch.device(self.device):  # a thousand million normal numbers: seconds on a GPU, a minute on a CPU
                config = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
                model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
            model.save_pretrained(folder.with_suffix(".part"))
            os.replace(folder.with_suffix(".part"), folder)
        return folder


@dataclass
class Watch:
    """Marks the end of each step on the device, so that timing makes no step wait for the one before it.

    The device is waited for twice: before the first timed step and after the last one.
    """

    job: Job
    losses: list[Tensor | float] = field(default_factory=lambda: [])
    measured: Row = field(default_factory=lambda: {})
    marks: list[Any] = field(default_factory=lambda: [])
    ended: int = 0

    def __post_init__(self) -> None:
        kind, self.on_cuda = torch.profiler.ProfilerActivity, self.job.device == "cuda"
        self.profiler = torch.profiler.profile(activities=[kind.CUDA if self.on_cuda else kind.CPU])

    def step_ended(self) -> None:
        self.ended += 1
        first, last = self.job.warm_up, self.job.warm_up + self.job.timed
        if self.ended == first:
            self._wait()
            _reset_peak()
        if first <= self.ended <= last:
            self.marks.append(torch.cuda.Event(enable_timing=True) if self.on_cuda else time.perf_counter())
            if self.on_cuda:
                self.marks[-1].record()
        if self.ended == last:
            self._measure()
            self.profiler.start()
        elif self.ended > last:
            self._wait()
            self.profiler.stop()
            self._read_profile()

    def _wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize()

    def _measure(self) -> None:
        self._wait()
        seconds = [a.elapsed_time(b) / 1000 if self.on_cuda else b - a for a, b in pairwise(self.marks)]
        self.measured = {
            "step_seconds": seconds,
            "seconds_per_step": statistics.median(seconds),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if self.on_cuda else None,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if self.on_cuda else None,
        }

    def _read_profile(self) -> None:
        names = {row.key[:120] for row in self.profiler.key_averages()}
        self.measured["attention_kernels"] = sorted(filter(ATTENTION.search, names))


def _empty_cache() -> None:
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _reset_peak()


def _reset_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def run_ours(job: Job, config: Config, rows: Documents, watch: Watch) -> None:
    """The pieces of `train/loop.py`, and the body of its loop."""
    with open_backend(config, device=job.device, backend="native") as backend:
        training = build_training(config, backend, load_tokenizer(config.data.tokenizer))
        _empty_cache()
        with open_batches(config, backend, training, Corpus(rows, None)) as batches:
            step = OurStep(config, backend, training, batches)
            for _ in range(job.steps):
                step()
                watch.step_ended()
            last = step.last_loss()
    watch.losses = [*(row["loss"] for row in read_jsonl(Path(config.run.dir) / "metrics.jsonl")), last]


def _plain_model(config: Config) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        cast(str, config.model.pretrained), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )


def run_plain(job: Job, config: Config, rows: Documents, watch: Watch) -> None:
    """What one writes by hand: autocast, fused AdamW, and no wait for the device within a step."""
    model, optim = _plain_model(config).to(job.device).train(), config.optim
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
        {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=optim.lr, betas=optim.betas, eps=optim.eps, fused=True)
    forward: Callable[..., Any] = torch.compile(model) if job.compile else model
    data = rows.unshifted(config, job.steps)
    _empty_cache()
    for step in range(job.steps):
        batch = {name: tensor[step * job.rows : (step + 1) * job.rows] for name, tensor in data.items()}
        if job.device == "cuda":
            batch = {name: part.pin_memory().to(job.device, non_blocking=True) for name, part in batch.items()}
        with torch.autocast(job.device, dtype=torch.bfloat16):
            loss = forward(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, cast(float, config.train.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()
        watch.losses.append(loss.detach())
        watch.step_ended()


def run_trainer(job: Job, config: Config, rows: Documents, watch: Watch) -> None:
    """transformers' Trainer with its defaults, but for what must be equal: rows in order, AdamW's numbers, no saves."""
    from beside_trainer import arguments
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Marks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.step_ended()

    class KeepsLosses(Trainer):
        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = cast(Any, super().compute_loss(*args, **kwargs))
            watch.losses.append(loss.detach())
            return loss

    data = rows.unshifted(config, job.steps)
    dataset = [{name: tensor[row] for name, tensor in data.items()} for row in range(len(data["input_ids"]))]
    settings: Row = arguments(config) | {
        **{"output_dir": f"{job.folder}/trainer", "max_steps": job.steps, "lr_scheduler_type": "constant"},
        **{"bf16": True, "torch_compile": job.compile, "use_liger_kernel": job.loop == "liger"},
        **{"use_cpu": job.device == "cpu", "logging_steps": 500, "dataloader_pin_memory": True},
    }
    model = _plain_model(config)
    trainer = KeepsLosses(
        model=model, args=TrainingArguments(**settings), train_dataset=cast(Any, dataset), callbacks=[Marks()]
    )
    _empty_cache()
    trainer.train()


LOOPS: dict[str, Callable[[Job, Config, Documents, Watch], None]] = {
    "ours": run_ours,
    "plain": run_plain,
    "trainer": run_trainer,
    "liger": run_trainer,
}


def speed(asked: Row) -> Row:
    """Times of the steps, losses of all steps, peaks of memory (of the timed steps) and MFU of one job."""
    try:
        return _speed(Job(**asked))
    except torch.OutOfMemoryError as error:
        return {"status": "out of memory", "error": str(error).splitlines()[0]}


def _speed(job: Job) -> Row:
    base = job.read_config(weights := job.initial_weights())
    config = job.read_config(weights, job.options)
    if autos(config):
        with open_backend(without_plan(config), device=job.device, backend="native") as engine:
            config = resolve_auto(config, engine)
    size = build_model(config.model, seed=0, seq_len=config.data.seq_len, vocabulary=256).size
    watch = Watch(job)
    began = time.perf_counter()
    LOOPS[job.loop](job, config, Documents(config, None, job.vocabulary), watch)
    tokens = job.rows * config.data.seq_len
    flops = model_flops_per_token(
        size.parameters, size.embedding_parameters, size.layers, size.hidden, config.data.seq_len
    )
    peak = peak_flops(torch.cuda.get_device_name() if job.device == "cuda" else "cpu", "bfloat16")
    median = watch.measured["seconds_per_step"]
    first, _, third = statistics.quantiles(watch.measured["step_seconds"], n=4)
    return {
        "status": "finished",
        **watch.measured,
        "losses": [float(loss) for loss in watch.losses],
        "tokens_per_second": tokens / median,
        "tokens_per_second_quartiles": [tokens / third, tokens / first],
        "mfu": flops * tokens / median / peak if peak else None,
        "parameters": size.parameters,
        "tokens_per_step": tokens,
        "flops_per_token": flops,
        "job_seconds": time.perf_counter() - began,
        "config": base.model_dump(mode="json"),
        "chosen": changed_values(base, config),
    }


# ----------------------------------------------------------------------------------------------------------- plans

PER_HOST = 8
ON_TOP = ("allocator", "communication buffers")


def planned(target: str, devices: int, as_torchtitan: bool, *shape: Any) -> Row:
    """What a plan says of the memory, and what the planner itself takes."""
    from portable_fsdp.plan.fake_step import plan_memory
    from portable_fsdp.plan.target import parse_target

    if as_torchtitan:
        _build_as_torchtitan()
    began, spent = time.monotonic(), time.process_time()
    found = parse_target(target)
    hosts = 1 if target == "cpu" else -(-devices // PER_HOST)
    found = replace(found, hardware=replace(found.hardware, program=None), devices=devices, hosts=hosts)  # no limit
    memory = plan_memory(sized(*shape).config(1), found).memory
    live = sum(size for part, size in memory.parts.items() if part not in ON_TOP)
    return {
        "planned_live_bytes": live,
        "planned_reserved_bytes": live + memory.parts.get("allocator", 0),
        "parts": memory.parts,
        "at": memory.at,
        "plan_seconds": round(time.monotonic() - began, 1),
        "plan_processor_seconds": round(time.process_time() - spent, 1),
        "plan_rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def _build_as_torchtitan() -> None:
    """Its loss (all logits in float32 at once) and its "selective op" checkpointing (attention and every second
    product kept) in the place of ours."""
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    from portable_fsdp.backends.native import units
    from portable_fsdp.models import build

    aten = torch.ops.aten

    def attach(model: Any, *_: object) -> None:
        def forward(self: Any, input_ids: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
            logits = type(self).forward(self, input_ids=input_ids, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten(), reduction="sum")
            return loss, (labels != IGNORED).sum().float()

        model.forward = MethodType(forward, model)

    def every_second_product(_: object) -> Any:
        seen = {False: 0, True: 0}

        def policy(context: Any, op: Any, *arguments: Any, **named: Any) -> CheckpointPolicy:
            kept = op is aten._scaled_dot_product_flash_attention.default
            if op is aten.mm.default:
                seen[context.is_recompute] += 1
                kept = seen[context.is_recompute] % 2 == 1
            return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

        return create_selective_checkpoint_contexts(policy)

    build.attach_loss = attach
    units.create_selective_checkpoint_contexts = cast(Any, every_second_product)


def tracked(devices: int, *shape: Any) -> Row:
    """The peak that torch's FSDPMemTracker sees of the same two steps."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

    from portable_fsdp.plan import fake_step
    from portable_fsdp.plan.memory_trace import Recorder

    config = sized(*shape).config(1)
    fake, cuda = FakeTensorMode(allow_non_fake_inputs=True), fake_step.stand_in()
    recorder = Recorder(fake, cuda, "cpu")  # its own record isn't used
    most = 0
    with (
        fake_step.ranks(devices, min(devices, PER_HOST)),
        fake_step.planned_engine(config, fake, recorder, whole=True) as planned,
        fake_step._seen_by(recorder),
        patch.object(F, "scaled_dot_product_attention", fake_step.gpu_attention),
    ):
        training = build_training(config, planned.engine, vocabulary=1, fill=False)
        with fake:
            tracker = FSDPMemTracker(cast(Any, training.model), training.optimizer)
            for _ in range(2):
                rows = fake_step.empty_batch(config, training, config.train.resolved_micro_batch, "cpu")
                batches = [planned.engine.place(rows) for _ in range(training.accumulation)]
                with tracker:
                    training.step(batches, config.optim.lr, control_numbers(devices))
                found = cast(dict[Any, Any], tracker.get_tracker_snapshot("peak"))
                most = max(most, *(by_kind["Total"] for of, by_kind in found.items() if of == cuda))
                tracker.reset_mod_stats()
    return {"reference_bytes": most}


def measured(device: str, *shape: Any) -> Row:
    """Three steps of the trainer's on this machine: what the allocator says, or on CPU what lives."""
    config = sized(*shape).config(1)
    if device == "cpu":
        from live_storages import measure_on

        with open_backend(config, device=device, backend="native", num_devices=1) as backend:
            return {"device": "cpu", "live_bytes": measure_on(backend, config).peak_bytes}
    with ExitStack() as held:
        step = Steps(config, held, device=device, corpus=Corpus(Documents(config, 500), None))
        for _ in range(3):
            step()
        free, total = torch.cuda.mem_get_info()
        outside = total - free - torch.cuda.memory_reserved()  # context, kernels, NCCL, other processes
        return {
            "device": torch.cuda.get_device_name(),
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "outside_the_allocator_bytes": outside,
        }


# --------------------------------------------------------------------------------------------------------- process


def environment(device: str) -> Row:
    """Device and versions, as this process sees them."""
    on_cuda = device == "cuda"
    properties = torch.cuda.get_device_properties(0) if on_cuda else None
    return {
        "device": properties.name if properties else "cpu",
        "device_memory_bytes": properties.total_memory if properties else None,
        "compute_capability": f"{properties.major}.{properties.minor}" if properties else None,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version() if on_cuda else None,
        "nccl": ".".join(map(str, cast(Any, nccl).version())) if on_cuda else None,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "versions": {name: version(name) for name in PACKAGES if find_spec(name)},
    }
