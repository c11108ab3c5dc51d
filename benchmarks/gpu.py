"""Tuning, correctness and speed on one GPU, in one command of under ten minutes; the answer is a JSON file and a table.

    python benchmarks/gpu.py                      # results/gpu_<name of the GPU>.json
    python benchmarks/gpu.py --tiny --out FILE    # the same on CPU with a tiny model: does the script itself work

First `python -m portable_fsdp.tune` on the Llama of configs/llama_1b.yaml. Then `gpu_checks.py`: every option's curve
against a plain loop on this device, checkpoints bit for bit, what the memory options save. Then `gpu_speed.py` times
the same Llama: our loop eager, with `auto` and as tuned, a plain PyTorch loop, transformers' Trainer, and that with
Liger's kernels. Each run is a separate process, so its peak memory is its own; a second pass repeats all runs.
Whatever the time doesn't suffice for is named. It needs no network. Exit code 1 if tune, a check or a run failed.
"""

import argparse
import contextlib
import importlib.util
import json
import math
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from portable_fsdp.config.describe import changed_values
from portable_fsdp.convert.read import load_config

HERE = Path(__file__).parent
RESULTS = HERE / "results"
NEEDED = ("torch", "transformers", "pydantic", "absl", "yaml", "safetensors", "tokenizers", "psutil", "numpy", "xxhash")
WARM_UP, TIMED = 5, 20  # steps
TINY_WARM_UP, TINY_TIMED = 1, 7
OUTCOMES = ("passed", "refused", "left out", "out of time", "failed")
TUNE_SHARE, CHECKS_SHARE = 0.25, 0.35  # at most, of the time that is left; the timed runs have the rest
TUNE_S, CHECK_S = 15.0, 30.0  # imports and the end, beyond the seconds that tune and the worker of the checks get
TINY_TUNE_S = 60.0
LOSS_BOUND = 2e-3  # relative, between the ways: the design's bound for bfloat16
GIBIBYTE = 2**30
# Expected seconds of a run, not compiled and compiled, until the same way has run.
GUESS_S = {False: 25.0, True: 60.0}
CONFIG = HERE.parent / "configs" / "llama_1b.yaml"
# All settings whose default differs between the ways; the rest of the config is llama_1b.yaml.
SETTINGS = (
    "optim.lr=1e-4",
    "optim.schedule=constant",
    "optim.warmup_steps=0",
    "optim.betas=[0.9, 0.95]",
    "optim.weight_decay=0.1",
    "train.max_grad_norm=1.0",
    "precision.compute=bfloat16",
    "sharding.strategy=FULL_SHARD",
    "memory.gradient_checkpointing=none",
    "compile.enabled=false",
)
TINY_SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 32,
}
TINY = (
    "data.seq_len=32",
    "optim.lr=3e-3",  # so that a few steps show another learning rate or another order of rows
    *(f"model.architecture.{key}={value}" for key, value in TINY_SHAPE.items()),
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
        return [*SETTINGS, *(TINY if tiny else ()), *size, f"model.architecture.vocab_size={self.vocabulary}"]


class Way(NamedTuple):
    """A loop of gpu_speed.py; `options`: `section.key=value` of our loop, in addition to the eager one's."""

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
TUNED_WORK, LLAMA_3_WORK = Work(8, 256), Work(4, 128_256)  # with Llama 3's vocabulary the head and the loss count


@dataclass
class Benchmark:
    """The state of the whole command; `result` is what the file holds, written again after each process."""

    tiny: bool
    deadline: float  # of time.monotonic
    out: Path | None
    folder: Path
    overrides: list[str]
    result: dict[str, Any]
    took: dict[str, float] = field(default_factory=lambda: {})

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def run_tune(self, share: float) -> None:
        seconds = min(self.left * share, TINY_TUNE_S if self.tiny else math.inf)
        path = Path(shutil.copy(CONFIG, self.folder))  # tune writes beside it
        words = [f"--config={path}", f"--minutes={max(seconds - TUNE_S, 1) / 60}", f"--device={self.device}"]
        words += ["--backend=native", "--num_devices=1", *TUNED_WORK.overrides(self.tiny), *self.overrides]
        began, tuned = time.monotonic(), path.with_suffix(".tuned.yaml")
        self.result["tuning"] = self._run(["-m", "portable_fsdp.tune", *words], seconds)
        self.result["tuning"]["process_seconds"] = time.monotonic() - began
        # It writes the file after each candidate: what was measured counts although it failed, or ran out of time.
        if tuned.exists():
            given = load_config(path, [*TUNED_WORK.overrides(self.tiny), *self.overrides])
            lines = [line[2:] for line in tuned.read_text().splitlines() if line.startswith("#")]
            self.result["tuning"] |= {"measured": lines, "chosen": changed_values(given, load_config(tuned))}
            self.result["environment"]["device"] = re.findall(r" measured on \d+ x (.*), backend ", lines[0])[0]
            self.write()
        print("\n".join(_tuning_lines(self.result["tuning"])), flush=True)

    def run_checks(self, share: float) -> None:
        """In at most this share of the time; what it leaves unused is the timed runs'."""
        seconds = self.left * share
        job = {"kind": "checks", "device": self.device, "tiny": self.tiny, "seconds": seconds - CHECK_S}
        answer = self._process(job, seconds)
        self.result["checks"] = answer.get("checks", [])
        if "error" in answer:  # those that were answered before it are in the file
            failed = {"name": "the process", "outcome": answer["status"], "note": answer["error"]}
            self.result["checks"].append({**failed, "figures": {}, "seconds": 0.0})
        self.write()
        print("\n".join(_check_lines(self.result["checks"])), flush=True)

    def run_speed(self, names: list[str]) -> None:
        works = (TUNED_WORK,) if self.tiny else (TUNED_WORK, LLAMA_3_WORK)
        runs = [(work, name) for work in works for name in names if name != "tuned" or work == TUNED_WORK]
        runs.sort(key=lambda run: run[1] not in MAIN_WAYS)
        for number in (1,) if self.tiny else (1, 2):
            for work, name in runs:
                self._speed(work, name, number)

    def _speed(self, work: Work, name: str, number: int) -> None:
        labels = {**work._asdict(), "way": name, "pass": number}
        reason = self._reason_to_leave_out(work, name)
        if reason:
            self.result["left_out"].append({**labels, "reason": reason})
            self.write()
            return
        way = WAYS[name]
        chosen = self.result["tuning"]["chosen"] if name == "tuned" else {}
        options = [*self.overrides, *way.options, *(f"{key}={value}" for key, value in chosen.items())]
        job = {
            **work._asdict(),
            "loop": way.loop,
            "compile": way.compile,
            "config": str(CONFIG),
            "overrides": work.overrides(self.tiny),
            "options": options if way.loop == "ours" else [],
            "warm_up": TINY_WARM_UP if self.tiny else WARM_UP,
            "timed": TINY_TIMED if self.tiny else TIMED,
            "profile": number == 2 or self.tiny,  # if the profiler crashes, the first pass is safe
            "device": self.device,
            "folder": str(self.folder),
        }
        began = time.monotonic()
        answer = self._process({"kind": "speed", **job}, self.left)
        self.took[name] = time.monotonic() - began
        result = answer.get("result") or {"status": answer["status"], "error": answer["error"]}
        config = result.pop("config", None)
        self.result.setdefault("config", config)  # of the first; `work` and `chosen` change keys of it
        run = {**labels, "process_seconds": self.took[name], **result}
        self.result["speed"].append(run)
        self.write()
        print(f"{work}: {name}, pass {number}: {_outcome(run)}", flush=True)

    def _reason_to_leave_out(self, work: Work, name: str) -> str | None:
        way = WAYS[name]
        for of, package in (("trainer", "accelerate"), ("liger", "accelerate"), ("liger", "liger_kernel")):
            if way.loop == of and importlib.util.find_spec(package) is None:
                return f"{of} needs the package {package}, which is not installed"
        if name == "float8" and importlib.util.find_spec("torchao") is None:
            return "float8 needs the package torchao, which is not installed"
        if name == "tuned" and "chosen" not in self.result["tuning"]:
            return "tune chose nothing"
        if way.compile and name not in ("auto", "tuned"):
            probe = next((check for check in self.result["checks"] if check["name"] == "torch.compile"), None)
            if probe is not None and probe["outcome"] != "passed":
                return f"torch.compile doesn't work here: {probe['note'].strip().splitlines()[-1]}"
        for run in self.result["speed"]:
            if (run["way"], _work(run)) == (name, work) and run["status"] != "finished":
                return f"its first pass ended: {run['status']}"
        needed = self.took.get(name, GUESS_S[way.compile])
        if self.left < needed:
            return f"no time left: {self.left:.0f} s of the {needed:.0f} s that it takes"
        return None

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    def _process(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer of a worker; `error` where it died or ran out of time, beside what it had written by then."""
        asked, answered = self.folder / "job.json", self.folder / "answer.json"
        answered.unlink(missing_ok=True)
        asked.write_text(json.dumps(job))
        ended = self._run([str(HERE / "gpu_worker.py"), str(asked), str(answered)], timeout_s)
        answer = json.loads(answered.read_text()) if answered.is_file() else {}
        self.result["environment"] |= answer.get("environment", {})
        return answer | ended

    def _run(self, arguments: list[str], timeout_s: float) -> dict[str, Any]:
        """Run Python with these arguments; nothing if it finished well, else its `status` and its last lines."""
        log = self.folder / "log"
        with log.open("wb") as output:
            process = subprocess.Popen(
                [sys.executable, *arguments],
                env=_environment(self.folder, self.tiny),
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
            try:
                code = process.wait(max(timeout_s, 1))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)  # and what it started: inductor's compile workers
        tail = log.read_text(errors="replace")[-2000:]
        if code is None:
            return {"status": "out of time", "error": f"{tail}\nended after {timeout_s:.0f} s"}
        return {"status": "failed", "error": f"exit code {code}:\n{tail}"} if code else {}

    def write(self) -> None:
        self.result["seconds"] = round(time.monotonic() - self.result["began"], 1)
        self.result["comparison"] = compare(self.result["speed"])
        path = self.path
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        part.write_text(json.dumps({k: v for k, v in self.result.items() if k != "began"}, indent=2) + "\n")
        os.replace(part, path)

    @property
    def path(self) -> Path:
        name = re.sub(r"[^a-z0-9]+", "_", str(self.result["environment"].get("device", "unknown")).lower())
        return self.out or RESULTS / f"gpu_{name}.json"


def _environment(folder: Path, tiny: bool) -> dict[str, str]:
    """One GPU, no hub, no other engine, caches of compiled code of this command's own, and no launcher's variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        and name != "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"  # some images set it; float32 is to be float32
    }
    if tiny:  # on a busy machine several threads would wait for each other in each small product
        kept["OMP_NUM_THREADS"] = "1"
    return kept | {
        "CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0],
        "USE_TORCH_XLA": "0",
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "huggingface"),
        "PYTHONPATH": os.pathsep.join((str(HERE.parent), os.environ.get("PYTHONPATH", ""))).rstrip(os.pathsep),
        "GLOO_SOCKET_IFNAME": "lo",  # a host without a network has no other
        "NCCL_SOCKET_IFNAME": "lo",
        "TOKENIZERS_PARALLELISM": "false",
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "TRITON_CACHE_DIR": str(folder / "triton"),
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the worker's session; nothing of it is left when the next one is timed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --------------------------------------------------------------------------------------------------- what came out


def compare(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each work: the mean over passes of each way's median rate, ours over each other, and the losses."""
    rows: list[dict[str, Any]] = []
    for work in dict.fromkeys(_work(run) for run in runs):
        of: dict[str, list[dict[str, Any]]] = {}
        for run in runs:
            if _work(run) == work and run["status"] == "finished":
                of.setdefault(run["way"], []).append(run)
        rates = {way: statistics.mean(run["tokens_per_second"] for run in of[way]) for way in of}
        ours = [way for way in of if WAYS[way].loop == "ours"]
        row: dict[str, Any] = {**work._asdict(), "tokens_per_second": rates}
        row["ratios"] = {way: {other: rates[way] / rates[other] for other in of if other != way} for way in ours}
        if "plain" in of:
            truth = of["plain"][0]["losses"]
            row["loss_difference_from_plain"] = {way: _difference(of[way][0]["losses"], truth) for way in of}
            bounded = [row["loss_difference_from_plain"][way] for way in of if way != "float8"]  # it rounds more
            row["losses_agree"] = max(bounded) <= LOSS_BOUND
        row["attention_kernels"] = {
            way: run["attention_kernels"] for way in of for run in of[way] if run.get("attention_kernels")
        }
        rows.append(row)
    return rows


def _work(run: dict[str, Any]) -> Work:
    return Work(run["rows"], run["vocabulary"])


def _difference(losses: list[float], truth: list[float]) -> float:
    """Largest relative difference over the steps that both made (the second pass makes one more)."""
    return max(abs(a - b) / b for a, b in zip(losses, truth, strict=False))


def _outcome(run: dict[str, Any]) -> str:
    if run["status"] != "finished":
        return f"{run['status']}: {run['error'].strip().splitlines()[-1][:200]}"
    return f"{run['tokens_per_second']:,.0f} tokens/s, {run['process_seconds']:.0f} s in all"


def table(result: dict[str, Any]) -> str:
    """The result for people: the checks in short, one line a run, the ratios, and what was left out."""
    environment = result["environment"]
    lines = [f"{environment.get('device')}, driver {environment.get('driver')}, {environment.get('versions')}"]
    lines += [*_tuning_lines(result["tuning"]), *_check_lines(result["checks"])]
    titles = ("tokens/s", "quartiles", "ms/step", "MFU", "allocated", "reserved GiB")
    lines.append(f"{'':42}{'pass':4}" + "".join(f"{title:>18}" for title in titles))
    lines += [_line(run) for run in result["speed"]]
    lines += [line for row in result["comparison"] for line in _ratio_lines(row)]
    for run in result["left_out"]:
        lines.append(f"left out: {_work(run)}: {run['way']}, pass {run['pass']}: {run['reason']}")
    return "\n".join(lines)


def _ratio_lines(row: dict[str, Any]) -> list[str]:
    """Our ways over all, in tokens a second; then the losses."""
    columns = list(row["tokens_per_second"])
    lines = [f"{_work(row)}; ours over:", " " * 18 + "".join(f"{name:>18}" for name in columns)]
    for way, ratios in row["ratios"].items():
        cells = (f"{ratios[name]:.3f}" if name in ratios else "-" for name in columns)
        lines.append(f"{way:>18}" + "".join(f"{cell:>18}" for cell in cells))
    if "losses_agree" in row:
        worst = max(row["loss_difference_from_plain"].values())
        lines.append(f"  losses differ by {worst:.1e}" + ("" if row["losses_agree"] else ": TOO MUCH"))
    return lines


def _tuning_lines(tuning: dict[str, Any]) -> list[str]:
    """What tune measured, and its choice; or why there is none."""
    failed = [f"tune: {tuning['status']}: {tuning['error'].strip()[-300:]}"] if "error" in tuning else []
    if "chosen" not in tuning:
        return failed
    lines = [*failed, f"tune: {tuning['process_seconds']:.0f} s", *tuning["measured"]]
    return [*lines, f"  chosen: {_words(tuning['chosen'])}"]


def _words(settings: dict[str, str]) -> str:
    return " ".join(f"{key}={value}" for key, value in settings.items()) or "the config's own"


def _check_lines(checks: list[dict[str, Any]]) -> list[str]:
    """How many of each outcome, the curves that came nearest to their bounds, peaks, and what didn't pass."""
    count = {kind: sum(check["outcome"] == kind for check in checks) for kind in OUTCOMES}
    lines = ["checks: " + ", ".join(f"{number} {kind}" for kind, number in count.items())]
    curves = [check for check in checks if "bound" in check["figures"]]
    for bound in sorted({check["figures"]["bound"] for check in curves}):
        of = {c["figures"]["worst_relative_difference"]: c["name"] for c in curves if c["figures"]["bound"] == bound}
        lines.append(f"  curves within {bound:g} of a plain loop: the farthest by {max(of):.1e} ({of[max(of)]})")
    peaks = [check for check in checks if "peak_allocated_bytes" in check["figures"]]
    lines += [f"  {check['name']}: {check['figures']['peak_allocated_bytes'] / GIBIBYTE:.3f} GiB" for check in peaks]
    for check in checks:
        if check["outcome"] != "passed":
            note = check["note"].strip().splitlines()
            telling = note[0] if check["outcome"] == "refused" else note[-1]  # the last line of a traceback
            lines.append(f"  {check['outcome']}: {check['name']}: {telling[:300]}")
    return lines


def _line(run: dict[str, Any]) -> str:
    head = f"{_work(run)!s:>27} {run['way']:>16}{run['pass']:2}"
    if run["status"] != "finished":
        return f"{head}  {_outcome(run)}"
    low, high = run["tokens_per_second_quartiles"]
    cells = [f"{run['tokens_per_second']:,.0f}", f"{low:,.0f}-{high:,.0f}", f"{run['seconds_per_step'] * 1000:.1f}"]
    cells.append("-" if run["mfu"] is None else f"{run['mfu']:.1%}")
    for key in ("peak_allocated_bytes", "peak_reserved_bytes"):
        cells.append("-" if run[key] is None else f"{run[key] / GIBIBYTE:.2f}")
    chosen = f"  chosen: {_words(run['chosen'])}" if run["way"] in ("auto", "tuned") else ""
    return head + "".join(f"{cell:>18}" for cell in cells) + chosen


# ---------------------------------------------------------------------------------------------------------- command


def _require_ready(tiny: bool) -> None:
    """Exit with one line about all that is missing, before anything is started."""
    missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        sys.exit(f"benchmarks/gpu.py: expected the packages of pyproject.toml; missing here: {', '.join(missing)}.")
    if not tiny:
        import torch

        if not torch.cuda.is_available():
            sys.exit("benchmarks/gpu.py: expected a GPU that torch can use, found none; --tiny runs on the CPU.")


def _driver() -> str | None:
    try:
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(asked, capture_output=True, text=True, timeout=30, check=True).stdout.split()[0]
    except (OSError, subprocess.SubprocessError, IndexError):
        return None


def _ways(text: str | None, tiny: bool) -> list[str]:
    names = text.split(",") if text else [*(TINY_WAYS if tiny else WAYS)]
    unknown = [name for name in names if name not in WAYS]
    if unknown:
        sys.exit(f"--only: expected some of {', '.join(WAYS)}, found {', '.join(unknown)}.")
    return names


def main() -> int:
    parser = argparse.ArgumentParser(description="Tuning, correctness and speed on one GPU.")
    parser.add_argument("--out", type=Path, help="the JSON file to write, instead of one in results/")
    parser.add_argument("--minutes", type=float, default=9, help="of wall time; what doesn't fit is left out and named")
    parser.add_argument("--parts", choices=("all", "tune", "checks", "speed"), default="all")
    parser.add_argument("--only", help="ways to time, with commas between: auto,eager,trainer")
    parser.add_argument(
        "--override", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for our loop and tune; repeatable"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU; its times mean nothing")
    arguments = parser.parse_args()
    names = _ways(arguments.only, arguments.tiny)
    _require_ready(arguments.tiny)
    began = time.monotonic()
    result: dict[str, Any] = {
        "what": "tune; options against a plain loop; tokens/s of our loop, a plain one, transformers' Trainer",
        "command": ["python", "benchmarks/gpu.py", *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "minutes": arguments.minutes,
        "tiny": arguments.tiny,
        "loss_bound": LOSS_BOUND,
        "environment": {"driver": None if arguments.tiny else _driver()},
        "tuning": {},
        "checks": [],
        "speed": [],
        "left_out": [],
        "began": began,
    }
    with tempfile.TemporaryDirectory(prefix="portable_fsdp_gpu_") as folder:
        deadline = began + 60 * arguments.minutes - 5
        benchmark = Benchmark(arguments.tiny, deadline, arguments.out, Path(folder), arguments.override, result)
        parts = ("tune", "checks", "speed") if arguments.parts == "all" else (arguments.parts,)
        if "tune" in parts:
            benchmark.run_tune(TUNE_SHARE if len(parts) > 1 else 1.0)
        if "checks" in parts:
            benchmark.run_checks(CHECKS_SHARE if len(parts) > 1 else 1.0)
        if "speed" in parts:
            benchmark.run_speed(names)
    benchmark.write()
    print(table(result))
    print(f"written to {benchmark.path}")
    failed = [check for check in result["checks"] if check["outcome"] in ("failed", "out of time")]
    failed += [run for run in result["speed"] if run["status"] == "failed"]
    return 1 if failed or "error" in result["tuning"] else 0


if __name__ == "__main__":
    sys.exit(main())
