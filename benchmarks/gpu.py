"""Tuning, correctness, speed and plans of memory on one GPU; the answer is a JSON file. README.md says more.

    python benchmarks/gpu.py                           # results/gpu_<name of the GPU>.json, in under ten minutes
    python benchmarks/gpu.py --tiny --out FILE         # the same on CPU with a tiny model: does the script itself work
    python benchmarks/gpu.py --parts references cost   # results/gpu_plan.json: plans of memory, without a GPU
    python benchmarks/gpu.py --parts plans             # plans against this GPU: results/gpu_plan_<name of the GPU>.json

Each timed run and each plan runs `gpu_worker.py` in a separate process, for its own peak of memory, with a time limit.
What doesn't fit into the time is named. Exit code 1 if tune, a check, a run or a plan failed.
"""

import argparse
import importlib.util
import json
import math
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from measuring import RESULTS, ROOT, markdown

from portable_fsdp.config.describe import changed_values
from portable_fsdp.convert.read import load_config
from portable_fsdp.runtime.child import Worker, WorkerFailedError
from portable_fsdp.runtime.errors import BackendError, ConfigError, PortableFSDPError

CONFIG = ROOT / "configs" / "llama_1b.yaml"
GIBIBYTE = 2**30
Row = dict[str, Any]

# -------------------------------------------------------------------------------------------------- what is measured

TUNE_S, TINY_TUNE_S = 15.0, 60.0  # imports and the end, beyond the seconds that tune gets; with --tiny
LOSS_BOUND = 2e-3  # relative, between the ways: the design's bound for bfloat16
# Expected seconds of a run, not compiled and compiled.
GUESS_S = {False: 25.0, True: 60.0}
# All settings whose default differs between the ways; the rest of the config is llama_1b.yaml.
SETTINGS = (
    "optim.lr=1e-4 optim.schedule=constant optim.warmup_steps=0 optim.betas=[0.9,0.95] optim.weight_decay=0.1 "
    "train.max_grad_norm=1.0 precision.compute=bfloat16 sharding.strategy=FULL_SHARD "
    "memory.gradient_checkpointing=none compile.enabled=false"
)
# The learning rate is such that a few steps show another one, or another order of rows.
TINY = (
    "data.seq_len=32 optim.lr=3e-3 model.architecture.hidden_size=64 model.architecture.intermediate_size=128 "
    "model.architecture.num_hidden_layers=2 model.architecture.num_attention_heads=4 model.architecture.head_dim=16 "
    "model.architecture.num_key_value_heads=2 model.architecture.max_position_embeddings=32"
)


class Work(NamedTuple):
    """A step that all ways compute alike."""

    rows: int
    vocabulary: int

    def __str__(self) -> str:
        return f"{self.rows} rows, vocabulary {self.vocabulary:,}"

    def overrides(self, tiny: bool) -> list[str]:
        """The config of our eager loop, as changes to llama_1b.yaml."""
        size = (f"train.global_batch={self.rows}", f"train.micro_batch={self.rows}")
        return [
            *SETTINGS.split(),
            *(TINY.split() if tiny else ()),
            *size,
            f"model.architecture.vocab_size={self.vocabulary}",
        ]


class Way(NamedTuple):
    """A loop of gpu_worker.py; `options`: `section.key=value` of our loop, in addition to the eager one's."""

    loop: str
    compile: bool = False
    options: tuple[str, ...] = ()


COMPILED = "compile.enabled=true"
RECOMPUTED = "memory.gradient_checkpointing=full"
AUTO = ("train.micro_batch=auto", "memory.gradient_checkpointing=auto", "compile.enabled=auto")
# The most telling first: the last are left out first. MAIN_WAYS run for both works before any other.
WAYS = {
    "auto": Way("ours", True, AUTO),
    "eager": Way("ours"),
    "trainer": Way("trainer"),
    "liger": Way("liger"),
    "tuned": Way("ours", True),  # and what tune chose
    "plain": Way("plain"),
    "trainer-compiled": Way("trainer", True),
    "compiled": Way("ours", True, (COMPILED,)),
    "plain-compiled": Way("plain", True),
    "float8": Way("ours", True, (COMPILED, "precision.products=float8")),
    "full": Way("ours", False, (RECOMPUTED,)),
    "offload": Way("ours", False, (RECOMPUTED, "memory.offload=activations")),
}
MAIN_WAYS = ("auto", "eager", "trainer", "liger", "tuned", "plain")
TINY_WAYS = ("auto", "eager", "trainer", "tuned", "plain")
NEEDED = {"trainer": ("accelerate",), "liger": ("accelerate", "liger_kernel"), "float8": ("torchao",)}  # loop or way
TUNED_WORK, LLAMA_3_WORK = Work(8, 256), Work(4, 128_256)  # with Llama 3's vocabulary the head and the loss count


class Plan(NamedTuple):
    """A plan of the memory of an eager step on H100s; `reference`: torchtitan's GiB, or the worker's part that measures
    it."""

    what: str
    model: Row
    seq_len: int
    rows: int  # at a time, on each device
    settings: Row
    devices: int = 1
    reference: float | str = "measured"


def _llama(hidden: int, inner: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> Row:
    return {
        **{"model_type": "llama", "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers},
        **{"num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary},
        "max_position_embeddings": 131072,
    }


EIGHT_B = _llama(4096, 14336, 32, 32, 8, 128256)
SEVENTY_B = _llama(8192, 28672, 80, 64, 8, 128256)
ONE_B = _llama(2048, 8192, 16, 32, 8, 128256)
SMALL = _llama(768, 2048, 12, 12, 12, 32000)
FULL = {"memory.gradient_checkpointing": "full"}
BF16 = {"precision.compute": "bfloat16"}
BF16_FULL = {**BF16, **FULL}
KEPT = {**BF16, "memory.gradient_checkpointing": "selective", "memory.save_ops": ["matmul"]}
KEPT_BOTH = {**KEPT, "memory.save_ops": ["matmul", "attention"]}
THREE = {**BF16_FULL, "sharding.strategy": "NO_SHARD", "train.global_batch": 6}
SOURCE = "github.com/pytorch/torchtitan/blob/31a17bf/benchmarks/llama3_h100_202412_torchtitan.md, tables 1 and 3"
PLANS = {
    "references": (
        Plan("8B on 8, 2 x 8192, checkpointing none: FSDPMemTracker", EIGHT_B, 8192, 2, BF16, 8, "tracked"),
        Plan("8B on 8, 2 x 8192, checkpointing full: FSDPMemTracker", EIGHT_B, 8192, 2, BF16_FULL, 8, "tracked"),
        Plan("8B on 8, 2 x 8192: torchtitan's max_reserved", EIGHT_B, 8192, 2, KEPT, 8, 82.4),
        Plan("8B on 128, 2 x 8192: torchtitan's max_reserved", EIGHT_B, 8192, 2, KEPT, 128, 67.0),
    ),
    "cost": (
        Plan("8B on 8", EIGHT_B, 8192, 1, BF16_FULL, 8, ""),
        Plan("8B on 128", EIGHT_B, 8192, 1, BF16_FULL, 128, ""),
        Plan("8B on 512", EIGHT_B, 8192, 1, BF16_FULL, 512, ""),
        Plan("70B on 256", SEVENTY_B, 8192, 1, BF16_FULL, 256, ""),
    ),
    "plans": (  # for a GPU of 80 GB, but for the last one
        Plan("160M, 1k", SMALL, 1024, 8, BF16),
        Plan("160M, 2k, float32, SHARD_GRAD_OP", SMALL, 2048, 4, {"sharding.strategy": "SHARD_GRAD_OP"}),
        Plan("1.5B, 2k", ONE_B, 2048, 4, BF16),
        Plan("1.5B, 16k, recomputed", ONE_B, 16384, 1, BF16_FULL),
        Plan("1.5B, 8k, products and attention kept", ONE_B, 8192, 1, KEPT_BOTH),
        Plan("1.5B, 4k, offloaded, recomputed", ONE_B, 4096, 2, {**BF16_FULL, "memory.cpu_offload": True}),
        Plan("1.5B, 4k, NO_SHARD, three micro batches", ONE_B, 4096, 2, THREE),
        Plan("8B, 4k, bfloat16 at rest, recomputed", EIGHT_B, 4096, 2, {**BF16_FULL, "precision.master": "bfloat16"}),
    ),
    "tiny plans": (Plan("tiny", _llama(512, 1408, 2, 8, 4, 4096), 64, 2, FULL),),
}
PLAN_S = 900.0  # at most for one


# ---------------------------------------------------------------------------------------------------------- running


@dataclass
class Benchmark:
    """The state of the whole command; `result` is what the file holds, written again after each row."""

    tiny: bool
    deadline: float  # of time.monotonic
    folder: Path
    overrides: list[str]
    ways: list[str]
    result: Row

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    def tune(self, seconds: float) -> Iterator[tuple[str, Row]]:
        seconds = min(seconds, TINY_TUNE_S if self.tiny else math.inf)
        path = Path(shutil.copy(CONFIG, self.folder))  # tune writes beside it
        given = [*TUNED_WORK.overrides(self.tiny), *self.overrides]
        words = [f"--config={path}", f"--minutes={max(seconds - TUNE_S, 1) / 60}", f"--device={self.device}"]
        words += ["--backend=native", "--num_devices=1", *given]
        began, tuned = time.monotonic(), path.with_suffix(".tuned.yaml")
        row = _ask("gpu:tune", seconds, words) | {"process_seconds": time.monotonic() - began}
        # It writes the file after each candidate: what was measured counts although it failed, or ran out of time.
        if tuned.exists():
            lines = [line[2:] for line in tuned.read_text().splitlines() if line.startswith("#")]
            row |= {"measured": lines, "chosen": changed_values(load_config(path, given), load_config(tuned))}
        yield "tuning", row

    def checks(self, seconds: float) -> Iterator[tuple[str, Row]]:
        """What they leave unused of the time is the timed runs'. Of `outcome`s, "refused" is the backend's."""
        deadline = time.monotonic() + seconds
        with Worker(seconds) as worker:
            for name in worker("gpu_worker:checks", self.device, self.tiny):
                began, figures = time.monotonic(), dict[str, Any]()
                outcome, note = "left out", f"no time left of {seconds:.0f} s"
                if began < deadline:
                    try:
                        figures = worker("gpu_worker:check", name, self.device, self.tiny)
                        note = figures.pop("mismatch", "")
                        outcome = "failed" if note else "passed"
                    except (BackendError, ConfigError) as refusal:
                        outcome, note = "refused", str(refusal)
                    except (WorkerFailedError, PortableFSDPError) as error:
                        outcome, note = "failed", str(error)
                took = time.monotonic() - began
                yield "checks", {"name": name, "outcome": outcome, "note": note, "figures": figures, "seconds": took}

    def speed(self, seconds: float) -> Iterator[tuple[str, Row]]:
        works = (TUNED_WORK,) if self.tiny else (TUNED_WORK, LLAMA_3_WORK)
        runs = [(work, name) for work in works for name in self.ways if name != "tuned" or work == TUNED_WORK]
        for work, name in sorted(runs, key=lambda run: run[1] not in MAIN_WAYS):
            labels = {**work._asdict(), "way": name}
            if reason := self._reason_to_leave_out(name):
                yield "left_out", {**labels, "reason": reason}
            else:
                yield "speed", labels | self._timed(work, name)

    def _timed(self, work: Work, name: str) -> Row:
        way, began = WAYS[name], time.monotonic()
        chosen = self.result["tuning"]["chosen"] if name == "tuned" else {}
        options = [*self.overrides, *way.options, *(f"{key}={value}" for key, value in chosen.items())]
        warm_up, timed = (1, 7) if self.tiny else (5, 20)  # steps
        job = {
            **work._asdict(),
            **{"loop": way.loop, "compile": way.compile, "overrides": work.overrides(self.tiny)},
            **{"options": options if way.loop == "ours" else [], "warm_up": warm_up, "timed": timed},
            **{"device": self.device, "folder": str(self.folder)},
        }
        row = _ask("gpu_worker:speed", self.left, job)
        config = row.pop("config", None)
        self.result.setdefault("config", config)  # of the first; `rows`, `vocabulary` and `chosen` change keys of it
        return {"process_seconds": time.monotonic() - began, **row}

    def _reason_to_leave_out(self, name: str) -> str | None:
        way = WAYS[name]
        for what in (way.loop, name):
            for package in NEEDED.get(what, ()):
                if importlib.util.find_spec(package) is None:
                    return f"{what} needs the package {package}, which is not installed"
        if name == "tuned" and "chosen" not in self.result["tuning"]:
            return "tune chose nothing"
        if way.compile and name not in ("auto", "tuned"):
            probe = next((check for check in self.result["checks"] if check["name"] == "torch.compile"), None)
            if probe is not None and probe["outcome"] != "passed":
                return f"torch.compile doesn't work here: {probe['note'].strip().splitlines()[-1]}"
        needed = GUESS_S[way.compile]
        return f"no time left: {self.left:.0f} s of the {needed:.0f} s that it takes" if self.left < needed else None

    def plans(self, part: str) -> Iterator[tuple[str, Row]]:
        for plan in PLANS["tiny plans" if part == "plans" and self.tiny else part]:
            settings = {"train.global_batch": plan.rows * plan.devices, **plan.settings}
            shape = (plan.model, plan.seq_len, plan.rows, settings)
            target, published = "cpu" if self.tiny else "h100", isinstance(plan.reference, float)
            row: Row = {
                "what": plan.what,
                **_ask("gpu_worker:planned", PLAN_S, target, plan.devices, published, *shape),
            }
            if isinstance(plan.reference, float):
                row |= {"source": SOURCE, "reference_bytes": int(plan.reference * GIBIBYTE)}
            elif plan.reference == "measured":
                row |= _ask("gpu_worker:measured", PLAN_S, self.device, *shape)
            elif plan.reference == "tracked":
                row |= _ask("gpu_worker:tracked", PLAN_S, plan.devices, *shape)
            found = next((row[key] for key in ("reference_bytes", "live_bytes", "allocated_bytes") if key in row), None)
            if found and "planned_live_bytes" in row:
                row["ratio"] = row[f"planned_{'reserved' if published else 'live'}_bytes"] / found
                if "reserved_bytes" in row:
                    row["ratio_reserved"] = row["planned_reserved_bytes"] / row["reserved_bytes"]
            yield part, row


def _ask(work: str, limit_s: float, *arguments: Any) -> Row:
    """The row of a function in a new process; its `status` and `error` if it failed."""
    try:
        with Worker(max(limit_s, 1)) as worker:
            return worker(work, *arguments)
    except WorkerFailedError as error:
        return {"status": "out of time" if error.ended.how == "late" else "failed", "error": str(error)}
    except PortableFSDPError as error:
        return {"status": "failed", "error": str(error)}


def tune(words: list[str]) -> Row:
    """Run the command in a worker, whose last lines are the error if it fails."""
    from portable_fsdp.tune.__main__ import main

    if code := main(words):
        sys.exit(code)
    return {}


def set_environment(folder: Path, tiny: bool) -> None:
    """One GPU, no hub, no other engine, caches of compiled code of this command's own, and no launcher's variables."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name, None)
    os.environ.pop("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", None)  # some images set it; float32 is to be float32
    if tiny:  # on a busy machine several threads would wait for each other in each small product
        os.environ["OMP_NUM_THREADS"] = "1"
    os.environ |= {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "USE_TORCH_XLA": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "huggingface"),
        "GLOO_SOCKET_IFNAME": "lo",  # a host without a network has no other
        "NCCL_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


# --------------------------------------------------------------------------------------------------- what came out


def compare(runs: list[Row]) -> list[Row]:
    """A row for each work: each way's median rate, ours over each other, and the losses."""
    rows: list[Row] = []
    for work in dict.fromkeys(_work(run) for run in runs):
        of = {run["way"]: run for run in runs if _work(run) == work and run["status"] == "finished"}
        rates = {way: run["tokens_per_second"] for way, run in of.items()}
        ours = [way for way in of if WAYS[way].loop == "ours"]
        row: Row = {**work._asdict(), "tokens_per_second": rates}
        row["ratios"] = {way: {other: rates[way] / rates[other] for other in of if other != way} for way in ours}
        if "plain" in of:
            steps = {way: zip(run["losses"], of["plain"]["losses"], strict=True) for way, run in of.items()}
            row["loss_difference_from_plain"] = {  # the largest
                way: max(abs(a - b) / b for a, b in pairs) for way, pairs in steps.items()
            }
            bounded = [row["loss_difference_from_plain"][way] for way in of if way != "float8"]  # it rounds more
            row["losses_agree"] = max(bounded) <= LOSS_BOUND
        rows.append(row)
    return rows


def _work(run: Row) -> Work:
    return Work(run["rows"], run["vocabulary"])


def write(result: Row, path: Path) -> None:
    """All of the result, as a new file in place of the old one."""
    result["comparison"] = compare(result["speed"])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.with_suffix(".part").write_text(json.dumps(result, indent=2) + "\n")
    os.replace(path.with_suffix(".part"), path)


def line(key: str, row: Row) -> str:
    """A row for people: what it is of, its numbers, its choice, and the last line of what it says."""
    what = row.get("what") or row.get("name") or key
    if "way" in row:
        what = f"{_work(row)}: {row['way']}"
    words: list[str] = []
    for name, value in {**row, **row.get("figures", {})}.items():
        if name == "chosen":
            words.append("chosen: " + (" ".join(f"{k}={v}" for k, v in value.items()) or "the config's own"))
        elif name in ("outcome", "status", "at", "note", "reason", "error"):
            words += value.strip().splitlines()[-1:]
        elif name.endswith("_bytes") and value is not None:
            words.append(f"{name.removesuffix('_bytes')} {value / GIBIBYTE:.3f} GiB")
        elif isinstance(value, float):
            words.append(f"{name} {value:,.6g}")
    return "\n".join([*row.get("measured", ()), f"{what}: {'; '.join(words)}"])


def _ratio_lines(row: Row) -> list[str]:
    """Our ways over all, in tokens a second; then the losses."""
    columns = list(row["tokens_per_second"])
    cells = [[way, *(f"{own.get(name, 1):.3f}" for name in columns)] for way, own in row["ratios"].items()]
    lines = [f"{_work(row)}; ours over:", *markdown(("", *columns), cells)]
    if "losses_agree" in row:
        worst = max(row["loss_difference_from_plain"].values())
        lines.append(f"  losses differ by {worst:.1e}" + ("" if row["losses_agree"] else ": TOO MUCH"))
    return lines


# ---------------------------------------------------------------------------------------------------------- command


class Part(NamedTuple):
    """A part of the command, which yields a row and the key of the result that it is added to."""

    measure: Callable[[Benchmark, float], Iterator[tuple[str, Row]]]
    share: float = 1.0  # at most, of the time that is left when others follow
    needs_gpu: bool = True


PARTS = {
    "tune": Part(Benchmark.tune, 0.25),
    "checks": Part(Benchmark.checks, 0.35),
    "speed": Part(Benchmark.speed),
    "references": Part(lambda benchmark, _: benchmark.plans("references"), needs_gpu=False),
    "cost": Part(lambda benchmark, _: benchmark.plans("cost"), needs_gpu=False),
    "plans": Part(lambda benchmark, _: benchmark.plans("plans")),
}


def _driver() -> str | None:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def main(held: ExitStack) -> int:
    parser = argparse.ArgumentParser(description="Tuning, correctness, speed and plans of memory on one GPU.")
    parser.add_argument("--out", type=Path, help="the JSON file to write, instead of one in results/")
    parser.add_argument("--minutes", type=float, default=9, help="of wall time; what doesn't fit is left out and named")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=["tune", "checks", "speed"])
    parser.add_argument("--only", nargs="+", choices=WAYS, help="ways to time")
    parser.add_argument(
        "--override", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for our loop and tune; repeatable"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU; its times mean nothing")
    arguments = parser.parse_args()
    tiny, began = arguments.tiny, time.monotonic()
    parts, ways = arguments.parts, arguments.only or [*(TINY_WAYS if tiny else WAYS)]
    needs_gpu = any(PARTS[part].needs_gpu for part in parts)
    folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="portable_fsdp_gpu_")))
    set_environment(folder, tiny)
    environment = _ask("gpu_worker:environment", 120, "cuda" if needs_gpu and not tiny else "cpu")
    if "error" in environment:
        sys.exit(
            f"benchmarks/gpu.py: expected a GPU that torch can use; --tiny runs on the CPU.\n{environment['error']}"
        )
    result: Row = {
        "what": "tune; options against a plain loop; tokens/s of our loop, a plain one, transformers' Trainer; plans",
        "command": ["python", "benchmarks/gpu.py", *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "minutes": arguments.minutes,
        "tiny": tiny,
        "loss_bound": LOSS_BOUND,
        "environment": environment | {"driver": None if tiny else _driver()},
        **{"tuning": {}, "checks": [], "speed": [], "left_out": []},
        **{part: [] for part in parts if part in PLANS},
    }
    name = "gpu_plan" if all(part in PLANS for part in parts) else "gpu"
    if needs_gpu:
        name += "_" + re.sub(r"[^a-z0-9]+", "_", environment["device"].lower())
    path: Path = arguments.out or RESULTS / f"{name}.json"
    benchmark = Benchmark(tiny, began + 60 * arguments.minutes - 5, folder, arguments.override, ways, result)
    for part in parts:
        share = 1.0 if part == parts[-1] else PARTS[part].share
        for key, row in PARTS[part].measure(benchmark, benchmark.left * share):
            if key == "tuning":
                result[key] = row
            else:
                result[key].append(row)
            result["seconds"] = round(time.monotonic() - began, 1)
            write(result, path)
            print(line(key, row), flush=True)
    for outcome, count in Counter(check["outcome"] for check in result["checks"]).items():
        print(f"checks {outcome}: {count}")
    for row in result["comparison"]:
        print("\n".join(_ratio_lines(row)))
    print(f"{result['environment']}\nwritten to {path}")
    failed = [check for check in result["checks"] if check["outcome"] == "failed"]
    failed += [run for run in result["speed"] if run["status"] == "failed"]
    failed += [row for part in PLANS for row in (result["tuning"], *result.get(part, ())) if "error" in row]
    return 1 if failed else 0


if __name__ == "__main__":
    with ExitStack() as stack:
        sys.exit(main(stack))
