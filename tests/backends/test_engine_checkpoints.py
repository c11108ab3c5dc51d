"""Checkpoints of the real engines: promise 3 (they travel) and promise 6 (a kill loses nothing)."""

import math
import re
from collections.abc import Callable, Iterable
from functools import cache
from pathlib import Path
from typing import Any, cast

import jobs
import pytest
import torch
from cases import GLOBAL_BATCH, Case, assemble, assert_equal_states
from jobs import checkpoints_in, load_newest, open_case, running
from memory import RETURN_FREED_MEMORY, Peak, anonymous
from reference import reference
from torch.distributed.tensor import DTensor
from workers import GROUPS, GetWorkers, Group, Workers, marked

from portable_fsdp.backends.contract import Backend
from portable_fsdp.backends.native.units import local_part
from portable_fsdp.checkpoint.manifests import committed_steps
from portable_fsdp.config import schema
from portable_fsdp.layout import weight_spec
from portable_fsdp.runtime.errors import CheckpointError

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
        return folder, workers(group).run(jobs.write, case=TRAVELS, folder=str(folder), at=AT)

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
    answers = workers(reader).run(jobs.read, case=TRAVELS, folders=folders, at=AT)
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


def assert_travels(
    workers: GetWorkers,
    writer: Group,
    case: Case,
    readers: Iterable[tuple[Group, Case]],
    folder: Path,
    *,
    at: int = AT,
    bound: float = 1e-5,
) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Save on `writer` at step `at`. Each reader, with its own case, loads it bit for bit and goes on with the writer's
    losses within `bound`. Return the state and those losses."""
    written = workers(writer).run(jobs.write, case=case, folder=str(folder), at=at)
    saved, losses = assemble([answer["state"] for answer in written]), [row["loss"] for row in written[0]["metrics"]]
    for reader, its in readers:
        answers = workers(reader).run(jobs.read, case=its, folders={"it": str(folder)}, at=at)
        assert_equal_states(assemble([answer["it"]["state"] for answer in answers]), saved)
        for answer in answers:
            assert [row["loss"] for row in answer["it"]["metrics"]] == pytest.approx(losses, rel=bound)
    return saved, losses


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
    takes = [group for group in GROUPS if not any(workers(group).run(jobs.is_refused, case=case))]
    if writer in takes:
        readers = [(group, case) for group in takes if group.devices in (1, 3)]
        assert_travels(workers, writer, case, readers, tmp_path, bound=1e-5 if case.compute == "float32" else 2e-3)


# --------------------------------------------------------------- replicas; tests/checkpoint/test_manager.py too

KEY = "model.layers.1.mlp.up_proj.weight"
ASYNC = {"async_save": True}
COPIES = Case(strategy="NO_SHARD", steps=3)
HYBRID = Case(strategy="HYBRID_SHARD", steps=3, settings={"sharding.replicas": 2})
ZERO2 = Case(strategy="HYBRID_SHARD_ZERO2", steps=3, max_grad_norm=0.01, settings={"sharding.replicas": 2})
REPLICAS: list[tuple[Group, Case, dict[str, bool], str, bool]] = [  # ..., the equal replicas, in the suite
    (Group("gloo", 2), COPIES, {}, "process 0 | process 1", False),
    (Group("gloo", 3), COPIES, ASYNC, "process 0, process 1 | process 2", True),
    (Group("gloo", 4), HYBRID, {}, "process 1 | process 3", True),
    (Group("gloo", 4), ZERO2, ASYNC, "process 1 | process 3", False),
    (Group("xla", 3), COPIES, ASYNC, "process 0 replica 0, process 0 replica 1 | process 0 replica 2", False),
    (Group("xla", 4), HYBRID, {}, "process 0 replica 0 | process 0 replica 1", True),
    (Group("xla_fsdp1", 2), COPIES, {}, "process 0 | process 1", False),
    (Group("xla_fsdp1", 4), HYBRID, {}, "process 1 | process 3", False),
]


def save_unequal_replicas(case: Case, folder: str, settings: dict[str, Any], equal: str) -> None:
    """Save step 1; change one number of `KEY` in the last replica, train on, and save step 2, which is refused.

    Then load what is found and save step 3.
    """
    with running(case) as run:
        checkpoints = checkpoints_in(folder, run, schema.Checkpoint(**settings))

        def save(step: int) -> None:
            checkpoints.save(step, run.model, run.optimizer, (0, step * GLOBAL_BATCH))
            checkpoints.wait()

        run.train(1, 1)
        save(1)
        change_a_replica(run.backend, run.model, KEY)
        run.train(2, 2)
        with pytest.raises(CheckpointError) as refusal:
            save(2)
        message = str(refusal.value)
        assert "checkpoint step-00000002: replicas differ in 1 places" in message
        assert re.search(rf"\n    {re.escape(KEY)}.*  {re.escape(equal)}\n", message), message
        assert "resumes from step-00000001" in message
        if run.backend.process.index == 0:
            assert [path.name for path in Path(folder).iterdir()] == ["step-00000001"]
        path, _ = load_newest(checkpoints, run)
        assert path.name == "step-00000001"
        run.train(2, 3)
        save(3)


def change_a_replica(backend: Backend, model: torch.nn.Module, key: str) -> None:
    """Add 0.5 to one number of a weight in the last replica of the last shard alone."""
    parameter = dict(model.named_parameters()).get(key)
    if backend.name == "xla":
        calls = iter(range(backend.devices))

        def piece(slices: tuple[slice, ...]) -> torch.Tensor:
            data = host[slices].clone()
            data[0, 0] += 0.5 * (next(calls) == backend.devices - 1)
            return data

        assert parameter is not None
        host = parameter.detach().cpu()
        parameter.data = cast(Any, backend)._make(host.shape, host.dtype, weight_spec(host.dim()), piece)
    elif backend.process.index == backend.process.count - 1:
        parameter = parameter if parameter is not None else list(model.parameters())[-1]  # FQNs of the wrappers
        local = local_part(parameter)
        change = torch.zeros(local.shape)
        change.view(-1)[0] = 0.5
        with torch.no_grad():
            if isinstance(parameter, DTensor):
                local.add_(change)
            else:
                parameter.data = local + change.to(local.device)


@pytest.mark.parametrize(
    ("group", "case", "settings", "equal"),
    [marked(group, *rest, in_suite=in_suite) for group, *rest, in_suite in REPLICAS],
)
def test_a_save_refuses_replicas_that_differ_and_no_others(
    group: Group, case: Case, settings: dict[str, bool], equal: str, workers: GetWorkers, tmp_path: Path
) -> None:
    workers(group).run(save_unequal_replicas, case=case, folder=str(tmp_path), settings=settings, equal=equal)
    assert [path.name for path in committed_steps(tmp_path)] == ["step-00000003", "step-00000001"]


# -------------------------------------------------------------------------------------------------- memory of a load

SLACK = 64 * 2**20
# 120 MiB of weights, and AdamW's two moments: half of the state is more than the largest tensor and the slack.
SIZES = {"vocab_size": 16384, "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4}
LARGE = {"model_type": "llama", "num_attention_heads": 8, "max_position_embeddings": 64, **SIZES}


def load_in_little_memory(case: Case, folder: str, saves: bool) -> None:
    """A load adds at most the largest tensor and a constant. `saves`: only save the state that training starts from."""
    backend, config = open_case(case)
    with backend:
        before = anonymous()
        run = jobs.Run(backend, config)
        checkpoints = checkpoints_in(folder, run)
        if saves:
            checkpoints.save(1, run.model, run.optimizer, (0, 0))
            return
        with Peak() as loading:
            load_newest(checkpoints, run)
        state = backend.state(run.model, run.optimizer)
        shards = sum(piece.data.nbytes for tensor in state.values() for piece in tensor.pieces())
        largest = max(math.prod(tensor.shape) * tensor.dtype.itemsize for tensor in state.values())
        assert loading.before - before > 0.9 * shards, "what was measured holds the shards"
        assert loading.grown <= largest + SLACK < shards


@pytest.mark.proof
@pytest.mark.xla
def test_a_load_holds_one_tensor_beside_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a constant: never the whole state."""
    case = Case(settings={"model.architecture": LARGE})
    for name, value in RETURN_FREED_MEMORY.items():
        monkeypatch.setenv(name, value)
    for group in (Group("gloo", 2), Group("xla", 2)):
        workers = Workers(group)
        try:
            if not list(tmp_path.iterdir()):
                workers.run(load_in_little_memory, case=case, folder=str(tmp_path), saves=True)
            workers.run(load_in_little_memory, case=case, folder=str(tmp_path), saves=False)
        finally:
            workers.close()
