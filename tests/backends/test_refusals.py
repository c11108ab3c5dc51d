"""The tables of all engines, walked: every option has one verdict, every fix leads out."""

import json
import random
import re
import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from portable_fsdp.backends.native.torchtpu import check_installation
from portable_fsdp.backends.open import DEVICES, ENGINES, engines_on, spec_of
from portable_fsdp.backends.refusals import (
    Deployment,
    fixes_of,
    lines_of,
    refusals,
    require_supported,
    rules_of,
    verdicts,
)
from portable_fsdp.config.describe import (
    default_of,
    option_names,
    plain_values,
    shortened,
    value_of,
    yaml_value,
)
from portable_fsdp.config.schema import Config
from portable_fsdp.runtime.errors import BackendError, ConfigError

# A global batch that all these numbers of devices divide: the batch has a test of its own.
WHOLE = {"model": {"pretrained": "folder"}, "train": {"steps": 1, "global_batch": 64}}
COUNTS = [(1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1), (8, 2), (None, None), (8, None)]
PLACES = [
    *(Deployment(engine, "cpu", devices, hosts) for engine in ENGINES for devices, hosts in COUNTS),
    *(
        Deployment(engine, device, 8, 2, "v6e" if device == "tpu" else "")
        for device in DEVICES[1:]
        for engine in engines_on(device)
    ),
]
FEW = [place for place in PLACES if (place.devices, place.hosts) in ((1, 1), (8, 2), (None, None))]
IN_SUITE = [place for place in FEW if place.device == ("cuda" if place.engine == "native" else "tpu")]
"""One place for each engine, at which all groups of options are tried."""
PROOFS = [place for place in PLACES if place not in [*IN_SUITE, Deployment("native", "cpu", 4, 1)]]
"""Places that differ in devices and hosts, which only the rules of `sharding` read: one of them is tried per commit."""


def each(places: list[Deployment]) -> list[Any]:
    return [pytest.param(place, id=str(place), marks=[pytest.mark.proof] * (place in PROOFS)) for place in places]


# Options that bear on each other stand in one group, which is walked in its whole product. Words and switches have all
# their values, other options those of VALUES.
OPTION_GROUPS = [
    "sharding.strategy sharding.replicas sharding.reshard_after_forward sharding.tensor",
    "sharding.tensor sharding.sequence_parallel sharding.plan optim.name optim.factory",
    "sharding.tensor precision.products precision.compute",
    "sharding.strategy sharding.expert sharding.context sharding.tensor sharding.expert_capacity",
    "sharding.expert model.experts model.lora optim.name optim.factory compile.scan_layers",
    "sharding.context model.attention train.task",
    "sharding.wrap sharding.wrap_classes sharding.wrap_modules sharding.min_num_params",
    "sharding.forward_prefetch sharding.backward_prefetch sharding.backward_prefetch_units "
    "sharding.sync_each_micro_batch",
    "precision.master precision.compute precision.reduce precision.output precision.modules",
    "precision.matmul precision.buffers precision.cast_inputs precision.loss_scale precision.loss_scale_window",
    "precision.products precision.compute memory.cpu_offload model.lora",
    "memory.gradient_checkpointing memory.every memory.save_ops compile.scan_layers compile.enabled compile.backend",
    "memory.gradient_checkpointing memory.classes memory.offload compile.scan_layers",
    "memory.budget compile.cache_dir",
    "memory.cpu_offload memory.offload",
    "model.router_bias_rate precision.buffers compile.scan_layers",
    "model.attention model.experts model.freeze model.train_only model.lora precision.frozen model.gguf_file "
    "checkpoint.export checkpoint.merge_adapters",
    "optim.name optim.factory optim.groups optim.momentum optim.betas optim.eps",
    "optim.schedule optim.min_lr_ratio optim.decay_ratio",
    "data.eval_split train.eval_every train.eval_on_start train.eval_batches train.patience",
    "train.sample_every train.sample_prompts train.sample_tokens",
    "train.micro_batch train.max_grad_norm",
    "checkpoint.keep checkpoint.keep_every checkpoint.resume checkpoint.load",
    "observe.profile",
    "xla_fsdp1.flatten_parameters xla_fsdp1.shard_param_on_dim_0 xla_fsdp1.pin_layout_in_collective_ops",
]
OTHER = """
{sharding.wrap_classes: [LlamaDecoderLayer], sharding.wrap_modules: ["*mlp"], sharding.min_num_params: 1000,
 sharding.forward_prefetch: 2, sharding.backward_prefetch_units: 2, precision.loss_scale: 1024.0,
 precision.loss_scale_window: 100, memory.classes: [LlamaMLP], memory.budget: 0.1, compile.cache_dir: a/folder,
 model.router_bias_rate: 0.001,
 model.freeze: ["*embed*"], model.train_only: ["*embed*"], model.lora: {r: 4},
 optim.factory: "module:function", optim.groups: [{match: "*"}],
 optim.momentum: 0.9, optim.betas: [0.9, 0.999], optim.eps: 1.0e-6, optim.min_lr_ratio: 0.5, optim.decay_ratio: 0.5,
 data.eval_split: 5%, train.eval_every: 2, train.eval_batches: 3, train.patience: 1, train.sample_every: 2,
 train.sample_prompts: [a], train.sample_tokens: 8, checkpoint.keep: 2, checkpoint.keep_every: 4,
 checkpoint.resume: a/checkpoint, observe.profile: {steps: [2, 3]}}
"""
"""Options that are tried with their default and this value."""
VALUES: dict[str, list[Any]] = {
    "sharding.replicas": [None, 1, 2, 3, 4, 8],
    "sharding.tensor": [1, 2, 3],
    "sharding.expert": [1, 2],
    "sharding.context": [1, 2],
    "sharding.expert_capacity": [None, 1.5],
    "train.task": ["causal_lm", "masked_lm"],
    "sharding.sequence_parallel": ["auto", False],
    "sharding.plan": [{}, {"*mlp": "replicated"}],
    "sharding.reshard_after_forward": [None, 2, 3, 4, 8],
    "precision.modules": [{}, {"*norm*": "float32"}, {"*norm*": "bfloat16"}, {"a": "float16", "b": "float32"}],
    "precision.frozen": ["auto", "bfloat16", "nf4"],
    "memory.every": [None, 1, 2],
    "memory.save_ops": [[], ["matmul"], ["matmul", "attention"]],
    "model.gguf_file": ["a.gguf"],
    "checkpoint.export": [True],
    "train.micro_batch": [1, 2, "auto"],
    "train.max_grad_norm": [None, 1.0],
    "xla_fsdp1.shard_param_on_dim_0": [None, False, True],
    "xla_fsdp1.pin_layout_in_collective_ops": [None, False, True],
} | {option: [plain_values(default_of(option)), value] for option, value in yaml.safe_load(OTHER).items()}

_OWN: dict[str, Any] = {"model.pretrained": None, "model.factory": "module:function"}
OF_FACTORIES: list[dict[str, Any]] = [
    _OWN,  # causal_lm is for models of transformers
    {"train.task": "masked_lm"},
    {"sharding.context": 2, "data.seq_len": 30},
    {"sharding.tensor": 2, "model.lora": {"r": 4, "dora": True}},
    {"model.router_bias_rate": 0.001, "model.lora": {"r": 4}},
    {"precision.frozen": "nf4", "model.lora": {"r": 4, "dora": True}},
    {**_OWN, "train.task": "module:function", "model.attention": "sdpa", "model.experts": "batched_mm"},
    {**_OWN, "train.task": "module:function", "model.lora": {"r": 4}},
    {**_OWN, "train.task": "module:function", "sharding.tensor": 2, "model.router_bias_rate": 0.001},
    {**_OWN, "train.task": "module:function", "sharding.expert": 2, "sharding.context": 2},
    {"precision.compute": "float16", "precision.loss_scale": 1024.0, "optim.name": "adafactor"},
    {**_OWN, "train.task": "module:function", "precision.frozen": "nf4", "model.freeze": ["*embed*"]},
    *(
        {"precision.frozen": "nf4", "model.freeze": ["a"], "precision.compute": "bfloat16", "precision.products": word}
        for word in ("int8", "float8")
    ),
    {"data.factory": "module:function", "train.sample_every": 2, "train.sample_prompts": ["a"]},
    {"xla_fsdp1.flatten_parameters": True, "optim.weight_decay": 0},
    {"data.factory": "module:function", "data.buckets": {"labels": [4]}, "data.workers": 2},
    {"data.factory": "module:function", "data.buckets": {"input_ids": [4, 8], "labels": [4, 8]}},
]
"""Functions of the user's own stand instead of keys that the other groups have."""


def _values(option: str) -> list[Any]:
    section, key = option.split(".")
    model: Any = Config.model_fields[section].annotation
    field = model.model_json_schema()["properties"][key]
    return VALUES.get(option) or field.get("enum") or [False, True]


GROUPS = [{option: _values(option) for option in names.split()} for names in OPTION_GROUPS]

Settings = dict[str, Any]


def config_of(settings: Settings) -> Config:
    return _config_of(json.dumps(settings))


@cache
def _config_of(settings: str) -> Config:
    values: dict[str, dict[str, Any]] = {section: dict(keys) for section, keys in WHOLE.items()}
    for option, value in json.loads(settings).items():
        section, _, key = option.partition(".")
        values.setdefault(section, {})[key] = value
    return Config.model_validate(values)


@cache
def walk(groups: int = len(GROUPS)) -> list[tuple[Settings, Config]]:
    """The products of the first groups, and configs in which all groups have values other than their defaults."""
    draw = random.Random(7)
    products = [
        dict(zip(group, values, strict=True)) for group in GROUPS[:groups] for values in product(*group.values())
    ]
    mixtures = [
        {option: draw.choice(values) for group in GROUPS for option, values in group.items()} for _ in range(99)
    ]
    return [(settings, config_of(settings)) for settings in [*products, *OF_FACTORIES, *mixtures]]


def walk_at(place: Deployment) -> list[tuple[Settings, Config]]:
    """Of the groups only the first one, sharding, asks for the numbers of devices and hosts."""
    return walk() if place in FEW else walk(1)


def follow(settings: Settings, place: Deployment, fix: str) -> tuple[Settings, Deployment]:
    """What a fix says to do: `a.b=1 and --backend=native`."""
    changes = dict(parsed(fix))
    place = place._replace(engine=changes.pop("--backend", place.engine))
    return settings | changes, place


@cache
def parsed(fix: str) -> dict[str, Any]:
    parts = [part.partition("=") for part in fix.split(" and ")]
    assert all(equals for _, equals, _ in parts), fix
    return {name: yaml.safe_load(value) for name, _, value in parts}


def test_the_tables_of_an_engine_name_options_of_the_schema() -> None:
    """A misspelt key fails here, and so does a new one without a description."""
    for engine in ENGINES:
        spec = spec_of(engine)
        named = [*(key.partition("=")[0] for key in spec.notes), *spec.delegated]
        assert {*named, *(rule.option for rule in rules_of(engine))} <= set(option_names())
        assert not spec.delegated.keys() & spec.notes.keys()
        lines = [line for option in option_names() for line in lines_of(engine, option)]
        assert all(line.text for line in lines)
        taken = [(line.option, line.case) for line in lines if line.kind != "refused"]
        assert len(set(taken)) == len(taken)


@pytest.mark.slow
@pytest.mark.parametrize("place", each(FEW))
def test_each_option_has_one_verdict_and_a_refusal_says_key_reason_and_fixes(place: Deployment) -> None:
    for _, config in walk():
        judged, rules, message = verdicts(config, place), refusals(config, place), ""
        assert tuple(verdict.option for verdict in judged) == option_names()
        assert all(verdict.text for verdict in judged)
        refused = {verdict.option for verdict in judged if verdict.kind == "refused"}
        assert refused == {rule.option for rule in rules}
        try:
            require_supported(config, place)
        except BackendError as error:
            message = str(error)
        assert len(message.splitlines()) == 2 * len(rules)
        for rule in rules:
            value = shortened(yaml_value(value_of(config, rule.option)))
            assert f"{rule.option}={value} {rule.case}: {rule.reason}.\n  Set " in message
            assert all(fix in message for fix in fixes_of(rule, config, place))


@pytest.mark.slow
@pytest.mark.parametrize("place", each(PLACES))
def test_every_fix_leads_out_and_the_first_ones_to_a_config_that_runs(place: Deployment) -> None:
    for settings, config in walk_at(place):
        for rule in refusals(config, place):
            fixes = fixes_of(rule, config, place)
            assert fixes, f"{settings}: no fix for {rule.head}"
            for fix in fixes:
                after, there = follow(settings, place, fix)
                assert rule not in refusals(config_of(after), there), f"{settings}: {fix}"
        after, there, steps = settings, place, 0
        while rules := refusals(config_of(after), there):
            after, there = follow(after, there, fixes_of(rules[0], config_of(after), there)[0])
            steps += 1
            assert steps < 40, f"{settings} goes in circles at {rules[0]}"


@pytest.mark.slow
@pytest.mark.parametrize("engine", ENGINES)
def test_each_fix_that_a_rule_states_is_accepted(engine: str) -> None:
    """Beside some settings: no rule refuses the config of a fix, where its rule alone refused the one before."""
    stated, accepted = set[tuple[str, str, str]](), set[tuple[str, str, str]]()
    for place in (place for place in FEW if place.engine == engine):
        for settings, config in walk():
            rules = refusals(config, place)
            for fix in fixes_of(rules[0], config, place) if len(rules) == 1 else ():
                words = re.sub(r"=[^ ]+", "", fix) if callable(rules[0].fixes) else fix  # computed values
                stated.add(case := (rules[0].head, place.device, words))
                if case not in accepted:
                    after, there = follow(settings, place, fix)
                    accepted |= {case} if not refusals(config_of(after), there._replace(generation="")) else set()
    assert sorted(stated - accepted) == []


def test_every_refusal_is_met_by_the_walk_and_none_by_the_defaults() -> None:
    met = {rule for place in PLACES for _, config in walk_at(place) for rule in refusals(config, place)}
    assert [rule for engine in ENGINES for rule in rules_of(engine) if rule.when and rule not in met] == []
    assert [rule for place in PLACES for rule in refusals(config_of({}), place)] == []


def test_what_touches_numerics_or_memory_is_never_delegated() -> None:
    delegated = {option for engine in ENGINES for option in spec_of(engine).delegated}
    prefetch = {"forward_prefetch", "backward_prefetch", "backward_prefetch_units", "sync_each_micro_batch"}
    of_sharding = {f"sharding.{key}" for key in prefetch}
    assert delegated == {*of_sharding, "compile.enabled", "compile.backend", "run.peer_timeout_s"}


def test_a_batch_that_the_devices_can_not_split_is_refused_in_the_words_of_the_launcher() -> None:
    sizes = {"train.global_batch": 8, "train.micro_batch": 4}
    config = config_of(sizes)
    place = Deployment("native", "cpu", 3, 1)
    [verdict] = [verdict for verdict in verdicts(config, place) if verdict.kind == "refused"]
    assert verdict.option == "train.micro_batch"
    assert verdict.text.startswith("expected at most 3, the rows of each of 3 devices (train.global_batch=8), found 4.")
    assert verdict.text.endswith("Set train.micro_batch=3, or train.global_batch=12.")  # explain starts nothing
    with pytest.raises(ConfigError, match=r"train\.micro_batch: expected at most 3"):
        require_supported(config, place)
    with pytest.raises(BackendError) as both:
        require_supported(config_of(sizes | {"sharding.replicas": 2}), place)
    assert str(both.value).startswith("train.micro_batch: expected at most 3")
    assert "sharding.replicas=2 without sharding.strategy=HYBRID_SHARD|HYBRID_SHARD_ZERO2" in str(both.value)
    unknown = Deployment("native", "cpu", None, None)
    assert not [verdict for verdict in verdicts(config, unknown) if verdict.kind == "refused"]


def test_a_verdict_says_what_only_the_model_can_refuse() -> None:
    place = Deployment("xla", "cpu", 4, 1)

    plain, scanned = (
        {verdict.option: verdict.text for verdict in verdicts(config_of(settings), place)}
        for settings in ({}, {"compile.scan_layers": True})
    )
    assert not [text for text in plain.values() if "when the model is built" in text]
    assert scanned["compile.scan_layers"].endswith(
        "; refused for layers that differ (gemma2): checked when the model is built"
    )
    assert [option for option in plain if plain[option] != scanned[option]] == ["compile.scan_layers"]


REFUSALS: list[tuple[Settings, Deployment]] = [
    ({"memory.cpu_offload": True, "precision.reduce": "bfloat16"}, Deployment("xla", "cpu", 4, 1)),
    ({"memory.cpu_offload": True}, Deployment("xla", "tpu", 8, 2)),
    ({"sharding.strategy": "HYBRID_SHARD"}, Deployment("native", "cuda", 8, 1)),
    ({"sharding.strategy": "HYBRID_SHARD_ZERO2", "sharding.replicas": 3}, Deployment("native", "cuda", 16, 4)),
    ({"sharding.reshard_after_forward": 5}, Deployment("native", "cuda", 8, 1)),
]


def test_the_words_of_refusals(assert_golden: Callable[[Path, str], None]) -> None:
    messages: list[str] = []
    for settings, place in REFUSALS:
        with pytest.raises(BackendError) as refusal:
            require_supported(config_of(settings), place)
        messages.append(f"{settings}\n{refusal.value}\n")
    assert_golden(Path(__file__).parent / "goldens/refusals.txt", "\n".join(messages))


METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
NEEDS = ("torch<=2.15,>=2.11", "libtpu>=0.0.50")
FITTING = {"torch": "2.13.0+cpu", "torch_tpu": "0.2.0", "libtpu": "0.0.52"}
PROBLEMS: dict[str, tuple[dict[str, str], str]] = {
    "none": (FITTING, ""),
    "torch_xla": (FITTING | {"torch_xla": "2.9.0"}, r"torch_tpu 0\.2\.0 and torch_xla 2\.9\.0 are both installed"),
    "no libtpu": ({"torch": "2.13.0", "torch_tpu": "0.2.0"}, r"torch_tpu 0\.2\.0 needs libtpu>=0\.0\.50, found none"),
    "an older torch": (FITTING | {"torch": "2.10.0"}, r"needs torch<=2\.15,>=2\.11, found 2\.10\.0"),
    "a newer torch": (FITTING | {"torch": "2.16.0"}, r"needs torch<=2\.15,>=2\.11, found 2\.16\.0"),
}


def install_only(site: Path, monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]) -> None:
    """Metadata as pip leaves it, and no other package."""
    for name, version in packages.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        lines = "".join(f"Requires-Dist: {line}\n" for line in NEEDS) if name == "torch_tpu" else ""
        (info / "METADATA").write_text(METADATA.format(name=name, version=version) + lines)
    monkeypatch.setattr(sys, "path", [str(site)])


@pytest.mark.parametrize("name", PROBLEMS)
def test_packages_beside_torch_tpu_that_do_not_fit_are_refused(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None of them is needed here: native reads metadata alone."""
    packages, message = PROBLEMS[name]
    install_only(tmp_path, monkeypatch, packages)
    if not message:
        check_installation()
        return
    with pytest.raises(BackendError, match=message) as refusal:
        check_installation()
    assert "environment" in str(refusal.value)
