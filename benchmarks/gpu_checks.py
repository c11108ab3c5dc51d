"""Does each option keep the curve and do what it says on this device? One process; on a GPU with NCCL.

The curves are those of tests/backends, whose models and rows these are: float32 losses against a plain PyTorch loop on
the same device, relative 1e-5 over 20 steps, bfloat16 within 2e-3. Checkpoints are compared bit for bit. On a GPU the
options that move memory are measured as well, on a model large enough to show it.
"""

import gc
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from gpu_flex import flex_checks
from torch import Tensor
from torch.nn import functional as F

from portable_fsdp.backends.contract import Backend
from portable_fsdp.backends.open import open_backend
from portable_fsdp.checkpoint.manager import Checkpoints
from portable_fsdp.config.schema import Config
from portable_fsdp.data.batches import Batches
from portable_fsdp.data.packing import sample_indices
from portable_fsdp.optim.optimizer import learning_rate
from portable_fsdp.runtime.errors import BackendError, ConfigError
from portable_fsdp.train.build import Training, build_training

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "backends"))
from cases import GLOBAL_BATCH, Case, CaseRows
from reference import _model, _optimizer

FLOAT32_BOUND, BFLOAT16_BOUND = 1e-5, 2e-3  # relative, over 20 steps: tests/backends/test_curves.py
STEPS, TINY_STEPS, SAVE_AT = 20, 4, 10
LEARNT = 0.05  # nats; a curve that falls by less would show no fault
SGD = {"name": "sgd", "lr": 0.5, "weight_decay": 0.0}
BFLOAT16 = {"precision.compute": "bfloat16"}
SELECTIVE = {"memory.gradient_checkpointing": "selective"}
FULL = {"memory.gradient_checkpointing": "full"}
COMPILED = {"compile.enabled": True}
OFFLOADED = {"memory.cpu_offload": True}

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
    "sgd": Case(optim=SGD, max_grad_norm=None),
    "three micro batches": Case(micro_batch=4),
    "forward_prefetch 2": Case(settings={"sharding.forward_prefetch": 2}),
    "backward_prefetch_units 2": Case(settings={"sharding.backward_prefetch_units": 2}),
    "BACKWARD_POST": Case(settings={"sharding.backward_prefetch": "BACKWARD_POST"}),
    "NO_PREFETCH": Case(settings={"sharding.backward_prefetch": "NO_PREFETCH"}),
    "checkpointing full": Case(settings=FULL),
    "checkpointing every 2": Case(settings={**SELECTIVE, "memory.every": 2}),
    "save_ops matmul": Case(settings={**SELECTIVE, "memory.save_ops": ["matmul"]}),
    "save_ops attention": Case(settings={**SELECTIVE, "memory.save_ops": ["attention"]}),
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

LARGE: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 256,
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
}
LARGE_ROWS, LARGE_SEQ_LEN = 8, 1024
PEAKS: dict[str, dict[str, Any]] = {
    "default": {},
    "SHARD_GRAD_OP": {"sharding.strategy": "SHARD_GRAD_OP"},
    "NO_WRAP": {"sharding.wrap": "NO_WRAP"},
    "cpu_offload": OFFLOADED,
    "checkpointing full": FULL,
    "checkpointing every 2": {**SELECTIVE, "memory.every": 2},
    "save_ops matmul": {**SELECTIVE, "memory.save_ops": ["matmul"]},
    "save_ops attention": {**SELECTIVE, "memory.save_ops": ["attention"]},
}
# The first needs at least that many bytes a parameter less than the second: a mistake in an option moves far more.
LESS_MEMORY: tuple[tuple[str, str, float], ...] = (
    ("default", "SHARD_GRAD_OP", 1.0),  # its bfloat16 copies of all layers but the last stay: up to 2 bytes
    ("default", "NO_WRAP", 1.0),
    ("cpu_offload", "default", 10.0),  # master weights and two moments in float32: 12 bytes
    ("checkpointing full", "save_ops attention", 0.0),
    ("save_ops attention", "save_ops matmul", 0.0),
    ("save_ops matmul", "default", 0.0),
    ("checkpointing full", "checkpointing every 2", 0.0),
    ("checkpointing every 2", "default", 0.0),
)


class Check(NamedTuple):
    """The answer of one check; `figures` say how far it was from failing."""

    name: str
    outcome: str  # "passed", "failed", "left out", or "refused": the backend says that it can't honour the option
    note: str
    figures: dict[str, Any]
    seconds: float


class Mismatch(Exception):
    """A check that came to its end and found something wrong, with what it measured."""

    def __init__(self, note: str, figures: dict[str, Any]) -> None:
        super().__init__(note)
        self.figures = figures


def run_checks(device: str, *, tiny: bool, seconds: float, report: Callable[[list[Check]], None]) -> None:
    """All checks that begin within `seconds`; `report` gets the answers so far after each, should the next one die."""
    deadline = time.monotonic() + seconds
    checks: list[Check] = []
    with open_backend(Case().config(1), device=device, backend="native"):  # the process group of all that follow
        for name, run in _checks(device, tiny):
            if time.monotonic() < deadline:
                checks.append(_answer(name, run))
            else:
                checks.append(Check(name, "left out", f"no time left of {seconds:.0f} s", {}, 0.0))
            report(checks)


def _checks(device: str, tiny: bool) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Compiling comes last: it takes longest."""
    references: dict[str, list[float]] = {}
    steps = TINY_STEPS if tiny else STEPS
    if device == "cuda":  # on CPU inductor builds C++, which the backend refuses
        yield "torch.compile", lambda: _compiles(device)
    curves = [name for name in CURVES if not tiny or name in TINY_CURVES]
    for name in (name for name in curves if "compile" not in name):
        yield f"curve: {name}", lambda name=name: _curve(replace(CURVES[name], steps=steps), device, references)
    for name in ("FULL_SHARD", "bfloat16"):
        yield f"checkpoint: {name}", lambda name=name: _checkpoint(replace(CURVES[name], steps=steps), device)
    if device == "cuda":
        yield from _memory_checks(device)
    yield from flex_checks(device, tiny)
    for name in (name for name in curves if "compile" in name):
        yield f"curve: {name}", lambda name=name: _curve(replace(CURVES[name], steps=steps), device, references)


def _answer(name: str, run: Callable[[], dict[str, Any]]) -> Check:
    began = time.perf_counter()
    try:
        outcome, note, figures = "passed", "", run()
    except Mismatch as mismatch:
        outcome, note, figures = "failed", str(mismatch), mismatch.figures
    except (BackendError, ConfigError) as refusal:
        outcome, note, figures = "refused", str(refusal), {}
    except Exception as error:  # whatever it is, it is this check's answer, and the others go on
        where = traceback.format_exception(error, limit=-4)
        outcome, note, figures = "failed", "".join(where)[-1500:], {}
    finally:
        _clean()
    return Check(name, outcome, note, figures, time.perf_counter() - began)


def _clean() -> None:
    """Each check compiles and allocates for itself."""
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _compiles(device: str) -> dict[str, Any]:
    """Inductor works here at all; without a C compiler it fails, and the timed runs go without it."""
    weight = torch.ones(64, 64, device=device, requires_grad=True)

    def double(x: Tensor) -> Tensor:
        return torch.tanh(x @ weight) * 2

    out = torch.compile(double)(torch.ones(64, 64, device=device))
    out.sum().backward()
    return {"backend": "inductor"}


# ---------------------------------------------------------------------------------------------------------- curves


@contextmanager
def _run(case: Case, device: str) -> Generator[tuple[Backend, Config, Training]]:
    config = case.config(1)
    with open_backend(config, device=device, backend="native") as backend:
        yield backend, config, build_training(config, backend, vocabulary=256)


def _train(backend: Backend, config: Config, training: Training, first: int, last: int) -> list[float]:
    """Losses of the steps first to last."""
    losses: list[float] = []
    with Batches(
        CaseRows(),
        seed=config.run.seed,
        global_batch=GLOBAL_BATCH,
        shard=(0, 1),
        accumulation=training.accumulation,
        start=(first - 1) * GLOBAL_BATCH,
    ) as batches:
        for step in range(first, last + 1):
            lr = learning_rate(config.optim, step, config.train.steps or 0)
            rows = next(batches)
            placed = [backend.place(batch) for batch in rows.micro_batches]
            losses.append(backend.fetch(training.step(placed, lr, [rows.count])).result()["loss"].item())
    return losses


def _curve(case: Case, device: str, references: dict[str, list[float]]) -> dict[str, Any]:
    key = repr((case.model, case.optim, case.max_grad_norm, case.steps))
    if key not in references:
        references[key] = _plain_losses(case, device)
    with _run(case, device) as (backend, config, training):
        losses = _train(backend, config, training, 1, case.steps)
    truth = references[key]
    worst = max(abs(found - expected) / expected for found, expected in zip(losses, truth, strict=True))
    bound = FLOAT32_BOUND if config.precision.compute == "float32" else BFLOAT16_BOUND
    figures = {"worst_relative_difference": worst, "bound": bound, "first": losses[0], "last": losses[-1]}
    if not worst <= bound:
        raise Mismatch(f"expected losses within {bound:g} of a plain loop's, found {worst:.2g}", figures)
    if case.steps == STEPS and truth[0] - truth[-1] < LEARNT:
        raise Mismatch("the plain loop learnt nothing: its curve would show no fault", figures)
    return figures


def _plain_losses(case: Case, device: str) -> list[float]:
    """The loop of tests/backends/reference.py, on the device: transformers' model, torch's loss and optimizer."""
    model = _model(case).to(device)
    optimizer = _optimizer(case, model)
    losses: list[float] = []
    for step in range(1, case.steps + 1):
        positions = torch.arange((step - 1) * GLOBAL_BATCH, step * GLOBAL_BATCH).numpy()
        batch = CaseRows().rows(sample_indices(case.seed, positions, len(CaseRows())))
        logits = model(input_ids=batch["input_ids"].to(device), use_cache=False).logits
        loss = F.cross_entropy(logits.float().flatten(0, 1), batch["labels"].to(device).flatten(), ignore_index=-100)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), case.max_grad_norm or float("inf"))
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(case.config(1).optim, step, case.steps)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# ------------------------------------------------------------------------------------------------------ checkpoints


def _state(backend: Backend, training: Training) -> dict[str, Tensor]:
    """Every tensor of a checkpoint; in one process each is one piece."""
    state = backend.state(training.model, training.optimizer)
    return {key: tensor.pieces()[0].data.detach().cpu().clone() for key, tensor in state.items()}


def _checkpoint(case: Case, device: str) -> dict[str, Any]:
    """Save in the middle; what a new model reads back is bit-equal (here, offloaded, on the CPU) and goes on alike."""
    middle = min(SAVE_AT, case.steps // 2)
    with tempfile.TemporaryDirectory() as folder:
        with _run(case, device) as (backend, config, training):
            _train(backend, config, training, 1, middle)
            saved = _state(backend, training)
            checkpoints = _checkpoints(folder, backend, config)
            checkpoints.save(middle, training.model, training.optimizer, (0, middle * GLOBAL_BATCH))
            losses = _train(backend, config, training, middle + 1, case.steps)
        figures: dict[str, Any] = {"tensors": len(saved)}
        for name, reader, where in _readers(case, device):
            with _run(reader, where) as (backend, config, training):
                checkpoints = _checkpoints(folder, backend, config)
                found = checkpoints.find("auto")
                if found is None:
                    raise Mismatch("expected a committed checkpoint, found none", figures)
                checkpoints.load(found, training.model, training.optimizer)
                _require_equal(name, _state(backend, training), saved, figures)
                resumed = _train(backend, config, training, middle + 1, case.steps)
            worst = max(abs(a - b) / b for a, b in zip(resumed, losses, strict=True))
            figures[f"{name}: worst relative difference after"] = worst
            if not worst <= (FLOAT32_BOUND if config.precision.compute == "float32" else BFLOAT16_BOUND):
                raise Mismatch(f"{name}: resumed losses differ by {worst:.2g}", figures)
    return figures


def _readers(case: Case, device: str) -> list[tuple[str, Case, str]]:
    readers = [(device, case, device)]
    if device != "cpu":
        offloaded = replace(case, settings={**case.settings, **OFFLOADED})
        readers += [(f"{device}, offloaded", offloaded, device), ("cpu", case, "cpu")]
    return readers


def _checkpoints(folder: str, backend: Backend, config: Config) -> Checkpoints:
    return Checkpoints(Path(folder), backend, config=config.model_dump(mode="json"), model_config={})


def _require_equal(name: str, found: dict[str, Tensor], saved: dict[str, Tensor], figures: dict[str, Any]) -> None:
    if found.keys() != saved.keys():
        raise Mismatch(f"{name}: other tensors than were saved: {sorted(found.keys() ^ saved.keys())[:5]}", figures)
    differ = [k for k in saved if found[k].dtype != saved[k].dtype or not torch.equal(found[k], saved[k])]
    if differ:
        raise Mismatch(f"{name}: {len(differ)} of {len(saved)} tensors differ: {differ[:5]}", figures)


# ----------------------------------------------------------------------------------------------------------- memory


class Peaks:
    """Peak memory of each option, and what one may need less than another."""

    def __init__(self, device: str) -> None:
        self._device = device
        self._bytes: dict[str, int] = {}
        self._parameters = 0

    def __contains__(self, name: str) -> bool:
        return name in self._bytes

    def measure(self, name: str) -> dict[str, Any]:
        """Of two steps of a model of 0.07 billion parameters, bfloat16; the optimizer's state exists before them."""
        config = _large_config(PEAKS[name])
        before = torch.cuda.memory_allocated()
        with open_backend(config, device=self._device, backend="native") as backend:
            training = build_training(config, backend, vocabulary=256)
            self._parameters = training.built.size.parameters
            ids = torch.randint(256, (LARGE_ROWS, LARGE_SEQ_LEN))
            batch = {"input_ids": ids, "labels": ids}
            torch.cuda.reset_peak_memory_stats()
            for _ in range(2):
                backend.fetch(training.step([backend.place(batch)], 1e-4, [float(LARGE_ROWS * LARGE_SEQ_LEN)])).result()
            self._bytes[name] = torch.cuda.max_memory_allocated() - before
        return {"peak_allocated_bytes": self._bytes[name], "parameters": self._parameters}

    def compare(self, less: str, more: str, bytes_each: float) -> dict[str, Any]:
        saved = (self._bytes[more] - self._bytes[less]) / self._parameters
        figures = {less: self._bytes[less], more: self._bytes[more], "bytes_per_parameter": saved}
        if saved <= bytes_each:
            raise Mismatch(f"expected over {bytes_each:g} bytes a parameter less, found {saved:.2f}", figures)
        return figures


def _memory_checks(device: str) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    peaks = Peaks(device)
    for name in PEAKS:
        yield f"peak: {name}", lambda name=name: peaks.measure(name)
    for less, more, bytes_each in LESS_MEMORY:
        if less in peaks and more in peaks:  # else its own check has said why
            yield f"memory: {less} < {more}", lambda row=(less, more, bytes_each): peaks.compare(*row)


def _large_config(settings: dict[str, Any]) -> Config:
    values: dict[str, dict[str, Any]] = {
        "model": {"architecture": LARGE},
        "data": {"seq_len": LARGE_SEQ_LEN},
        "train": {"steps": 2, "global_batch": LARGE_ROWS, "micro_batch": LARGE_ROWS},
        "precision": {"compute": "bfloat16"},
    }
    for key, value in settings.items():
        section, _, leaf = key.partition(".")
        values.setdefault(section, {})[leaf] = value
    return Config.model_validate(values)
