"""Ways to train one model on one device, timed alike: ours, a plain PyTorch loop, transformers' Trainer, without and
with Liger's kernels.

Alike in all: the weights they start from (a folder in Hugging Face format), the rows and their order, the loss
(mean over the tokens that have a next one), AdamW with its settings, clipping, sdpa attention, float32 master weights
and bfloat16 compute: by casting each unit's weights in ours, by autocast in the others, as people write them.
"""

import json
import os
import re
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from loop_overhead import OurStep
from numpy.typing import NDArray
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.backends.open import open_backend
from portable_fsdp.config.schema import Config
from portable_fsdp.convert.read import load_config
from portable_fsdp.data.batches import Batches
from portable_fsdp.data.packing import IGNORED, Rows, sample_indices
from portable_fsdp.data.tokenize import load_tokenizer
from portable_fsdp.models.architecture import architecture_mapping
from portable_fsdp.models.build import build_model
from portable_fsdp.models.flops import model_flops_per_token, peak_flops
from portable_fsdp.train.build import build_training
from portable_fsdp.train.measures import InFlight

CONFIG = Path(__file__).parents[1] / "configs" / "llama_1b.yaml"
ROWS = 1024
TOP_KERNELS = 12
# Everything whose default differs between the three stands here; the rest of the config is llama_1b.yaml.
SETTINGS = (
    "optim.lr=1e-4",
    "optim.schedule=constant",
    "optim.warmup_steps=0",
    "optim.betas=[0.9, 0.95]",
    "optim.weight_decay=0.1",
    "train.max_grad_norm=1.0",
    "precision.compute=bfloat16",
    "sharding.strategy=FULL_SHARD",
)
TINY = (
    "data.seq_len=32",
    "optim.lr=3e-3",  # so that a few steps show another learning rate or another order of rows
    *(
        f"model.architecture.{key}={value}"
        for key, value in {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 32,
        }.items()
    ),
)


@dataclass(frozen=True)
class Job:
    """One timed run of one way."""

    way: str  # of WAYS
    compile: bool
    checkpointing: str  # "none" or "full"
    micro_batch: int  # rows in a step
    vocabulary: int
    option: str  # `section.key=value` for our way alone, or ""
    warm_up: int  # steps before the timed ones; compilation falls into the first
    timed: int  # steps
    profile: bool  # one more step, after the timed ones, under torch's profiler
    tiny: bool
    device: str  # "cuda" or "cpu"
    folder: str  # for the initial weights and the run's own files
    overrides: Sequence[str]  # `section.key=value` for our way alone

    @property
    def steps(self) -> int:
        return self.warm_up + self.timed + self.profile


@dataclass
class Watch:
    """Marks the end of each step on the device, so that timing makes no step wait for the one before it.

    The device is waited for twice: before the first timed step and after the last one.
    """

    job: Job
    marks: list[Any] = field(default_factory=lambda: [])
    measured: dict[str, Any] = field(default_factory=lambda: {})
    losses: list[Tensor | float] = field(default_factory=lambda: [])
    ended: int = 0
    made: float = field(default_factory=time.perf_counter)
    began: float = 0.0
    profiler: Any = None

    def step_ended(self) -> None:
        self.ended += 1
        if self.ended == self.job.warm_up:
            self._reset()
        elif self.job.warm_up < self.ended <= self.job.warm_up + self.job.timed:
            self.marks.append(self._now())
        if self.ended == self.job.warm_up + self.job.timed:
            self._measure()
            self._attempt(self._start_profiler)
        elif self.profiler is not None:
            self._attempt(self._stop_profiler)

    def _reset(self) -> None:
        self._wait()
        if self.job.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        self.began = time.perf_counter()
        self.marks = [self._now()]

    def _measure(self) -> None:
        self._wait()
        span = time.perf_counter() - self.began
        pairs = zip(self.marks[:-1], self.marks[1:], strict=True)
        on_cuda = self.job.device == "cuda"
        seconds = [a.elapsed_time(b) / 1000 if on_cuda else b - a for a, b in pairs]
        self.measured = {
            "step_seconds": seconds,
            "seconds_per_step": statistics.median(seconds),
            "span_seconds": span,  # wall time of all timed steps
            "ready_seconds": self.began - self.made,  # loading, compiling and the steps of warm-up
            "peak_allocated_bytes": torch.cuda.max_memory_allocated() if on_cuda else None,
            "peak_reserved_bytes": torch.cuda.max_memory_reserved() if on_cuda else None,
        }

    def _now(self) -> Any:
        if self.job.device != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _wait(self) -> None:
        if self.job.device == "cuda":
            torch.cuda.synchronize()

    def _attempt(self, profile: Callable[[], None]) -> None:
        """What is measured already outlives a profiler that this machine won't have."""
        try:
            profile()
        except Exception as error:
            self.measured["profile_error"] = f"{type(error).__name__}: {error}"
            self.profiler = None

    def _start_profiler(self) -> None:
        if self.job.profile:
            kind = torch.profiler.ProfilerActivity
            self.profiler = torch.profiler.profile(activities=[kind.CUDA if self.job.device == "cuda" else kind.CPU])
            self.profiler.start()

    def _stop_profiler(self) -> None:
        self._wait()
        self.profiler.stop()
        on_device = "self_device_time_total" if self.job.device == "cuda" else "self_cpu_time_total"
        spent = {row.key: getattr(row, on_device) / 1000 for row in self.profiler.key_averages()}
        longest = sorted(spent, key=lambda name: -spent[name])
        self.measured["kernels_ms"] = {name[:120]: spent[name] for name in longest[:TOP_KERNELS]}
        self.measured["kernels_total_ms"] = sum(spent.values())
        attention = re.compile(r"flash|fmha|cudnn.*(attention|sdpa)|scaled_dot_product", re.IGNORECASE)
        self.measured["attention_kernels"] = sorted(name[:120] for name in spent if attention.search(name))


# ------------------------------------------------------------------------------------------- weights, rows, config


def job_config(job: Job, weights: Path | None) -> Config:
    """The config of our run; without `weights` that of the model's architecture."""
    overrides = [*SETTINGS, *(TINY if job.tiny else ())]
    if weights is not None:
        overrides += ["model.architecture=null", f"model.pretrained='{weights}'"]
    else:
        overrides += [f"model.architecture.vocab_size={job.vocabulary}"]
    overrides += [
        f"run.dir='{job.folder}/run'",
        f"train.steps={job.steps}",
        f"train.global_batch={job.micro_batch}",
        f"train.micro_batch={job.micro_batch}",
        f"memory.gradient_checkpointing={job.checkpointing}",
        f"compile.enabled={str(job.compile).lower()}",
        *((*job.overrides, *filter(None, [job.option])) if job.way == "ours" else ()),
    ]
    return load_config(CONFIG, overrides)


def initial_weights(job: Job) -> Path:
    """The folder that all three start from; the first job writes it."""
    folder = Path(job.folder) / f"weights_{job.vocabulary}"
    if not folder.is_dir():
        architecture = architecture_mapping(job_config(job, None).model.architecture or {})
        torch.manual_seed(0)
        with torch.device(job.device):  # a thousand million normal numbers: seconds on a GPU, a minute on a CPU
            config = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        model.save_pretrained(folder.with_suffix(".part"))
        os.replace(folder.with_suffix(".part"), folder)
        del model
        _empty_cache(job)
    return folder


class SkewedRows(Rows):
    """Rows of random ids, low ones more often, so that there is something to learn. Labels are shifted as ours are."""

    def __init__(self, vocabulary: int, seq_len: int) -> None:
        draw = np.random.default_rng(0).random((ROWS, seq_len))
        self._ids = torch.tensor((draw**2 * vocabulary).astype(np.int64))

    def __len__(self) -> int:
        return ROWS

    def rows(self, indices: NDArray[np.int64]) -> dict[str, Tensor]:
        ids = self._ids[torch.from_numpy(indices)]
        labels = torch.full_like(ids, IGNORED)
        labels[:, :-1] = ids[:, 1:]
        return {"input_ids": ids, "labels": labels}

    def order(self, seed: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        return sample_indices(seed, positions, ROWS)

    def fingerprint(self) -> str:
        return "drawn from seed 0"

    def unshifted(self, config: Config, steps: int) -> dict[str, Tensor]:
        """The rows of all steps in our order, with labels as transformers' models take them: they shift by one."""
        positions = np.arange(steps * config.train.global_batch)
        ids = self._ids[torch.from_numpy(sample_indices(config.run.seed, positions, ROWS))]
        labels = ids.clone()
        labels[:, 0] = IGNORED  # never a target; and a Trainer that counts it would divide by too much
        return {"input_ids": ids, "labels": labels}


def _empty_cache(job: Job) -> None:
    if job.device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# --------------------------------------------------------------------------------------------------- the three ways


def run_ours(job: Job, config: Config, rows: SkewedRows, watch: Watch) -> None:
    """The pieces of `train/loop.py`, and the body of its loop."""
    with open_backend(config, device=job.device, backend="native") as backend:
        training = build_training(config, backend, load_tokenizer(config.data.tokenizer))
        _empty_cache(job)
        with Batches(rows, seed=config.run.seed, global_batch=job.micro_batch, shard=(0, 1), accumulation=1) as batches:
            step = OurStep(config, backend, training, batches)
            for _ in range(job.steps):
                step()
                watch.step_ended()
            last = cast(InFlight, step._in_flight).metrics.result()["loss"].item()
    lines = (Path(config.run.dir) / "metrics.jsonl").read_text().splitlines()
    watch.losses = [*(json.loads(line)["loss"] for line in lines), last]


def _plain_model(job: Job, config: Config) -> Any:
    return AutoModelForCausalLM.from_pretrained(
        cast(str, config.model.pretrained), dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )


def run_plain(job: Job, config: Config, rows: SkewedRows, watch: Watch) -> None:
    """What one writes by hand: autocast, fused AdamW, and no wait for the device within a step."""
    model = _plain_model(job, config).to(job.device).train()
    if job.checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    parameters = list(model.parameters())
    optim = config.optim
    optimizer = torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() >= 2], "weight_decay": optim.weight_decay},
            {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0},
        ],
        lr=optim.lr,
        betas=optim.betas,
        eps=optim.eps,
        fused=True,
    )
    forward: Callable[..., Any] = torch.compile(model) if job.compile else model
    data = rows.unshifted(config, job.steps)
    _empty_cache(job)
    for step in range(job.steps):
        part = slice(step * job.micro_batch, (step + 1) * job.micro_batch)
        batch = {name: _to_device(tensor[part], job) for name, tensor in data.items()}
        with torch.autocast(job.device, dtype=torch.bfloat16):
            loss = forward(**batch, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, cast(float, config.train.max_grad_norm))
        optimizer.step()
        optimizer.zero_grad()
        watch.losses.append(loss.detach())
        watch.step_ended()


def _to_device(tensor: Tensor, job: Job) -> Tensor:
    return tensor.pin_memory().to(job.device, non_blocking=True) if job.device == "cuda" else tensor


def run_trainer(job: Job, config: Config, rows: SkewedRows, watch: Watch) -> None:
    """transformers' Trainer with its defaults, but for what must be equal: rows in order, AdamW's numbers, no saves."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Marks(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            watch.step_ended()

    class InOrder(Trainer):
        def _get_train_sampler(self, train_dataset: Any = None) -> Any:
            return torch.utils.data.SequentialSampler(cast(Any, self.train_dataset))

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = cast(Any, super().compute_loss(*args, **kwargs))
            watch.losses.append(loss.detach())
            return loss

    data = rows.unshifted(config, job.steps)
    dataset = [{name: tensor[row] for name, tensor in data.items()} for row in range(len(data["input_ids"]))]
    optim = config.optim
    arguments = TrainingArguments(
        output_dir=f"{job.folder}/trainer",
        max_steps=job.steps,
        per_device_train_batch_size=job.micro_batch,
        bf16=True,
        use_cpu=job.device == "cpu",
        torch_compile=job.compile,
        gradient_checkpointing=job.checkpointing == "full",
        gradient_checkpointing_kwargs={"use_reentrant": False},
        use_liger_kernel=job.way == "liger",
        learning_rate=optim.lr,
        lr_scheduler_type="constant",
        adam_beta1=optim.betas[0],
        adam_beta2=optim.betas[1],
        adam_epsilon=optim.eps,
        weight_decay=optim.weight_decay,
        max_grad_norm=cast(float, config.train.max_grad_norm),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    model = _plain_model(job, config)
    trainer = InOrder(model=model, args=arguments, train_dataset=cast(Any, dataset), callbacks=[Marks()])
    _empty_cache(job)
    trainer.train()


WAYS: dict[str, Callable[[Job, Config, SkewedRows, Watch], None]] = {
    "ours": run_ours,
    "plain": run_plain,
    "trainer": run_trainer,
    "liger": run_trainer,
}


def run_job(job: Job) -> dict[str, Any]:
    """Times of the steps, losses of all steps, peaks of memory (of the timed steps) and MFU of one job."""
    config = job_config(job, initial_weights(job))
    size = build_model(config.model, seed=0, seq_len=config.data.seq_len, vocabulary=256).size
    rows = SkewedRows(job.vocabulary, config.data.seq_len)
    watch = Watch(job)
    began = time.perf_counter()
    WAYS[job.way](job, config, rows, watch)
    tokens = job.micro_batch * config.data.seq_len
    flops = model_flops_per_token(
        size.parameters, size.embedding_parameters, size.layers, size.hidden, config.data.seq_len
    )
    peak = peak_flops(torch.cuda.get_device_name() if job.device == "cuda" else "cpu", "bfloat16")
    median = watch.measured["seconds_per_step"]
    return {
        **watch.measured,
        "losses": [float(loss) for loss in watch.losses],
        "tokens_per_second": tokens / median,
        "span_tokens_per_second": tokens * job.timed / watch.measured["span_seconds"],
        "tokens_per_second_quartiles": _quartile_rates(tokens, watch.measured["step_seconds"]),
        "mfu": flops * tokens / median / peak if peak else None,
        "parameters": size.parameters,
        "tokens_per_step": tokens,
        "flops_per_token": flops,
        "job_seconds": time.perf_counter() - began,
        "config": config.model_dump(mode="json"),
    }


def _quartile_rates(tokens: int, seconds: Sequence[float]) -> list[float]:
    """First and third quartile of tokens a second over the steps."""
    if len(seconds) < 2:
        return [tokens / seconds[0]] * 2
    first, _, third = statistics.quantiles(seconds, n=4)
    return [tokens / third, tokens / first]
