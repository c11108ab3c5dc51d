"""Checkpoints of the real engines: promise 3 (they travel) and promise 6 (a kill loses nothing)."""

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from assemble import assemble, assert_equal_states
from cases import GLOBAL_BATCH, Case
from memory import RETURN_FREED_MEMORY
from reference import reference
from workers import GROUPS, Group, Workers, marked

from portable_fsdp.checkpoint.format import committed_steps, read_manifest

GetWorkers = Callable[[Group], Workers]
Written = Callable[[Group], tuple[Path, list[dict[str, Any]]]]

proof = pytest.mark.proof
TRAVELS = Case(model="llama_tied", steps=12)
AT = 6

# ------------------------------------------------------------------------ any writer, any reader, any number of devices


@pytest.fixture(scope="module")
def written(workers: GetWorkers, tmp_path_factory: pytest.TempPathFactory) -> Written:
    """The checkpoints of a writer, and what its processes returned."""

    @cache
    def write(group: Group) -> tuple[Path, list[dict[str, Any]]]:
        folder = tmp_path_factory.mktemp(str(group))
        return folder, workers(group).run("write", case=TRAVELS, folder=str(folder), at=AT)

    return write


@pytest.mark.parametrize("reader", [marked(group) for group in GROUPS])
def test_any_reader_opens_any_writer_bit_for_bit(
    reader: Group, workers: GetWorkers, written: Written, request: pytest.FixtureRequest
) -> None:
    """Each commit those groups of the suite that the environment has; the proofs all of them."""
    is_proof = request.node.get_closest_marker("proof") is not None
    without_xla = "not xla" in str(request.config.getoption("-m"))
    writers = [
        group for group in GROUPS if (is_proof or group.in_suite) and not (without_xla and group.engine.needs_xla)
    ]
    folders = {str(writer): str(written(writer)[0]) for writer in writers}
    answers = workers(reader).run("read", case=TRAVELS, folders=folders, at=AT)
    for writer in writers:
        saved_by = written(writer)[1]
        saved = assemble([answer["state"] for answer in saved_by])
        assert any(key.startswith("exp_avg_sq/") for key in saved)
        assert_equal_states(assemble([answer[str(writer)]["state"] for answer in answers]), saved)
        for answer in answers:
            assert answer[str(writer)]["position"] == (0, AT * GLOBAL_BATCH)
            losses = [metrics["loss"] for metrics in answer[str(writer)]["metrics"]]
            assert losses == pytest.approx([metrics["loss"] for metrics in saved_by[0]["metrics"]], rel=1e-5)
            assert losses == pytest.approx(reference(TRAVELS).losses[AT:], rel=1e-5)
        if writer == reader and not reader.engine.compiles:
            assert answers[0][str(writer)]["metrics"] == saved_by[0]["metrics"], "the same engine resumes bit for bit"
    if reader.engine.compiles:
        assert answers[0]["compilations"] <= 1, "loading made the step another program"


OTHERS = [
    Case(model="gpt2", steps=12, strategy="NO_SHARD"),
    Case(model="qwen3", steps=12, optim={"name": "sgd", "lr": 0.2, "momentum": 0.9, "weight_decay": 0.0}),
    Case(model="gemma2", steps=12, compute="bfloat16"),
    Case(model="mixtral", steps=12, optim={"name": "adafactor", "lr": 3e-3}),
    Case(model="llama_tied", steps=12, optim={"name": "muon", "lr": 3e-3, "momentum": 0.95}),
    Case(model="llama_tied", steps=12, settings={"xla_fsdp1.shard_param_on_dim_0": False}),
]


@proof
@pytest.mark.xla
@pytest.mark.parametrize("case", OTHERS, ids=["replicated", "momentum", "bfloat16", "adafactor", "muon", "cut flat"])
@pytest.mark.parametrize("writer", GROUPS, ids=str)
def test_states_of_other_optimizers_strategies_and_dtypes_travel(
    case: Case, writer: Group, workers: GetWorkers, tmp_path: Path
) -> None:
    if any(workers(writer).run("is_refused", case=case)):
        return
    answers = workers(writer).run("write", case=case, folder=str(tmp_path), at=AT)
    saved, losses = assemble([answer["state"] for answer in answers]), [row["loss"] for row in answers[0]["metrics"]]
    for reader in (group for group in GROUPS if group.devices in (1, 3)):
        if any(workers(reader).run("is_refused", case=case)):
            continue
        answers = workers(reader).run("read", case=case, folders={"it": str(tmp_path)}, at=AT)
        assert_equal_states(assemble([answer["it"]["state"] for answer in answers]), saved)
        bound = 1e-5 if case.compute == "float32" else 2e-3
        assert [row["loss"] for row in answers[0]["it"]["metrics"]] == pytest.approx(losses, rel=bound)


# ------------------------------------------------------------------------------------------------ a kill at any instant


@proof
@pytest.mark.xla
@pytest.mark.parametrize(
    ("writer", "reader", "operations"),
    [(Group("native", 2), Group("xla", 3), 85), (Group("xla", 4), Group("native", 3), 60)],
    ids=str,
)
def test_every_instant_of_a_save_resumes_elsewhere(
    writer: Group, reader: Group, operations: int, workers: GetWorkers, tmp_path: Path
) -> None:
    """The files of every instant of a save are kept; another engine resumes from each, on other devices.

    tests/checkpoint/test_faults.py kills at each of the same operations, with another backend.
    """
    (kept := tmp_path / "kept").mkdir()
    case = Case(model="llama_tied", steps=3)
    saved = workers(writer).run("save_by_instants", case=case, folder=str(tmp_path / "run"), kept=str(kept))
    assert sum(answer["operations"] for answer in saved) >= operations
    expected = {step: assemble([answer["states"][step] for answer in saved]) for step in (1, 2)}
    instants = sorted(path for path in kept.iterdir() if path.is_dir())
    committed = [2 if (path / "step-00000002" / "manifest.json").exists() else 1 for path in instants]
    assert len(instants) >= operations / 2
    assert 5 < committed.count(2) < len(instants) - 20, "instants before the commit, and of the retention after it"
    answers = workers(reader).run("resume_each", case=case, folders=[str(path) for path in instants], expected=expected)
    for answer in answers:
        assert [folder["differ"] for folder in answer] == [[]] * len(instants)
        assert [folder["step"] for folder in answer] == committed
        assert [folder["position"] for folder in answer] == [(0, step * GLOBAL_BATCH) for step in committed]
    for instant in instants:
        assert [path.name for path in instant.iterdir()] == ["step-00000003"], "debris"
        [path] = committed_steps(instant)
        files = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
        assert files == {"manifest.json", *(file.name for file in read_manifest(path).files)}


# --------------------------------------------------------------- replicas; tests/checkpoint/test_replica_digests.py too

KEY = "model.layers.1.mlp.up_proj.weight"
ASYNC = {"async_save": True}
COPIES = Case(strategy="NO_SHARD", steps=3)
HYBRID = Case(strategy="HYBRID_SHARD", steps=3, settings={"sharding.replicas": 2})
ZERO2 = Case(strategy="HYBRID_SHARD_ZERO2", steps=3, max_grad_norm=0.01, settings={"sharding.replicas": 2})
REPLICAS: list[tuple[Group, Case, dict[str, bool], str, bool]] = [  # ..., the equal replicas, in the suite
    (Group("native", 2), COPIES, {}, "process 0 | process 1", False),
    (Group("native", 3), COPIES, ASYNC, "process 0, process 1 | process 2", True),
    (Group("native", 4), HYBRID, {}, "process 1 | process 3", True),
    (Group("native", 4), ZERO2, ASYNC, "process 1 | process 3", False),
    (Group("xla", 3), COPIES, ASYNC, "process 0 replica 0, process 0 replica 1 | process 0 replica 2", True),
    (Group("xla", 4), HYBRID, {}, "process 0 replica 0 | process 0 replica 1", False),
    (Group("xla_fsdp1", 2), COPIES, {}, "process 0 | process 1", True),
    (Group("xla_fsdp1", 4), HYBRID, {}, "process 1 | process 3", False),
]


@pytest.mark.parametrize(
    ("group", "case", "settings", "equal"),
    [marked(group, *rest, in_suite=in_suite) for group, *rest, in_suite in REPLICAS],
)
def test_a_save_refuses_replicas_that_differ_and_no_others(
    group: Group, case: Case, settings: dict[str, bool], equal: str, workers: GetWorkers, tmp_path: Path
) -> None:
    answers = workers(group).run("save_unequal_replicas", case=case, folder=str(tmp_path), key=KEY, settings=settings)
    [message] = {answer["message"] for answer in answers}
    assert "checkpoint step-00000002: expected equal values in all replicas, found 1 that differ" in message
    assert re.search(rf"\n    {re.escape(KEY)}.*  {re.escape(equal)}\n", message), message
    assert "resumes from step-00000001" in message
    assert answers[0]["left"] == ["step-00000001"]
    assert {answer["resumed_from"] for answer in answers} == {"step-00000001"}
    assert [path.name for path in committed_steps(tmp_path)] == ["step-00000003", "step-00000001"]


# -------------------------------------------------------------------------------------------------- memory of a load

MIB = 2**20
SLACK = 64 * MIB
# 120 MiB of weights, and AdamW's two moments: half of the state is more than the largest tensor and the slack.
SIZES = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
LARGE = {"model_type": "llama", "num_attention_heads": 8, "max_position_embeddings": 64, **SIZES}


@pytest.mark.xla
def test_a_load_holds_one_tensor_beside_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a constant: never the whole state."""
    case = Case(settings={"model.architecture": LARGE})
    for name, value in RETURN_FREED_MEMORY.items():
        monkeypatch.setenv(name, value)
    for group in (Group("native", 2), Group("xla", 2)):
        workers = Workers(group)
        try:
            if not list(tmp_path.iterdir()):
                workers.run("save_untrained", case=case, folder=str(tmp_path))
            answers = workers.run("memory_of_a_load", case=case, folder=str(tmp_path))
        finally:
            workers.close()
        for answer in answers:
            print(group, {name: round(value / MIB) for name, value in answer.items()})
            assert answer["before"] > 0.9 * answer["shards"], "what was measured holds the shards"
            assert answer["grown"] <= answer["largest"] + SLACK < answer["shards"]
