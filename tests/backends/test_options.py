"""Each option on each engine, and every two options together: the curve stays that of a plain loop.

`OPTIONS` is the whole table: a new option, or a new value, is one entry. `covering_rows` takes as few combinations as
hold every pair of values once; `make proof` runs a whole product. What an engine refuses (config/support.py), it must
refuse here too, and the row runs on without it.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import combinations, product
from typing import Any

import pytest
from assemble import assemble
from cases import Case
from test_curves import BF16_20_STEPS, assert_equal_curves
from workers import Group, JobFailed, Workers

from portable_fsdp.config.support import require_supported
from portable_fsdp.runtime.errors import BackendError

Settings = dict[str, Any]

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
        "every_2": {"memory.gradient_checkpointing": "selective", "memory.every": 2},
        "save_ops": {"memory.gradient_checkpointing": "selective", "memory.save_ops": ["matmul"]},
    },
    "precision": {
        "float32": {},
        "bfloat16": {"precision.compute": "bfloat16"},
        "norms": {"precision.compute": "bfloat16", "precision.modules": {"*norm*": "float32"}},
    },
    "prefetch": {
        "default": {},
        "two_ahead": {"sharding.forward_prefetch": 2, "sharding.backward_prefetch_units": 2},
        "post": {"sharding.forward_prefetch": 1, "sharding.backward_prefetch": "BACKWARD_POST"},
        "none": {"sharding.backward_prefetch": "NO_PREFETCH"},
    },
    "memory": {"device": {}, "offload": {"memory.cpu_offload": True}},
    "micro_batches": {"one": {}, "three": {"train.micro_batch": 1}},
    "trained": {
        "all": {},
        "frozen": {"model.freeze": ["model.embed_tokens", "model.layers.0.mlp"]},
        "groups": {
            "optim.groups": [{"match": "*norm*", "lr": 5e-3}, {"match": "model.embed_tokens", "weight_decay": 0.0}]
        },
    },
    "compiled": {
        "no": {},
        "layers": {"compile.enabled": True, "compile.backend": "aot_eager"},
        "scan": {"compile.scan_layers": True},
    },
    "model": {"llama": {}, "llama_tied": {}},
}
DEVICES = 4
Row = Mapping[str, str]  # option -> the name of its value


def covering_rows() -> list[dict[str, str]]:
    """Rows that hold each pair of values of two options at least once; taken greedily, the fullest first."""
    open_pairs = {
        frozenset({(a, x), (b, y)}) for a, b in combinations(OPTIONS, 2) for x, y in product(OPTIONS[a], OPTIONS[b])
    }
    rows: list[dict[str, str]] = []
    while open_pairs:
        row = dict(sorted(min(open_pairs, key=sorted)))
        for option in OPTIONS:
            if option not in row:
                row[option] = max(OPTIONS[option], key=lambda value: _gain(open_pairs, row, option, value))
        open_pairs -= {frozenset(pair) for pair in combinations(row.items(), 2)}
        rows.append({option: row[option] for option in OPTIONS})
    return rows


def _gain(open_pairs: set[frozenset[tuple[str, str]]], row: Row, option: str, value: str) -> int:
    return sum(frozenset({(option, value), other}) in open_pairs for other in row.items())


def case_of(row: Row) -> Case:
    settings = {key: value for option in row for key, value in OPTIONS[option][row[option]].items()}
    return Case(model=row["model"], settings=settings)


PLAIN = {option: next(iter(values)) for option, values in OPTIONS.items()}
# The program of all layers is one: they can't differ in what is recomputed, trained or a unit inside them.
SCAN_NEEDS_EQUAL_LAYERS = {"checkpointing": "every_2", "trained": "frozen", "wrap": "classes"}


def is_taken(engine: str, row: Row) -> bool:
    try:
        require_supported(case_of(row).config(DEVICES), engine=engine, device="cpu", devices=DEVICES, hosts=1)
    except BackendError:
        return False
    return row["compiled"] != "scan" or not any(row[key] == value for key, value in SCAN_NEEDS_EQUAL_LAYERS.items())


def taken_by(engine: str, row: Row) -> Row:
    """The row without what the engine refuses, alone or together."""
    taken = dict(PLAIN)
    for option, value in row.items():
        if is_taken(engine, {**taken, option: value}):
            taken[option] = value
    return taken


ROWS = covering_rows()
ENGINES = [
    "native",
    pytest.param("xla", marks=pytest.mark.xla),
    pytest.param("xla_fsdp1", marks=[pytest.mark.xla, pytest.mark.proof]),
]


def assert_curve(workers: Callable[[Group], Workers], engine: str, row: Row) -> None:
    group = workers(Group(engine, DEVICES))
    taken = taken_by(engine, row)
    if taken != row:
        with pytest.raises(JobFailed) as failure:
            group.run("built", case=case_of(row))
        assert failure.value.kind == "BackendError"
    case = case_of(taken)
    answers = group.run("train", case=case)
    exact = row["precision"] == "float32"
    assert_equal_curves(answers, case, None if exact else BF16_20_STEPS)
    assemble([answer["final"] for answer in answers])
    for answer in answers:
        # An earlier row had the same program, which a worker keeps: without what is refused, rows are alike.
        again = engine != "native" and answer["compilations"] == 0
        assert again or answer["compilations"] == answer["expected_compilations"]


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(row.values()))
def test_every_two_options_together_keep_the_curve(engine: str, row: Row, workers: Callable[[Group], Workers]) -> None:
    assert_curve(workers, engine, row)


def test_the_rows_hold_every_pair() -> None:
    held = {pair for row in ROWS for pair in combinations(row.items(), 2)}
    assert all(
        ((a, x), (b, y)) in held for a, b in combinations(OPTIONS, 2) for x, y in product(OPTIONS[a], OPTIONS[b])
    )
    assert len(ROWS) <= 32


PRODUCT = [
    dict(zip(("strategy", "wrap", "checkpointing"), names, strict=True))
    for names in product(*(OPTIONS[option] for option in ("strategy", "wrap", "checkpointing")))
]


@pytest.mark.proof
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("row", PRODUCT, ids=lambda row: "-".join(row.values()))
def test_the_whole_product_keeps_the_curve(engine: str, row: Row, workers: Callable[[Group], Workers]) -> None:
    assert_curve(workers, engine, {**PLAIN, **row})


def test_a_frozen_weight_and_a_group_change_the_curve() -> None:
    """The check itself: the plain loop does honour them, so that an engine that did not would be seen."""
    from reference import reference

    plain = reference(Case()).losses
    for settings in (OPTIONS["trained"]["frozen"], OPTIONS["trained"]["groups"]):
        other = reference(replace(Case(), settings=settings)).losses
        assert max(abs(a - b) / b for a, b in zip(other, plain, strict=True)) > 1e-3
