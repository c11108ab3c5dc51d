"""Adam, Adafactor, Lion, Muon and optimizers of one's own: each does what its formula says, in eager and compiled
steps."""

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from test_optimizer import bring_numbers, in_groups, shared, take_steps
from torch import Tensor, nn

from portable_fsdp.backends.state import zero_optimizer
from portable_fsdp.config.schema import Optim
from portable_fsdp.convert.read import load_config
from portable_fsdp.models.wrap import table_weights
from portable_fsdp.optim.counting import CountingOptimizer, nothing_changed_if
from portable_fsdp.optim.optimizer import make_optimizer, parameter_groups
from portable_fsdp.optim.own import orthogonalized
from portable_fsdp.runtime.errors import ConfigError

LR = 0.01


def of(name: str, **keys: Any) -> Optim:
    return Optim.model_validate({"name": name, "lr": LR, "betas": [0.8, 0.9], "eps": 0.1, **keys})


def ours(name: str, compiled: bool, **keys: Any) -> torch.optim.Optimizer:
    return make_optimizer(of(name, **keys))(shared(), compiled)


@pytest.mark.parametrize("compiled", [False, True])
def test_adam_and_adafactor_are_torchs_and_transformers(compiled: bool) -> None:
    pairs: dict[str, torch.optim.Optimizer] = {
        "adam": torch.optim.Adam(shared(), lr=LR, betas=(0.8, 0.9), eps=0.1),
        "adafactor": transformers.Adafactor(shared(), lr=LR, scale_parameter=False, relative_step=False),
    }
    for name, other in pairs.items():
        mine = ours(name, compiled)
        for optimizer in (mine, other):
            take_steps(optimizer, 20, lr=LR)
        for actual, expected in zip(in_groups(mine), in_groups(other), strict=True):
            torch.testing.assert_close(actual, expected, rtol=2e-6, atol=2e-7)
            theirs = {name: value for name, value in other.state[expected].items() if name != "RMS"}
            assert mine.state[actual].keys() == theirs.keys()
            for name, value in theirs.items():
                torch.testing.assert_close(mine.state[actual][name], torch.as_tensor(value).float())


@pytest.mark.parametrize("compiled", [False, True])
def test_lion_is_its_formula(compiled: bool) -> None:
    mine, plain = ours("lion", compiled), [parameter.detach().clone() for g in shared() for parameter in g["params"]]
    take_steps(mine, 20, lr=LR)
    generator, means = torch.Generator().manual_seed(1), [torch.zeros_like(weight) for weight in plain]
    for step in range(1, 21):
        for weight, mean, decay, share in zip(plain, means, (0.5, 0.0), (1.0, 0.25), strict=True):
            gradient, lr = torch.randn(weight.shape, generator=generator), LR * step * share
            weight -= lr * (torch.sign(0.8 * mean + 0.2 * gradient) + decay * weight)
            mean.copy_(0.9 * mean + 0.1 * gradient)
    torch.testing.assert_close([p.detach() for p in in_groups(mine)], plain, rtol=2e-6, atol=2e-7)
    torch.testing.assert_close([mine.state[p]["exp_avg"] for p in in_groups(mine)], means)


@pytest.mark.parametrize("compiled", [False, True])
def test_muon_is_torchs_for_hidden_matrices_and_adamw_for_the_rest(compiled: bool) -> None:
    groups = shared()
    groups[0]["is_hidden"] = True
    mine = make_optimizer(of("muon", momentum=0.9), torch.bfloat16)(groups, compiled)
    take_steps(mine, 20, lr=LR)
    matrix, vector = shared()
    torchs = torch.optim.Muon([matrix], lr=LR, momentum=0.9, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([vector], lr=LR, betas=(0.8, 0.9), eps=0.1)
    generator = torch.Generator().manual_seed(1)
    for step in range(1, 21):
        for optimizer, share in ((torchs, 1.0), (adamw, 0.25)):
            optimizer.param_groups[0]["lr"] = LR * step * share
            parameter = in_groups(optimizer)[0]
            parameter.grad = torch.randn(parameter.shape, generator=generator)
            optimizer.step()
    actual, rest = in_groups(mine)
    [expected] = in_groups(torchs)
    # Both iterate in bfloat16, and round elsewhere.
    torch.testing.assert_close(actual, expected, rtol=0.02, atol=0.02)
    torch.testing.assert_close(mine.state[actual]["momentum_buffer"], torchs.state[expected]["momentum_buffer"])
    torch.testing.assert_close(rest, in_groups(adamw)[0], rtol=2e-6, atol=2e-7)
    assert mine.state[rest].keys() == {"step", "exp_avg", "exp_avg_sq"}


@pytest.mark.parametrize("shape", [(5, 9), (9, 5), (4, 4)])
def test_muons_update_is_nearly_orthogonal(shape: tuple[int, int]) -> None:
    singular = torch.linalg.svdvals(orthogonalized(torch.randn(shape) * 1e-3, torch.float32))
    assert 0.6 < singular.min() <= singular.max() < 1.3


def test_muon_takes_matrices_but_no_embedding_and_no_head() -> None:
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=2, vocab_size=20)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    tables = table_weights(model)
    assert tables == ["model.embed_tokens.weight", "lm_head.weight"]
    shapes = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
    groups = parameter_groups(shapes, of("muon", momentum=0.9), tables=tables)
    hidden = {name for group in groups if group.get("is_hidden") for name in group["params"]}
    assert hidden == {name for name in shapes if name.endswith("proj.weight")}
    assert not any("is_hidden" in group for group in parameter_groups(shapes, of("adamw"), tables=tables))


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", ["adamw", "adam", "adafactor", "lion", "muon", "sgd", "own_optimizers:Stepping"])
def test_a_step_that_is_skipped_leaves_no_trace(name: str, compiled: bool) -> None:
    """The first one, two in a row, and the last: weights, state and counts are those of a run without them."""
    keys: dict[str, Any] = {"factory": name, "name": "adamw"} if ":" in name else {"name": name, "momentum": 0.9}

    def zeros(_: str, twin: Tensor, __: dict[str, Any]) -> Tensor:
        return torch.zeros(twin.shape, dtype=twin.dtype)

    def trained(steps: str) -> tuple[list[Tensor], list[dict[str, Any]]]:
        groups, parameters = shared(), dict[str, nn.Parameter]()
        for group in groups:
            (parameter,), group["params"] = group["params"], [f"{len(parameters)}"]
            parameters[f"{len(parameters)}"] = parameter
        optimizer = zero_optimizer(make_optimizer(of(**keys)), groups, parameters, zeros, compiled=compiled)
        for step in steps:
            for parameter in in_groups(optimizer):
                parameter.grad = torch.arange(1.0 * parameter.numel()).view_as(parameter) - int(step)
                if step == "0":
                    parameter.grad.flatten()[:2] = torch.tensor([math.inf, math.nan])
            bring_numbers(optimizer, LR)
            with nothing_changed_if(torch.tensor(step == "0"), optimizer):
                optimizer.step()
        if isinstance(optimizer, CountingOptimizer):
            optimizer.settle_counts()
        return [p.detach() for p in in_groups(optimizer)], [dict(optimizer.state[p]) for p in in_groups(optimizer)]

    torch.testing.assert_close(trained("01200340"), trained("1234"), rtol=1e-6, atol=1e-7)


FACTORIES = "own_optimizers"


def test_a_factory_gets_groups_and_a_rate() -> None:
    config = Optim(lr=LR, factory=f"{FACTORIES}:lion")
    for compiled in (False, True):
        made, named = make_optimizer(config)(shared(), compiled), make_optimizer(of("lion", betas=[0.9, 0.99]))
        plain = named(shared(), compiled)
        torch.testing.assert_close(take_steps(made, lr=LR), take_steps(plain, lr=LR), rtol=0, atol=0)


BAD = {
    "nowhere:f": r"nowhere:f can't be imported: ModuleNotFoundError: .*\n.*config's folder",
    f"{FACTORIES}:nothing": r"can't be imported: AttributeError: .*no attribute 'nothing'",
    f"{FACTORIES}:broken": r"ValueError: no such thing\n  in .*own_optimizers\.py:\d+: raise ValueError",
    f"{FACTORIES}:a_model": r"expected .*a_model to return a torch\.optim\.Optimizer, found Linear",
    f"{FACTORIES}:FromOne": r"\['mean'\] of its state doesn't start at zero",
    f"{FACTORIES}:HostState": r"\['count'\] of its state aren't tensors, which a checkpoint can't hold",
    f"{FACTORIES}:GroupState": r"a step changes \['count'\] of its groups",
    f"{FACTORIES}:FixedRate": r"its step ignores `lr` of its groups",
    f"{FACTORIES}:NoDecay": r"`weight_decay` of its groups has no effect\. .*optim\.weight_decay=0",
    f"{FACTORIES}:NeedsClosure": r"a step of .* failed: TypeError: .*\n  in .*own_optimizers\.py:\d+: closure",
}


@pytest.mark.parametrize("name", BAD)
def test_a_factory_that_cannot_train_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"(?s)^optim\.factory: .*{BAD[name]}"):
        make_optimizer(Optim(factory=name))


def test_a_factory_without_decay_trains_where_none_is_asked_for() -> None:
    make_optimizer(Optim(factory=f"{FACTORIES}:NoDecay", weight_decay=0.0))


def test_a_factory_lies_beside_the_config_and_the_example_of_the_page_is_taken(tmp_path: Path) -> None:
    run = "model: {pretrained: folder}\ntrain: {steps: 1}\noptim: {factory: %s}\n"
    page = (Path(__file__).parents[2] / "docs/optimizers.md").read_text()
    (tmp_path / "mine.py").write_text(page.partition("```python\n")[2].partition("```")[0])
    (tmp_path / "run.yaml").write_text(run % "mine:SignSGD")
    config = load_config(tmp_path / "run.yaml")
    for compiled in (False, True):
        take_steps(make_optimizer(config.optim)(shared(), compiled), lr=LR)
    (tmp_path / "beside_the_config.py").write_text("import torch\n\ndef sgd(groups, lr)\n    pass\n")
    (tmp_path / "run.yaml").write_text(run % "beside_the_config:sgd")
    config = load_config(tmp_path / "run.yaml")
    with pytest.raises(ConfigError, match=r"(?s)SyntaxError: expected ':'.*beside_the_config\.py:3"):
        make_optimizer(config.optim)
    with pytest.raises(ConfigError, match=r"optim\.factory: "):
        load_config(tmp_path / "run.yaml", ["optim.factory=no_function"])


def test_a_package_that_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "bitsandbytes.functional", None)  # as where Python finds none
    with pytest.raises(ConfigError, match=r"optim\.name=adamw8bit: .*bitsandbytes.*\n  pip install bitsandbytes, or"):
        make_optimizer(Optim(name="adamw8bit"))


def test_eight_bits_have_one_layout_on_any_number_of_devices() -> None:
    """By the shape of the whole tensor: whole blocks in each row of dimension 0, and not too small."""
    shapes = [(8, 512), (3, 4, 512), (8, 500), (4, 512), (4096,)]
    weights = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    optimizer = make_optimizer(of("adamw8bit"))([{"params": list(weights), "weight_decay": 0.1}], False)
    plain = [nn.Parameter(weight.detach().clone()) for weight in weights]
    torchs = torch.optim.AdamW(plain, lr=LR, betas=(0.8, 0.9), eps=0.1, weight_decay=0.1)
    for _ in range(10):
        for weight, other in zip(weights, plain, strict=True):
            weight.grad = other.grad = torch.randn(weight.shape)
        optimizer.step()
        torchs.step()
    states = [{key: (value.dtype, tuple(value.shape)) for key, value in optimizer.state[w].items()} for w in weights]
    codes: dict[str, Any] = {"step": (torch.float32, ()), "exp_avg": (torch.uint8, (8, 512))}
    codes |= {"exp_avg_sq": (torch.uint8, (8, 512)), "exp_avg_scale": (torch.float32, (8, 2))}
    assert states[0] == {**codes, "exp_avg_sq_scale": (torch.float32, (8, 2))}
    assert states[1]["exp_avg_scale"] == (torch.float32, (3, 8))
    assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in states[2:])
    for weight, other in zip(weights, plain, strict=True):
        torch.testing.assert_close(weight, other, rtol=0.02, atol=0.02)
    assert not torch.equal(weights[0], plain[0])
    before = [weight.detach().clone() for weight in weights]
    for weight in weights:
        weight.grad = torch.full_like(weight, math.nan)
    with nothing_changed_if(torch.tensor(True), optimizer):
        optimizer.step()
    assert all(torch.equal(weight, old) for weight, old in zip(weights, before, strict=True))
