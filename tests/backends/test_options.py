"""Each option on each engine, and every two options together: the curve stays that of a plain loop.

`OPTIONS` is the whole table: a new option, or a new value, is one entry. `covering_rows` takes as few combinations as
hold every pair of values once, on each engine that takes it. The suite runs the six fullest on native and two of them
on xla, `make proof` all of them. What an engine refuses (backends/refusals.py), it must refuse here
too, and the row runs on without it.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import combinations, product
from typing import Any

import jobs
import pytest
import workers
from cases import ARCHITECTURES, Case, assemble
from test_curves import BF16_20_STEPS, assert_equal_curves
from workers import GetWorkers, Group, JobFailed, marked

from portable_fsdp.backends.open import ENGINES
from portable_fsdp.backends.refusals import Deployment, refusals

Settings = dict[str, Any]

SYNCED_ONCE: Settings = {"train.micro_batch": 1, "sharding.sync_each_micro_batch": False}
WHOLE_ROWS: Settings = {"sharding.sequence_parallel": False}
TIED = ARCHITECTURES["llama_tied"] | {"num_key_value_heads": 2}  # not 3, which tensor parallelism would refuse
OPTIONS: dict[str, dict[str, Settings]] = {
    "strategy": {
        "FULL_SHARD": {},
        "SHARD_GRAD_OP": {"sharding.strategy": "SHARD_GRAD_OP"},
        "NO_SHARD": {"sharding.strategy": "NO_SHARD"},
        "HYBRID_SHARD": {"sharding.strategy": "HYBRID_SHARD", "sharding.replicas": 2},
        "HYBRID_SHARD_ZERO2": {"sharding.strategy": "HYBRID_SHARD_ZERO2", "sharding.replicas": 2},
    },
    "wrap": {
        "layers": {},
        "classes": {"sharding.wrap_classes": ["LlamaMLP", "LlamaAttention"]},
        "size": {"sharding.wrap": "SIZE_BASED_WRAP", "sharding.min_num_params": 12000},
        "none": {"sharding.wrap": "NO_WRAP"},
        "names": {"sharding.wrap_modules": ["model.layers.*.mlp", "model.layers.1.self_attn"]},
    },
    "checkpointing": {
        "none": {},
        "full": {"memory.gradient_checkpointing": "full"},
        "every_2": {
            **{"memory.gradient_checkpointing": "selective", "memory.every": 2},
            "memory.classes": ["LlamaMLP", "LlamaAttention"],
        },
        "save_ops": {"memory.gradient_checkpointing": "selective", "memory.save_ops": ["matmul"]},
    },
    "precision": {
        "float32": {},
        "bfloat16": {"precision.compute": "bfloat16"},
        "float16": {"precision.compute": "float16"},
        "norms": {
            **{"precision.compute": "bfloat16", "precision.modules": {"*norm*": "float32"}},
            "precision.cast_inputs": False,
        },
    },
    "prefetch": {
        "default": {},
        "two_ahead": {"sharding.forward_prefetch": 2, "sharding.backward_prefetch_units": 2},
        "post": {"sharding.forward_prefetch": 1, "sharding.backward_prefetch": "BACKWARD_POST"},
        "none": {"sharding.backward_prefetch": "NO_PREFETCH"},
    },
    "memory": {"device": {}, "offload": {"memory.cpu_offload": True}},
    "micro_batches": {"one": {}, "three": {"train.micro_batch": 1}, "synced_once": SYNCED_ONCE},
    "trained": {
        "all": {},
        "frozen": {"model.freeze": ["model.embed_tokens", "model.layers.0.mlp"]},
        "lora": {"model.lora": {"r": 5, "alpha": 160.0}, "precision.frozen": "bfloat16"},
        "groups": {
            "optim.groups": [{"match": "*norm*", "lr": 5e-3}, {"match": "model.embed_tokens", "weight_decay": 0.0}]
        },
    },
    "compiled": {
        "no": {},
        "layers": {"compile.enabled": True, "compile.backend": "aot_eager"},
        "scan": {"compile.scan_layers": True},
    },
    "tensor": {"one": {}, "two": {"sharding.tensor": 2}, "whole_rows": {"sharding.tensor": 2} | WHOLE_ROWS},
    "model": {"llama": {}, "llama_tied": {"model.architecture": TIED}},
}
DEVICES = 4
Row = Mapping[str, str]  # option -> the name of its value
Pair = frozenset[tuple[str, str]]


def all_pairs() -> set[Pair]:
    return {
        frozenset({(a, x), (b, y)}) for a, b in combinations(OPTIONS, 2) for x, y in product(OPTIONS[a], OPTIONS[b])
    }


def pairs_of(row: Row) -> set[Pair]:
    return {frozenset(pair) for pair in combinations(row.items(), 2)}


def covering_rows() -> list[dict[str, str]]:
    """Rows that hold each pair of values at least once; and again, on each engine, where it was left out of them.

    An engine leaves out of a row what it refuses there, and so pairs that it takes in another row.
    """
    rows = _rows_that_hold(all_pairs(), lambda row: True)
    for engine in ENGINES:
        rows += _rows_that_hold(pairs_taken(engine) - pairs_run(engine, rows), partial(is_taken, engine))
    return rows


def _rows_that_hold(pairs: set[Pair], is_allowed: Callable[[Row], bool]) -> list[dict[str, str]]:
    """Taken greedily, the fullest first."""
    left = set(pairs)
    rows: list[dict[str, str]] = []
    while left:
        row = dict(sorted(min(left, key=sorted)))
        for option in OPTIONS:
            if option not in row:
                allowed = [value for value in OPTIONS[option] if is_allowed({**PLAIN, **row, option: value})]
                row[option] = max(allowed, key=lambda value: _gain(left, row, option, value))
        left -= pairs_of(row)
        rows.append({option: row[option] for option in OPTIONS})
    return rows


def _gain(left: set[Pair], row: Row, option: str, value: str) -> int:
    return sum(frozenset({(option, value), other}) in left for other in row.items())


def pairs_taken(engine: str) -> set[Pair]:
    """Those that the engine takes with plain values of all other options."""
    return {pair for pair in all_pairs() if is_taken(engine, {**PLAIN, **dict(pair)})}


def pairs_run(engine: str, rows: list[dict[str, str]]) -> set[Pair]:
    return {pair for row in rows for pair in pairs_of(taken_by(engine, row))}


def case_of(row: Row) -> Case:
    settings = {key: value for option in row for key, value in OPTIONS[option][row[option]].items()}
    return Case(model=row["model"], steps=6, settings=settings)


PLAIN = {option: next(iter(values)) for option, values in OPTIONS.items()}


def is_taken(engine: str, row: Row) -> bool:
    if refusals(case_of(row).config(DEVICES), Deployment(engine, "cpu", DEVICES, 1)):
        return False
    return (row["compiled"], row["wrap"]) != ("scan", "classes")  # no list of layers, which only the model shows


def taken_by(engine: str, row: Row) -> Row:
    """The row without what the engine refuses, alone or together."""
    taken = dict(PLAIN)
    for option, value in row.items():
        if is_taken(engine, {**taken, option: value}):
            taken[option] = value
    return taken


def rows_with_each_value(engine: str) -> list[dict[str, str]]:
    """Few of the rows: in one of them the engine meets every value that it meets in any."""
    taken = [(row, set(taken_by(engine, row).items())) for row in ROWS]
    left = {value for _, values in taken for value in values}
    few: list[dict[str, str]] = []
    while left:
        row, values = max(taken, key=lambda row: len(left & row[1]))
        few.append(row)
        left -= values
    return few


ROWS = covering_rows()
TESTED = [name for name in ENGINES if name in workers.ENGINES]
MOST = {"native": 6, "xla": 2}  # the fullest; test_native.py and test_xla.py have cases of each strategy
SUITE = {
    engine: rows_with_each_value(engine)[: MOST.get(engine)] for engine in TESTED if workers.ENGINES[engine].in_suite
}


EACH = [
    marked(Group(engine, DEVICES), "-".join(row.values()), row, in_suite=row in SUITE.get(engine, []))
    for engine in TESTED
    for row in ROWS
]


@pytest.mark.parametrize(("where", "name", "row"), EACH)
def test_every_two_options_together_keep_the_curve(where: Group, name: str, row: Row, workers: GetWorkers) -> None:
    taken = taken_by(where.backend, row)
    if taken != row:
        with pytest.raises(JobFailed) as failure:
            workers(where).run(jobs.opened, case=case_of(row), build=True)
        assert failure.value.kind == "BackendError"
    case = case_of(taken)
    answers = workers(where.for_case(case)).run(jobs.train, case=case)
    assert_equal_curves(answers, case, None if row["precision"] == "float32" else BF16_20_STEPS)
    assemble([answer["final"] for answer in answers])
    for answer in answers:
        # An earlier row had the same program, which a worker keeps: without what is refused, rows are alike.
        again = where.engine.compiles and answer["compilations"] == 0
        assert again or answer["compilations"] == answer["expected_compilations"]


def test_the_rows_hold_every_pair_on_each_engine() -> None:
    assert {pair for row in ROWS for pair in pairs_of(row)} == all_pairs()
    assert [pair for engine in ENGINES for pair in pairs_taken(engine) - pairs_run(engine, ROWS)] == []
    assert len(ROWS) <= 38


def test_a_frozen_weight_and_a_group_change_the_curve() -> None:
    """The check itself: the plain loop does honour them, so that an engine that did not would be seen."""
    from reference import reference

    plain = reference(Case(steps=20)).losses
    for settings in (OPTIONS["trained"]["frozen"], OPTIONS["trained"]["groups"]):
        other = reference(Case(steps=20, settings=settings)).losses
        assert max(abs(a - b) / b for a, b in zip(other, plain, strict=True)) > 1e-3
