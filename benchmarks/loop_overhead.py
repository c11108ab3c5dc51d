"""What our loop costs beside a hand-written FSDP2 one: CPU time of a step, interleaved in one process group.

    torchrun --standalone --nproc_per_node=2 benchmarks/loop_overhead.py

Ours is the body of `train/loop.py`: batches made ahead, placed, the step, metrics fetched a step late, a row in
metrics.jsonl. The other is what one writes on an afternoon: transformers' model with its own sdpa attention,
`fully_shard` per layer, rows held ready as tensors, mean cross entropy of fp32 logits, clip_grad_norm_, AdamW,
`loss.item()`. Steps alternate A B B A, so that what else the machine does falls on both; a pair is two neighbours.

With --watchdog: our loop with the watchdog's calls and a heartbeat every five seconds, beside our loop without them.
"""

import argparse
import json
import os
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple, cast

os.environ["USE_TORCH_XLA"] = "0"  # transformers imports torch_xla otherwise

import torch
import torch.distributed as dist
import transformers
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

from portable_fsdp.backends.contract import Backend, Partition
from portable_fsdp.backends.open import open_backend
from portable_fsdp.backends.peers import LONGEST_ROUND_S, Peers
from portable_fsdp.config.schema import Config
from portable_fsdp.data.batches import Batches
from portable_fsdp.data.build import build_data
from portable_fsdp.data.packing import PackedRows
from portable_fsdp.observe.callbacks import Callback, Callbacks
from portable_fsdp.observe.console import Console
from portable_fsdp.observe.run_files import RunFiles
from portable_fsdp.optim.optimizer import learning_rate
from portable_fsdp.runtime.signals import StopRequest
from portable_fsdp.runtime.watchdog import Watchdog
from portable_fsdp.train.build import Training, build_training
from portable_fsdp.train.control import SaveTriggers, Votes
from portable_fsdp.train.measures import InFlight, Measures, run_start

ARCHITECTURE: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 896},
    **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
}
SEQ_LEN, GLOBAL_BATCH, SEED = 256, 8, 0  # 2,048 tokens a step
WARM_UP_STEPS = 3
RESAMPLES = 10_000
MODES = {
    "loop_overhead": ("ours / hand-written FSDP2", 1.02),
    "loop_overhead_null": ("hand-written FSDP2 / the same", 1.02),
    "watchdog_overhead": ("ours with watchdog and heartbeats / ours without", 1.01),
}
RESULTS = Path(__file__).parent / "results"

Step = Callable[[], None]


class Ratio(NamedTuple):
    """Median over pairs of ours / hand-written, with the bounds of its bootstrap 95 % interval."""

    median: float
    low: float
    high: float


def config(folder: Path, steps: int) -> Config:
    return Config.model_validate(
        {
            "run": {"dir": str(folder), "seed": SEED},
            "model": {"architecture": ARCHITECTURE},
            "data": {
                "source": "text",
                "path": str(Path(__file__).parents[1] / "portable_fsdp" / "**" / "*.py"),
                "seq_len": SEQ_LEN,
            },
            "train": {
                "steps": steps,
                "global_batch": GLOBAL_BATCH,
                "micro_batch": GLOBAL_BATCH // dist.get_world_size(),
            },
            "optim": {"lr": 1e-3, "schedule": "constant"},
        }
    )


class OurStep:
    """The body of the trainer's loop, one step a call; a step that saves nothing."""

    def __init__(self, config: Config, backend: Backend, training: Training, batches: Batches) -> None:
        self._config, self._backend, self._training, self._batches = config, backend, training, batches
        self._stop = StopRequest()
        self._steps = cast(int, config.train.steps)
        start = run_start(config, config, backend, training.built.size, self._steps, None)
        self._measures = Measures(backend, start)
        self._callbacks = Callbacks([RunFiles(), Console()], [], backend)
        self._callbacks.call(Callback.on_start, start)
        self._triggers = SaveTriggers(start.folder, None)
        self._step = 0
        self._in_flight: InFlight | None = None

    def __call__(self) -> None:
        self._step += 1
        began = self._measures.begin_step()
        lr = learning_rate(self._config.optim, self._step, self._steps)
        rows = next(self._batches)
        waited = time.perf_counter() - began
        votes = Votes(self._stop.requested, self._backend.process.index == 0 and self._triggers.due)
        placed = [self._backend.place(batch) for batch in rows.micro_batches]
        control = self._measures.control(rows.count, votes)
        with self._measures.timed("step"):
            metrics = self._backend.fetch(self._training.step(placed, lr, control))
        previous, self._in_flight = self._in_flight, InFlight(self._step, lr, began, waited, metrics)
        if previous is not None:
            end, _ = self._measures.read(previous, until=began)
            self._callbacks.call(Callback.on_step, end)


class HandWrittenStep:
    """A plain FSDP2 loop, one step a call."""

    def __init__(self, rows: PackedRows) -> None:
        torch.manual_seed(SEED)
        configuration = transformers.AutoConfig.for_model(**ARCHITECTURE)
        model = transformers.AutoModelForCausalLM.from_config(configuration, attn_implementation="sdpa")
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        self._model = model.train()
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
        count = len(rows)
        self._rows: Tensor = torch.tensor(rows.tokens[: count * SEQ_LEN].astype("int64")).view(count, SEQ_LEN)
        self._order = torch.Generator().manual_seed(SEED)
        self.losses: list[float] = []

    def __call__(self) -> None:
        picked = torch.randint(len(self._rows), (GLOBAL_BATCH,), generator=self._order)
        rows = self._rows[picked[dist.get_rank() :: dist.get_world_size()]]
        logits = self._model(input_ids=rows, use_cache=False).logits.float()
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
        self._optimizer.step()
        self._optimizer.zero_grad()
        self.losses.append(loss.item())


class WatchedStep:
    """A step with what the watchdog and the heartbeats add to it in this process."""

    def __init__(self, step: Step, folder: Path) -> None:
        rank = Partition(dist.get_rank(), dist.get_world_size())
        environ = {**os.environ, "MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + 1)}
        environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        self._step, self._peers, self._number = step, Peers(rank, 1e6, timedelta(minutes=5), environ), 0
        self._watchdog = Watchdog(folder, rank.index, "auto", prints=False)
        self._peers.meet()
        self._peers.slow_down()
        self._peers.watch(self._watchdog)
        self._next_beat = time.monotonic()

    def __call__(self) -> None:
        self._number += 1
        self._watchdog.begin_step(self._number, "waiting for its rows")
        self._watchdog.doing("computing", ())
        self._step()
        for what in ("callbacks", "callbacks"):  # after the step, and after the commits
            with self._watchdog.within(what):
                pass
        if time.monotonic() >= self._next_beat:  # not in a thread: it would also run in the other loop's steps
            self._next_beat += 2 * LONGEST_ROUND_S  # half of the time is the other loop's
            self._peers.beat_once(LONGEST_ROUND_S)

    def close(self) -> None:
        self._peers.leave(None)
        self._watchdog.close()


def measure(ours: Step, theirs: Step, pairs: int) -> list[tuple[float, float]]:
    """CPU seconds of (ours, hand-written) pair by pair, summed over all ranks; the order turns from pair to pair."""
    seconds: list[tuple[float, float]] = []
    for pair in range(pairs):
        order = (ours, theirs) if pair % 2 == 0 else (theirs, ours)
        took = {step: _cpu_seconds(step) for step in order}
        seconds.append((took[ours], took[theirs]))
    total = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(total)
    return [(row[0], row[1]) for row in total.tolist()]


def _cpu_seconds(step: Step) -> float:
    dist.barrier()
    began = time.process_time()
    step()
    return time.process_time() - began


def median_ratio(seconds: list[tuple[float, float]]) -> Ratio:
    ratios = [ours / theirs for ours, theirs in seconds]
    draw = random.Random(SEED)
    medians = sorted(statistics.median(draw.choices(ratios, k=len(ratios))) for _ in range(RESAMPLES))
    return Ratio(statistics.median(ratios), medians[int(0.025 * RESAMPLES)], medians[int(0.975 * RESAMPLES)])


def report(seconds: list[tuple[float, float]], parameters: int, mode: str) -> dict[str, Any]:
    ratio = median_ratio(seconds)
    ours, theirs = zip(*seconds, strict=True)
    return {
        "what": f"CPU seconds of a step summed over ranks: {MODES[mode][0]}",
        "ratio": ratio._asdict(),
        "goal_of_high": MODES[mode][1],
        "pairs": len(seconds),
        "first_s": _spread(ours),
        "second_s": _spread(theirs),
        "config": {
            "architecture": ARCHITECTURE,
            "parameters": parameters,
            "tokens_per_step": SEQ_LEN * GLOBAL_BATCH,
            "processes": dist.get_world_size(),
            "threads": torch.get_num_threads(),
            "device": "cpu, gloo",
        },
        "machine": {"cpu": cpu_model(), "cores": os.cpu_count()},
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


def _spread(values: tuple[float, ...]) -> dict[str, float]:
    first, middle, third = statistics.quantiles(values, n=4)
    return {"quartile_1": first, "median": middle, "quartile_3": third}


def cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def table(result: dict[str, Any]) -> str:
    ratio = result["ratio"]
    lines = [f"{'':14}{'quartile 1':>12}{'median':>12}{'quartile 3':>12}   CPU seconds a step, all ranks"]
    for name in ("first", "second"):
        lines.append(f"{name:14}" + "".join(f"{value:12.4f}" for value in result[f"{name}_s"].values()))
    lines.append(
        f"ratio {ratio['median']:.4f}, 95 % interval {ratio['low']:.4f} to {ratio['high']:.4f} over {result['pairs']} "
        f"pairs (goal: upper end <= {result['goal_of_high']}): {result['what']}"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description="CPU time of our step over a hand-written FSDP2 loop's.")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of steps that are timed, at least 2")
    parser.add_argument("--out", type=Path, help="the JSON file to write, instead of one in results/")
    parser.add_argument("--null", action="store_true", help="hand-written against itself: how good the measure is")
    parser.add_argument("--watchdog", action="store_true", help="our loop with and without watchdog and heartbeats")
    arguments = parser.parse_args()
    mode = "loop_overhead_null" if arguments.null else "watchdog_overhead" if arguments.watchdog else "loop_overhead"
    out: Path = arguments.out or RESULTS / f"{mode}.json"
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder:
        configuration = config(Path(folder), steps=2 * (arguments.pairs + WARM_UP_STEPS))
        with open_backend(configuration, device="cpu", backend="native") as backend:
            corpus = build_data(configuration.data)
            assert isinstance(corpus.rows, PackedRows)
            training = build_training(configuration, backend, corpus.tokenizer)
            theirs = HandWrittenStep(corpus.rows)
            shard = (backend.data_shard.index, backend.data_shard.count)
            with Batches(corpus.rows, seed=SEED, global_batch=GLOBAL_BATCH, shard=shard, accumulation=1) as batches:
                ours = OurStep(configuration, backend, training, batches)
                watched = WatchedStep(ours, Path(folder)) if arguments.watchdog else None
                first = HandWrittenStep(corpus.rows) if arguments.null else watched or ours
                second = ours if watched else theirs
                for _ in range(WARM_UP_STEPS):
                    first()
                    second()
                seconds = measure(first, second, arguments.pairs)
                if watched:
                    watched.close()
            if backend.process.index == 0:
                result = report(seconds, training.built.size.parameters, mode)
                print(table(result))
                out.write_text(json.dumps(result, indent=2) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
