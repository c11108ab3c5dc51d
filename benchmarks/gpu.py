"""Correctness and speed on one GPU, in one command and a few minutes; the answer is one JSON file and a table.

    python benchmarks/gpu.py                      # results/gpu_<name of the GPU>.json
    python benchmarks/gpu.py --tiny --out FILE    # the same on CPU with a tiny model: does the script itself work

First `gpu_checks.py`, in a process of its own: every option's curve against a plain loop on this device, checkpoints
bit for bit, what the memory options save. Then `gpu_speed.py`: the Llama of configs/llama_1b.yaml trained by our loop
(A), a plain PyTorch loop (B) and transformers' Trainer (C), in turn A B C C B A, each run in a process of its own, so
that peaks of memory are its own and a slow drift of the machine falls on all. With a vocabulary of 128,256 a Trainer
with Liger's kernels joins them; options that change speed alone (float8, offload) are timed in ours. What no time is
left for is named. It needs no network. Exit code 1 where a check or a run failed, or the checks died.
"""

import argparse
import contextlib
import importlib.util
import json
import os
import re
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

HERE = Path(__file__).parent
RESULTS = HERE / "results"
NEEDED = ("torch", "transformers", "pydantic", "absl", "yaml", "safetensors", "tokenizers", "psutil", "numpy", "xxhash")
WAYS = ("ours", "plain", "trainer", "liger")
WARM_UP, TIMED = 5, 20  # steps
TINY_WARM_UP, TINY_TIMED = 1, 7
OUTCOMES = ("passed", "refused", "left out", "out of time", "failed")
CHECKS_SHARE = 0.45  # of the time, at most
CHECK_S = 30.0  # imports and the last check, beyond the seconds that the worker is told
LOSS_BOUND = 2e-3  # relative, between the ways: the design's bound for bfloat16
GIBIBYTE = 2**30
VOCABULARY = 128_256  # of Llama 3: the head and the loss count
# Seconds that a run is guessed to take, not compiled and compiled; what one took replaces the guess for the next.
GUESS_S = {False: 25.0, True: 60.0}


class Setting(NamedTuple):
    """What all ways share in a comparison. With an `option`, which only our loop has, only ours runs."""

    compile: bool
    checkpointing: str
    micro_batch: int
    vocabulary: int = 256
    option: str = ""  # `section.key=value`

    def __str__(self) -> str:
        words = ("compile" if self.compile else "eager", self.checkpointing, self.micro_batch)
        more = (self.vocabulary if self.vocabulary > 256 else "", self.option.partition("=")[2])
        return "/".join(str(word) for word in (*words, *more) if word)

    @property
    def ways(self) -> tuple[str, ...]:
        if self.option:
            return ("ours",)
        return tuple(way for way in WAYS if way != "liger" or self.vocabulary > 256)


# The most telling first: what stands last is left out first.
SETTINGS = (
    Setting(False, "none", 8),
    Setting(True, "none", 8),
    Setting(True, "none", 4, VOCABULARY),
    Setting(True, "none", 4, VOCABULARY, "precision.products=float8"),
    Setting(False, "full", 8),
    Setting(False, "full", 8, option="memory.offload=activations"),
    Setting(False, "none", 4, VOCABULARY),
    Setting(False, "none", 4),
    Setting(True, "full", 8),
    Setting(True, "none", 4),
    Setting(False, "full", 4),
    Setting(True, "full", 4),
)
TINY_SETTINGS = (Setting(False, "full", 8), Setting(False, "full", 8, option="memory.offload=activations"))


@dataclass
class Benchmark:
    """The state of the whole command; `result` is what the file holds, written again after each process."""

    tiny: bool
    deadline: float  # of time.monotonic
    out: Path | None
    folder: Path
    overrides: list[str]
    result: dict[str, Any]
    took: dict[tuple[str, bool], float] = field(default_factory=lambda: {})

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

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

    def run_speed(self, settings: tuple[Setting, ...]) -> None:
        for setting in settings:
            for number in (1,) if self.tiny else (1, 2):
                for way in setting.ways[:: 1 if number == 1 else -1]:
                    self._speed(setting, way, number)

    def _speed(self, setting: Setting, way: str, number: int) -> None:
        labels = {**setting._asdict(), "way": way, "pass": number}
        reason = self._reason_to_leave_out(setting, way)
        if reason:
            self.result["left_out"].append({**labels, "reason": reason})
            self.write()
            return
        job = {
            **setting._asdict(),
            "way": way,
            "warm_up": TINY_WARM_UP if self.tiny else WARM_UP,
            "timed": TINY_TIMED if self.tiny else TIMED,
            "profile": number == 2 or self.tiny,  # if the profiler crashes, the first pass is safe
            "tiny": self.tiny,
            "device": self.device,
            "folder": str(self.folder),
            "overrides": self.overrides,
        }
        began = time.monotonic()
        answer = self._process({"kind": "speed", **job}, self.left)
        self.took[way, setting.compile] = time.monotonic() - began
        result = answer.get("result") or {"status": answer["status"], "error": answer["error"]}
        if way == "ours":
            self.result.setdefault("config", result.get("config"))  # of the first; a setting changes three keys of it
        result.pop("config", None)
        run = {**labels, "process_seconds": self.took[way, setting.compile], **result}
        self.result["speed"].append(run)
        self.write()
        print(f"{setting} {way}, pass {number}: {_outcome(run)}", flush=True)

    def _reason_to_leave_out(self, setting: Setting, way: str) -> str | None:
        for of, package in (("trainer", "accelerate"), ("liger", "accelerate"), ("liger", "liger_kernel")):
            if way == of and importlib.util.find_spec(package) is None:
                return f"{way} needs the package {package}, which is not installed"
        if "float8" in setting.option and importlib.util.find_spec("torchao") is None:
            return "float8 needs the package torchao, which is not installed"
        if setting.compile:
            probe = next((check for check in self.result["checks"] if check["name"] == "torch.compile"), None)
            if probe is not None and probe["outcome"] != "passed":
                return f"torch.compile doesn't work here: {probe['note'].strip().splitlines()[-1]}"
        for run in self.result["speed"]:
            same = run["way"] == way and all(run[key] == value for key, value in setting._asdict().items())
            if same and run["status"] != "finished":
                return f"its first pass ended: {run['status']}"
        needed = self.took.get((way, setting.compile), GUESS_S[setting.compile])
        if self.left < needed:
            return f"no time left: {self.left:.0f} s of the {needed:.0f} s that it takes"
        return None

    @property
    def device(self) -> str:
        return "cpu" if self.tiny else "cuda"

    def _process(self, job: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """The answer of a worker; `error` where it died or ran out of time, beside what it had written by then."""
        asked, answered, log = (self.folder / name for name in ("job.json", "answer.json", "log"))
        answered.unlink(missing_ok=True)
        asked.write_text(json.dumps(job))
        command = [sys.executable, str(HERE / "gpu_worker.py"), str(asked), str(answered)]
        with log.open("wb") as output:
            process = subprocess.Popen(
                command, env=_environment(self.folder), stdout=output, stderr=output, start_new_session=True
            )
            try:
                code = process.wait(max(timeout_s, 1))
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)  # and what it started: inductor's compile workers
        answer = json.loads(answered.read_text()) if answered.is_file() else {}
        if code != 0:
            tail = log.read_text(errors="replace")[-2000:]
            answer["status"] = "out of time" if code is None else "failed"
            answer["error"] = f"{tail}\nended after {timeout_s:.0f} s" if code is None else f"{tail}\nexit code {code}"
        self.result["environment"] |= answer.get("environment", {})
        return answer

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


def _environment(folder: Path) -> dict[str, str]:
    """One GPU, no hub, no other engine, caches of compiled code of this command's own, and no launcher's variables."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
        and name != "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"  # some images set it; float32 is to be float32
    }
    return kept | {
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


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill the worker's session; nothing of it is left when the next one is timed."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


# --------------------------------------------------------------------------------------------------- what came out


def compare(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each setting in one row: the mean over passes of each way's median rate, ours over the others, and the losses."""
    rows: list[dict[str, Any]] = []
    for setting in dict.fromkeys(_setting(run) for run in runs):
        finished = [run for run in runs if _setting(run) == setting and run["status"] == "finished"]
        of = {way: [run for run in finished if run["way"] == way] for way in WAYS}
        rates = {way: statistics.mean(run["tokens_per_second"] for run in of[way]) for way in WAYS if of[way]}
        row: dict[str, Any] = {**setting._asdict(), "tokens_per_second": rates}
        for other in WAYS[1:]:
            if "ours" in rates and other in rates:
                row[f"ours_over_{other}"] = rates["ours"] / rates[other]
        if of["plain"]:
            truth = of["plain"][0]["losses"]
            differences = {way: _difference(of[way][0]["losses"], truth) for way in WAYS if of[way]}
            row["loss_difference_from_plain"] = differences
            row["losses_agree"] = all(difference <= LOSS_BOUND for difference in differences.values())
        kernels = {way: run["attention_kernels"] for way in WAYS for run in of[way] if "attention_kernels" in run}
        if kernels:
            row["attention_kernels"] = kernels
        rows.append(row)
    return rows


def _setting(run: dict[str, Any]) -> Setting:
    return Setting(**{name: run[name] for name in Setting._fields})


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
    lines += _check_lines(result["checks"])
    titles = ("tokens/s", "quartiles", "ms/step", "MFU", "allocated", "reserved GiB")
    lines.append(f"{'setting':>16} {'way':8}{'pass':4}" + "".join(f"{title:>20}" for title in titles))
    lines += [_line(run) for run in result["speed"]]
    for row in result["comparison"]:
        words = [f"ours / {other} {row[f'ours_over_{other}']:.3f}" for other in WAYS[1:] if f"ours_over_{other}" in row]
        if "losses_agree" in row:
            worst = max(row["loss_difference_from_plain"].values())
            words.append(f"losses differ by {worst:.1e}" + ("" if row["losses_agree"] else ": TOO MUCH"))
        lines.append(f"{_setting(row)!s:>16} " + ", ".join(words))
    for run in result["left_out"]:
        lines.append(f"left out: {_setting(run)} {run['way']}, pass {run['pass']}: {run['reason']}")
    return "\n".join(lines)


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
    head = f"{_setting(run)!s:>16} {run['way']:8}{run['pass']:4}"
    if run["status"] != "finished":
        return f"{head}  {_outcome(run)}"
    low, high = run["tokens_per_second_quartiles"]
    cells = [f"{run['tokens_per_second']:,.0f}", f"{low:,.0f}-{high:,.0f}", f"{run['seconds_per_step'] * 1000:.1f}"]
    cells.append("-" if run["mfu"] is None else f"{run['mfu']:.1%}")
    for key in ("peak_allocated_bytes", "peak_reserved_bytes"):
        cells.append("-" if run[key] is None else f"{run[key] / GIBIBYTE:.2f}")
    return head + "".join(f"{cell:>20}" for cell in cells)


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


def _settings(text: str | None, tiny: bool) -> tuple[Setting, ...]:
    known = {str(setting): setting for setting in (TINY_SETTINGS if tiny else SETTINGS)}
    if text is None:
        return tuple(known.values())
    unknown = [name for name in text.split(",") if name not in known]
    if unknown:
        sys.exit(f"--only: expected some of {', '.join(known)}, found {', '.join(unknown)}.")
    return tuple(known[name] for name in text.split(","))


def main() -> int:
    parser = argparse.ArgumentParser(description="Correctness and speed on one GPU.")
    parser.add_argument("--out", type=Path, help="the JSON file to write, instead of one in results/")
    parser.add_argument("--minutes", type=float, default=9, help="of wall time; what doesn't fit is left out and named")
    parser.add_argument("--parts", choices=("all", "checks", "speed"), default="all")
    parser.add_argument("--only", help="settings to time, with commas between: eager/none/8,compile/none/4/128256")
    parser.add_argument(
        "--override", action="append", default=[], metavar="SECTION.KEY=VALUE", help="for our loop alone; repeatable"
    )
    parser.add_argument("--tiny", action="store_true", help="a tiny model on the CPU; its times mean nothing")
    arguments = parser.parse_args()
    settings = _settings(arguments.only, arguments.tiny)
    _require_ready(arguments.tiny)
    began = time.monotonic()
    result: dict[str, Any] = {
        "what": "every option against a plain loop; tokens/s of our loop, a plain PyTorch loop, transformers' Trainer",
        "command": ["python", "benchmarks/gpu.py", *sys.argv[1:]],
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "minutes": arguments.minutes,
        "tiny": arguments.tiny,
        "loss_bound": LOSS_BOUND,
        "environment": {"driver": None if arguments.tiny else _driver()},
        "checks": [],
        "speed": [],
        "left_out": [],
        "began": began,
    }
    with tempfile.TemporaryDirectory(prefix="portable_fsdp_gpu_") as folder:
        deadline = began + 60 * arguments.minutes - 5
        benchmark = Benchmark(arguments.tiny, deadline, arguments.out, Path(folder), arguments.override, result)
        if arguments.parts != "speed":
            benchmark.run_checks(share=1.0 if arguments.parts == "checks" else CHECKS_SHARE)
        if arguments.parts != "checks":
            benchmark.run_speed(settings)
    print(table(result))
    print(f"written to {benchmark.path}")
    failed = [check for check in result["checks"] if check["outcome"] in ("failed", "out of time")]
    failed += [run for run in result["speed"] if run["status"] == "failed"]
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
