"""Native on the device "tpu" of TorchTPU, whose chip is XLA's CPU plugin (tests/torchtpu): against native on CPU.

Only `make test-torchtpu` collects this file: it needs an environment of its own.
"""

import logging
import os
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jobs
import pytest
import torch
from cases import Case, CaseRows, assemble, assert_equal_states
from jobs import running
from safetensors.torch import load_file
from travel import AT, TRAVELS
from workers import GetWorkers, Group, Run

ROOT = Path(__file__).parents[2]
BOUND = 1e-6  # relative, of each loss in float32
FAMILIES = {model: Case(model) for model in ("llama", "qwen3", "gpt2", "gemma2")}
BY_TWO = {
    **FAMILIES,
    "kept gathered, in micro batches": Case(strategy="SHARD_GRAD_OP", micro_batch=2),
    "tensor": Case(settings={"sharding.tensor": 2}),
    "context": Case(settings={"sharding.context": 2}),
    "experts": Case("mixtral", settings={"sharding.expert": 2}),
    "dropout": Case("gpt2", settings={"model.dropout": 0.1}),
    "sequence parallel": Case(settings={"sharding.tensor": 2, "sharding.sequence_parallel": True}),
}
BY_FOUR = {
    "resharded to two": Case(settings={"sharding.reshard_after_forward": 2}),
    "two replicas": Case(strategy="HYBRID_SHARD", settings={"sharding.replicas": 2}),
}
PROOFS_BY_TWO = ("qwen3", "gpt2", "context", "dropout", "sequence parallel")
ALONE = {
    **FAMILIES,
    "recomputed": Case(checkpointing="full"),
    "recomputed but for products": Case(checkpointing="selective", settings={"memory.save_ops": ["matmul"]}),
    "compiled": Case(settings={"compile.enabled": True}),
    "adapters": Case(
        optim={"name": "adamw", "lr": 1e-2, "weight_decay": 0.1}, settings={"model.lora": {"r": 4, "alpha": 8.0}}
    ),
    "accumulated, without clipping": Case(micro_batch=4, max_grad_norm=None),
    "lion": Case(optim={"name": "lion", "lr": 1e-3, "weight_decay": 0.1}),
}


def curve(answers: list[dict[str, Any]], of: str = "loss") -> list[float]:
    return [metrics[of] for metrics in answers[0]["metrics"]]


@pytest.mark.parametrize(
    ("devices", "name"),
    [
        *((1, name) for name in ALONE),
        *(pytest.param(2, name, marks=[pytest.mark.proof] * (name in PROOFS_BY_TWO)) for name in BY_TWO),
        *(pytest.param(4, name, marks=pytest.mark.proof) for name in BY_FOUR),
    ],
    ids=str,
)
def test_the_curve_is_that_of_cpu(devices: int, name: str, run: Run) -> None:
    case = (ALONE | BY_TWO | BY_FOUR)[name]
    # An eager layer's sums are those of a compiled one, and CPU has no compiler here.
    alone = {key: value for key, value in case.settings.items() if not key.startswith("sharding.")}
    settings = {} if name == "compiled" else alone
    plain = replace(case, strategy=case.strategy.replace("HYBRID", "FULL"), settings=settings)
    on_tpu, on_cpu = run(Group("torchtpu", devices), case), run(Group("native", 1), plain)
    assert len(curve(on_cpu)) == case.steps
    assert curve(on_tpu) == pytest.approx(curve(on_cpu), rel=BOUND)
    assert curve(on_tpu, "grad_norm") == pytest.approx(curve(on_cpu, "grad_norm"), rel=1e-5)
    assert curve(on_cpu)[-1] < curve(on_cpu)[0] - 0.05, "the run learnt nothing: its curve would show no fault"


def test_bfloat16_is_near_float32_and_not_equal(run: Run) -> None:
    exact, rounded = (curve(run(Group("torchtpu", 1), case)) for case in (Case(), Case(compute="bfloat16")))
    assert rounded == pytest.approx(exact, rel=2e-3)
    assert rounded != pytest.approx(exact, rel=1e-5)


def programs_of_steps(case: Case, log: str) -> dict[str, Any]:
    """On TorchTPU: how many programs each step compiled, and what stands in stderr after these steps, after an
    evaluation of fewer rows and two more steps, and after an operation of another shape and one more step.

    `log`: a file that is stderr meanwhile, TorchTPU's own lines included.
    """
    logger, handler = logging.getLogger("portable_fsdp"), logging.FileHandler(log)
    logger.addHandler(handler)
    stderr = os.dup(2)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 2)
    texts = list[str]()

    def note() -> None:
        texts.append(Path(log).read_text()[sum(map(len, texts)) :])

    try:
        with running(case) as run:
            programs, new = cast(Any, run.backend)._programs, list[int]()
            for step in range(1, case.steps + 1):
                before = programs.count
                run.train(step, step)
                new.append(programs.count - before)
            note()
            rows = CaseRows().rows(torch.arange(3).numpy())
            with run.backend.evaluate():
                loss, _ = run.model(*(run.backend.place(rows)[name] for name in ("input_ids", "labels")))
                loss.item()
            run.train(case.steps, case.steps)
            run.train(case.steps, case.steps)
            note()
            torch.ones(7, 11, 13, device="tpu").cos().sum().item()
            run.train(case.steps, case.steps)
            note()
            count = programs.count
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(file)
        logger.removeHandler(handler)
        handler.close()
    return {"programs": count, "new": new, "texts": texts}


def test_no_program_is_new_after_step_3(workers: GetWorkers, tmp_path: Path) -> None:
    """Those of an evaluation belong to no step. One that is new, by an operation of another shape, is printed, and then
    warned of."""
    log = str(tmp_path / "log")
    answer = workers(Group("torchtpu", 1)).run(programs_of_steps, case=Case(steps=8), log=log)[0]
    assert answer["new"][3:] == [0] * 5
    assert answer["programs"] > 100  # a process keeps those of earlier jobs
    *earlier, another_shape = answer["texts"]
    for text in earlier:
        assert "new program" not in text
        assert "module @" not in text
    assert "7x11x13" in another_shape
    warning = re.search(r"TorchTPU compiled \d new program", another_shape)
    assert warning is not None, another_shape
    assert another_shape.index("module @") < warning.start()


# -------------------------------------------------------------------------------------------------- checkpoints travel


def test_checkpoints_travel_in_all_six_directions(workers: GetWorkers, tmp_path: Path) -> None:
    """TorchTPU with two processes, native on CPU with one, xla with three devices, in its own environment."""
    groups = {"torchtpu": Group("torchtpu", 2), "native": Group("native", 1)}
    folders = {name: str(tmp_path / name) for name in (*groups, "xla")}
    held = {
        (name, name): [
            answer["state"] for answer in workers(group).run(jobs.write, case=TRAVELS, folder=folders[name], at=AT)
        ]
        for name, group in groups.items()
    }
    (tmp_path / "held").mkdir()
    others = [f"{name}={folders[name]}" for name in groups]
    paths = [ROOT, ROOT / "tests/torchtpu", ROOT / "tests/backends", ROOT / "tests/runtime"]
    paths += [ROOT / "tests/checkpoint", ROOT / "tests/data", ROOT / "benchmarks"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TEST_TORCHTPU")}
    program = [os.environ["PYTHON_WITH_XLA"], str(ROOT / "tests/torchtpu/travel.py")]
    ended = subprocess.run(
        [*program, folders["xla"], str(tmp_path / "held"), *others],
        env={**environment, "PYTHONPATH": os.pathsep.join(map(str, paths))},
        stderr=subprocess.PIPE,
        text=True,
        timeout=240,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    whole = {pair: assemble(states) for pair, states in held.items()}
    for name in folders:  # what xla held; a checkpoint's own name stands for its writer's state
        whole["xla", name] = load_file(tmp_path / "held" / f"{name}.safetensors")
    for reader, group in groups.items():
        elsewhere = {name: folder for name, folder in folders.items() if name != reader}
        answers = workers(group).run(jobs.read, case=TRAVELS, folders=elsewhere, at=AT)
        for writer in elsewhere:
            whole[reader, writer] = assemble([answer[writer]["state"] for answer in answers])
    for writer in folders:
        for reader in folders:
            assert_equal_states(whole[reader, writer], whole[writer, writer])
