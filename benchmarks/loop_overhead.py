"""CPU time of our step over another one's, which takes turns with it in one process group.

    torchrun --standalone --nproc_per_node=2 benchmarks/loop_overhead.py [--mode=MODE]

Steps alternate A B B A, so that what else the machine does falls on both; a pair is two neighbours. The modes:

loop_overhead: ours is the body of `train/loop.py`: batches made ahead, placed, the step, metrics fetched a step late, a
row in metrics.jsonl. The other is what one writes on an afternoon: transformers' model with its own sdpa attention,
`fully_shard` per layer, rows held ready as tensors, mean cross entropy of fp32 logits, clip_grad_norm_, AdamW,
`loss.item()`.
loop_overhead_null: the hand-written loop in both places: how good the measure is.
watchdog_overhead: our loop with the watchdog's calls and a heartbeat every five seconds, beside our loop without them.
dropout_overhead: our step of a GPT-2 with dropout by keys at all sites, and with batches without keys, so that torch
draws from its generator.
tensor, tensor_split_rows: our tensor-parallel step and DTensor's of a smaller model: little work per operation, so that
what each way adds is seen. DTensor's way is torchtitan's: layers by columns and rows, embedding and head by words,
`loss_parallel`. Over 4 processes FSDP2 shards both over 2. split_rows: with sharding.sequence_parallel.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, cast

os.environ["USE_TORCH_XLA"] = "0"  # transformers imports torch_xla otherwise

import torch
import torch.distributed as dist
import transformers
from measuring import RESULTS, ROOT, Steps, in_turns, machine, median_ratio, write_json
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
from portable_fsdp.models.architecture import architecture_mapping
from portable_fsdp.models.dropout import BATCH_KEY
from portable_fsdp.observe.callbacks import Callback, Callbacks
from portable_fsdp.observe.console import Console
from portable_fsdp.observe.run_files import RunFiles
from portable_fsdp.optim.optimizer import learning_rate
from portable_fsdp.runtime.signals import StopRequest
from portable_fsdp.runtime.watchdog import Watchdog
from portable_fsdp.train.build import Training, build_training, open_batches
from portable_fsdp.train.control import SaveTriggers, Votes
from portable_fsdp.train.measures import InFlight, Measures, run_start

ARCHITECTURE: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 896},
    **{"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 256},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None},
}
SEQ_LEN, GLOBAL_BATCH, SEED = 256, 8, 0  # 2,048 tokens a step
SMALLER: dict[str, Any] = ARCHITECTURE | {"vocab_size": 2048, "intermediate_size": 512, "num_hidden_layers": 2}
TENSOR = 2
GPT2: dict[str, Any] = {
    **{"model_type": "gpt2", "vocab_size": 256, "n_embd": 192, "n_layer": 4, "n_head": 4, "n_positions": 512},
    **{"bos_token_id": 0, "eos_token_id": 0},
}
WARM_UP_STEPS = 3
QUARTILES = ("quartile_1", "median", "quartile_3")

Step = Callable[[], object]


def config_of(folder: Path, steps: int, architecture: dict[str, Any], seq_len: int, rows: int, **more: Any) -> Config:
    """`rows`: of the global batch."""
    values: dict[str, dict[str, Any]] = {
        "run": {"dir": str(folder), "seed": SEED},
        "model": {"architecture": architecture},
        "data": {"source": "text", "path": f"{ROOT}/portable_fsdp/**/*.py", "seq_len": seq_len},
        "train": {"steps": steps, "global_batch": rows, "micro_batch": rows // dist.get_world_size()},
        "optim": {"lr": 1e-3, "schedule": "constant", "warmup_steps": 0},
    }
    for key, value in more.items():
        values[key] = values.get(key, {}) | value
    return Config.model_validate(values)


# ------------------------------------------------------------------------------------------------------- the steps


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

    def last_loss(self) -> float:
        """Return the loss of the newest step, which metrics.jsonl doesn't have yet."""
        return cast(InFlight, self._in_flight).metrics.result()["loss"].item()


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

    def __init__(self, step: Step, folder: Path, held: ExitStack) -> None:
        rank = Partition(dist.get_rank(), dist.get_world_size())
        environ = {**os.environ, "MASTER_PORT": str(int(os.environ["MASTER_PORT"]) + 1)}
        environ["TORCHELASTIC_USE_AGENT_STORE"] = "False"
        self._step, self._peers, self._number = step, Peers(rank, 1e6, timedelta(minutes=5), environ), 0
        self._watchdog = Watchdog(folder, rank.index, "auto", prints=False, began=time.time())
        held.callback(self._watchdog.close)
        held.callback(self._peers.leave, None)
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


class DTensorStep:
    """A tensor-parallel step by torch's `parallelize_module`."""

    def __init__(self, rows: int, seq_len: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import Replicate, Shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        torch.manual_seed(SEED)
        configuration = transformers.AutoConfig.for_model(**SMALLER)
        model: Any = transformers.AutoModelForCausalLM.from_config(configuration, attn_implementation="sdpa")
        sizes = (dist.get_world_size() // TENSOR, TENSOR)
        mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("shard", "tensor"))
        plan: dict[str, Any] = {
            **{f"model.layers.*.self_attn.{name}_proj": ColwiseParallel() for name in "qkv"},
            **{f"model.layers.*.mlp.{name}_proj": ColwiseParallel() for name in ("gate", "up")},
            **{"model.layers.*.self_attn.o_proj": RowwiseParallel(), "model.layers.*.mlp.down_proj": RowwiseParallel()},
            "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
            "lm_head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False),
        }
        parallelize_module(model, mesh["tensor"], plan)
        if sizes[0] > 1:
            for unit in (*model.model.layers, model):
                fully_shard(unit, mesh=mesh["shard"])
        self._model, self._optimizer = model, torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
        self._rows = torch.randint(SMALLER["vocab_size"], (rows // sizes[0], seq_len))
        self._labels = F.pad(self._rows[:, 1:], (0, 1), value=-100)
        self._positions = torch.arange(seq_len)[None]

    def __call__(self) -> None:
        from torch.distributed.tensor.parallel import loss_parallel

        with loss_parallel():
            logits = self._model(input_ids=self._rows, position_ids=self._positions, use_cache=False).logits
            loss = F.cross_entropy(logits.flatten(0, 1), self._labels.flatten())
            loss.backward()
        self._optimizer.step()
        self._optimizer.zero_grad()
        loss.item()


# ------------------------------------------------------------------------------------------------------- the modes

Pair = tuple[Step, Step, Config]


def loops(folder: Path, steps: int, held: ExitStack, *, watched: bool = False) -> Pair:
    config = config_of(folder, steps, ARCHITECTURE, SEQ_LEN, GLOBAL_BATCH)
    backend = held.enter_context(open_backend(config, device="cpu", backend="native"))
    corpus = build_data(config.data)
    training = build_training(config, backend, corpus.tokenizer)
    ours = OurStep(config, backend, training, held.enter_context(open_batches(config, backend, training, corpus)))
    if watched:
        return WatchedStep(ours, folder, held), ours, config
    return ours, HandWrittenStep(cast(PackedRows, corpus.rows)), config


def hand_written_twice(folder: Path, steps: int, held: ExitStack) -> Pair:
    config = config_of(folder, steps, ARCHITECTURE, SEQ_LEN, GLOBAL_BATCH)
    rows = cast(PackedRows, build_data(config.data).rows)
    return HandWrittenStep(rows), HandWrittenStep(rows), config


def dropout(folder: Path, steps: int, held: ExitStack) -> Pair:
    model, rows = {"dropout": 0.1, "attention": "static"}, 2 * dist.get_world_size()
    config = config_of(folder, steps, GPT2, SEQ_LEN, rows, model=model)
    step = Steps(config, held)
    return step, partial(step, leave_out=BATCH_KEY), config


def tensor(folder: Path, steps: int, held: ExitStack, *, splits_rows: bool = False) -> Pair:
    train = {"micro_batch": 4 * TENSOR // dist.get_world_size(), "max_grad_norm": None}
    sharding = {"tensor": TENSOR, "sequence_parallel": splits_rows}
    config = config_of(folder, steps, SMALLER, 128, 4, train=train, sharding=sharding)
    return Steps(config, held), DTensorStep(4, 128), config


class Mode(NamedTuple):
    """`make` gets a folder for the run, the number of our steps, and what holds open contexts."""

    what: str
    goal: float  # of the interval's upper end
    make: Callable[[Path, int, ExitStack], Pair]


MODES = {
    "loop_overhead": Mode("ours / hand-written FSDP2", 1.02, loops),
    "loop_overhead_null": Mode("hand-written FSDP2 / the same", 1.02, hand_written_twice),
    "watchdog_overhead": Mode("ours with watchdog and heartbeats / ours without", 1.01, partial(loops, watched=True)),
    "dropout_overhead": Mode("dropout by keys / torch's", 1.15, dropout),
    "tensor": Mode("ours / DTensor's", 0.8, tensor),
    "tensor_split_rows": Mode("ours with split rows / DTensor's", 0.8, partial(tensor, splits_rows=True)),
}


def cpu_seconds(step: Step) -> float:
    dist.barrier()
    began = time.process_time()
    step()
    return time.process_time() - began


def report(seconds: dict[str, list[float]], config: Config, mode: Mode) -> dict[str, Any]:
    """`seconds` of this process -> the result, of all."""
    total = torch.tensor([*seconds.values()], dtype=torch.float64)
    dist.all_reduce(total)
    first, second = total.tolist()
    architecture = architecture_mapping(config.model.architecture or {})
    with torch.device("meta"):
        model: Any = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(**architecture))
    return {
        "what": f"CPU seconds of a step summed over ranks: {mode.what}",
        "ratio": median_ratio(first, second)._asdict(),
        "goal_of_high": mode.goal,
        "pairs": len(first),
        "first_s": dict(zip(QUARTILES, statistics.quantiles(first, n=4), strict=True)),
        "second_s": dict(zip(QUARTILES, statistics.quantiles(second, n=4), strict=True)),
        "config": {
            "architecture": architecture,
            "parameters": model.num_parameters(),
            "tokens_per_step": config.data.seq_len * config.train.global_batch,
            "processes": dist.get_world_size(),
            "threads": torch.get_num_threads(),
            "device": "cpu, gloo",
        },
        "machine": machine(),
        "versions": {"torch": torch.__version__, "transformers": transformers.__version__},
    }


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=MODES, default="loop_overhead")
    parser.add_argument("--pairs", type=int, default=60, help="pairs of steps that are timed, at least 2")
    parser.add_argument("--out", type=Path, help="the JSON file to write, instead of results/MODE.json")
    arguments = parser.parse_args()
    mode = MODES[arguments.mode]
    dist.init_process_group("gloo")
    with tempfile.TemporaryDirectory() as folder, ExitStack() as held:
        steps = 2 * (arguments.pairs + WARM_UP_STEPS)
        first, second, config = mode.make(Path(folder), steps, held)
        seconds = in_turns({"first": first, "second": second}, arguments.pairs, cpu_seconds, warm_up=WARM_UP_STEPS)
        result = report(seconds, config, mode)
        if dist.get_rank() == 0:
            print(table(result))
            write_json(arguments.out or RESULTS / f"{arguments.mode}.json", result)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
