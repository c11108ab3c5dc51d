"""`python -m portable_fsdp.tune`: candidates that fail are rows with their reason, and the fastest is written."""

from collections.abc import Callable
from pathlib import Path

import pytest

from portable_fsdp.convert.read import load_config
from portable_fsdp.plan.result import Settings
from portable_fsdp.tune.__main__ import Tuning, main
from portable_fsdp.tune.search import climb

CONFIG = """
run: {dir: DIR/run}
model:
  architecture: {model_type: llama, vocab_size: 256, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 2,
    num_attention_heads: 2, num_key_value_heads: 1, max_position_embeddings: 32}
data: {source: python_docs, seq_len: 32}
train: {steps: 100, global_batch: 4, micro_batch: 1}
optim: {lr: 0.003, schedule: constant}
"""


def written(folder: Path) -> Path:
    path = folder / "small.yaml"
    path.write_text(CONFIG.replace("DIR", str(folder)))
    return path


@pytest.mark.proof
@pytest.mark.timeout(600)
def test_a_candidate_that_fails_is_a_row_with_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path)
    words = [f"--config={path}", "--device=cpu", "--backend=native", "--minutes=3", "sharding.strategy=NO_SHARD"]
    assert main(words, worker="failing_worker") == 0
    tuning = Tuning.model_validate_json((tmp_path / "small.tuning.json").read_text())
    problems = [each.problem for each in tuning.candidates]
    for reason in ("out of memory", "no kernel for this graph", "not finished after", "losses differ by", "is nan"):
        assert sum(reason in problem for problem in problems) == 1, (reason, problems)
    assert problems[0] == ""
    table = capsys.readouterr().out
    assert all(problem in table for problem in problems)
    tuned = (tmp_path / "small.tuned.yaml").read_text()
    assert tuned.startswith(f"# {path}, measured on 1 x cpu, backend native:\n")
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--minutes=0.01"], "--minutes=0.01 is less than one candidate needs"),
        (["--device=cuda"], "For devices that aren't here: python -m portable_fsdp.plan"),
    ],
)
@pytest.mark.slow
def test_bad_input(words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"--config={written(tmp_path)}", "--device=cpu", "--backend=native", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error


def test_the_climb_finds_the_fastest_of_a_grid_in_few_measurements(tmp_path: Path) -> None:
    """Rows of a micro batch up to what fits; compiled layers and less recomputation are faster."""
    config = load_config(written(tmp_path))
    assert config.train.micro_batch == 1
    choices: list[list[Settings]] = [
        [{"compile.enabled": value} for value in ("true", "false")],
        [{"train.micro_batch": str(2**n)} for n in range(7)],
        [{"memory.gradient_checkpointing": value} for value in ("none", "selective", "full")],
    ]
    measured: list[Settings] = []

    def seconds(most: int) -> Callable[[Settings], float | None]:
        def measure(settings: Settings) -> float | None:
            measured.append(settings)
            rows, mode = int(settings["train.micro_batch"]), settings["memory.gradient_checkpointing"]
            bytes_ = rows * {"none": 4, "selective": 2, "full": 1}[mode]
            if bytes_ > most:
                return float("inf")
            compiled = 0.7 if settings["compile.enabled"] == "true" else 1.0
            return {"none": 1.0, "selective": 1.1, "full": 1.3}[mode] * compiled + 0.5 / rows

        return measure

    start = {"compile.enabled": "false", "train.micro_batch": "1", "memory.gradient_checkpointing": "full"}
    *_, best = climb(start, iter(choices), seconds(256))
    assert best == {"compile.enabled": "true", "train.micro_batch": "64", "memory.gradient_checkpointing": "none"}
    assert len(measured) <= 12
