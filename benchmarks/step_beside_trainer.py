"""The wall time of a step beside transformers' Trainer on the same cores: native, XLA, in one process and over two.

python benchmarks/step_beside_trainer.py [--steps=20] [--way=NAME ...] [--write | --check]

A Llama of 62 million parameters, vocabulary 32,000, 2 rows of 512 tokens, float32, AdamW, gradients clipped at 1. Each
way runs in its own processes, with two threads in all. The ways take steps in turn, so other load on the machine slows
all of them. Our step ends when its metrics have been fetched; the Trainer's is the time between two calls of
`on_step_begin`. A ratio is the median over rounds of our time divided by the Trainer's in the same round. Loops written
by hand, on torch_xla and on FSDP2 over two processes, show what those libraries cost here by themselves. `--write`
writes results/step_beside_trainer.md, and adds the ratios to results/step_beside_trainer.json with the date and the
commit. `--check`, of `make proof`, fails if a ratio is more than 15 % above the lowest there.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from datetime import date
from importlib.metadata import version
from typing import Any

from measuring import RESULTS, ROOT, Steps, in_turns, markdown

ARCHITECTURE: dict[str, Any] = {
    **{"model_type": "llama", "vocab_size": 32_000, "hidden_size": 512, "intermediate_size": 1408},
    **{"num_hidden_layers": 9, "num_attention_heads": 8, "num_key_value_heads": 8, "max_position_embeddings": 512},
    **{"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": None, "tie_word_embeddings": False},
}
SEQ_LEN, ROWS, THREADS, WARM_UP = 512, 2, 2, 3
RESULT, SLACK = RESULTS / "step_beside_trainer.json", 1.15
TRAINER = "Trainer"
WAYS: dict[str, tuple[str, int, tuple[str, ...]]] = {  # -> engine, processes or devices, overrides
    "native": ("native", 1, ()),
    "native, NO_SHARD": ("native", 1, ("sharding.strategy=NO_SHARD",)),
    "xla": ("xla", 1, ()),
    "native x 2": ("native", 2, ()),
    "native x 2, NO_SHARD": ("native", 2, ("sharding.strategy=NO_SHARD",)),
    "xla x 2": ("xla", 2, ()),
    "a plain torch_xla loop": ("plain", 1, ()),
    "a plain FSDP2 loop x 2": ("plain", 2, ()),
}
GOALS = {"native": 0.95, "native, NO_SHARD": 1.02, "xla": 1.12, "native x 2": 1.37, "xla x 2": 1.4}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--way", action="append", choices=[*WAYS], help="default: all")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve == TRAINER:
        serve_trainer()
    elif arguments.serve:
        engine, devices, overrides = WAYS[arguments.serve]
        serve_plain(devices) if engine == "plain" else serve(engine, devices, overrides)
    else:
        ways = arguments.way or [*WAYS]
        seconds = measure([TRAINER, *ways], arguments.steps)
        text, ratios = report(seconds), {way: round(ratios_of(seconds)[way], 3) for way in ways}
        print(text)
        if arguments.write:
            RESULT.with_suffix(".md").write_text(text)
            commit = subprocess.run(["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True)
            row = {"date": f"{date.today()}", "commit": commit.stdout.strip(), "ratios": ratios}
            rows = [*json.loads(RESULT.read_text()), row]
            RESULT.write_text("[\n" + ",\n".join(f"  {json.dumps(row)}" for row in rows) + "\n]\n")
        if arguments.check:
            rows = json.loads(RESULT.read_text())
            best = {way: min(row["ratios"].get(way, ratios[way]) for row in rows) for way in ways}
            if slower := [way for way in ways if ratios[way] > SLACK * best[way]]:
                sys.exit(f"slower than in {RESULT.name}: {', '.join(f'{w}: {ratios[w]} > {best[w]}' for w in slower)}")


# ---------------------------------------------------------------------------------------------------- the processes


def take_turns() -> None:
    """Wait for the parent's word."""
    print("ready", flush=True)
    if not sys.stdin.readline():
        sys.exit(0)


def plain_model() -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(**ARCHITECTURE), attn_implementation="sdpa")


def serve_trainer() -> None:
    import torch
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Turns(TrainerCallback):
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            take_turns()

    model = plain_model()
    ids = torch.randint(256, (4096, SEQ_LEN))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    with tempfile.TemporaryDirectory() as folder:
        settings: dict[str, Any] = {
            **{"output_dir": folder, "per_device_train_batch_size": ROWS, "max_steps": 2000, "learning_rate": 1e-4},
            **{"use_cpu": True, "report_to": [], "save_strategy": "no", "disable_tqdm": True, "logging_steps": 10_000},
            **{"lr_scheduler_type": "constant", "weight_decay": 0.1, "max_grad_norm": 1.0},
        }
        arguments = TrainingArguments(**settings)
        make: Any = Trainer  # its types want a Dataset of torch
        make(model=model, args=arguments, train_dataset=rows, callbacks=[Turns()]).train()


def serve_plain(processes: int) -> None:
    """Steps of a loop written by hand: FSDP2 over several processes, torch_xla in one."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    sync, device = (lambda: None), torch.device("cpu")
    model = plain_model()
    if processes > 1:
        torch.distributed.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (processes,))
        for unit in (*model.model.layers, model):
            fully_shard(unit, mesh=mesh)
    else:
        os.environ["PJRT_DEVICE"] = "CPU"
        import torch_xla

        sync, device = torch_xla.sync, torch_xla.device()
        model.to(device)
    # torch_xla has no fused AdamW; XLA compiles the whole step.
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1, fused=processes > 1)
    ids = torch.randint(256, (ROWS // processes, SEQ_LEN)).to(device)
    while True:
        take_turns()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        sync()
        loss.item()


def serve(engine: str, devices: int, overrides: tuple[str, ...]) -> None:
    import portable_fsdp as pf
    from portable_fsdp.config.describe import with_settings

    config = pf.make_config(
        model={"architecture": ARCHITECTURE},
        data={"source": "text", "path": f"{ROOT}/portable_fsdp/**/*.py", "seq_len": SEQ_LEN},
        train={"steps": 2000, "global_batch": ROWS, "micro_batch": ROWS // devices},
        optim={"lr": 1e-4, "schedule": "constant", "warmup_steps": 0, "weight_decay": 0.1},
    )
    config = with_settings(config, dict(override.split("=") for override in overrides))
    with ExitStack() as held:
        step = Steps(config, held, backend=engine, num_devices=devices)
        while True:
            take_turns()
            step()


# ------------------------------------------------------------------------------------------------------ the parent


def start(way: str) -> list[subprocess.Popen[str]]:
    engine, devices, _ = WAYS.get(way, (TRAINER, 1, ()))
    processes = 1 if engine == "xla" else devices
    command = [sys.executable, __file__, f"--serve={way}"]
    port = 20_000 + os.getpid() % 10_000 + len(way)
    started: list[subprocess.Popen[str]] = []
    for rank in range(processes):
        environment = os.environ | {"OMP_NUM_THREADS": str(max(1, THREADS // processes)), "PYTHONPATH": str(ROOT)}
        if way == TRAINER:
            environment["USE_TORCH_XLA"] = "0"
        if processes > 1:
            environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank)}
            environment |= {"WORLD_SIZE": str(processes), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(processes)}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        started.append(subprocess.Popen(command, text=True, env=environment, **pipes))
    return started


def wait_for(processes: list[subprocess.Popen[str]]) -> None:
    for process in processes:
        assert process.stdout is not None
        while line := process.stdout.readline():
            if line.startswith("ready"):
                break
        else:
            sys.exit(f"{process.args} ended")


def take_step(processes: list[subprocess.Popen[str]]) -> float:
    """Seconds of one step of a way."""
    began = time.perf_counter()
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    wait_for(processes)
    return time.perf_counter() - began


def measure(ways: list[str], steps: int) -> dict[str, list[float]]:
    """Seconds of each way's step, round by round."""
    running = {way: start(way) for way in ways}
    try:
        for processes in running.values():
            wait_for(processes)
        return in_turns(running, steps, take_step, warm_up=WARM_UP)
    finally:
        for process in (process for processes in running.values() for process in processes):
            process.kill()
            process.wait()


def report(seconds: dict[str, list[float]]) -> str:
    rows = [
        [way, f"{statistics.median(own):.2f}", f"{ratio:.3f}", f"<= {GOALS[way]}" if way in GOALS else ""]
        for (way, own), ratio in zip(seconds.items(), ratios_of(seconds).values(), strict=True)
    ]
    lines = [
        "# A step beside transformers' Trainer",
        "",
        f"`python benchmarks/step_beside_trainer.py --write`: {len(seconds[TRAINER])} rounds, {THREADS} threads a way.",
        f"torch {version('torch')}, transformers {version('transformers')}; {json.dumps(ARCHITECTURE)},",
        f"{ROWS} rows of {SEQ_LEN} tokens, float32.",
        "",
        *markdown(("way", "seconds, median", "over the Trainer's", "goal"), rows),
    ]
    return "\n".join([*lines, ""])


def ratios_of(seconds: dict[str, list[float]]) -> dict[str, float]:
    return {
        way: statistics.median(a / b for a, b in zip(own, seconds[TRAINER], strict=True))
        for way, own in seconds.items()
    }


if __name__ == "__main__":
    main()
