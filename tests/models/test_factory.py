"""model.factory: the weights that a run gets are what the factory's own operations make, one at a time."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from torch import Tensor

from portable_fsdp.config.schema import Model, Precision
from portable_fsdp.models.build import build_model
from portable_fsdp.models.weights import BuiltModel, seeded
from portable_fsdp.runtime.errors import ConfigError

MODULE = """
import copy
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.position = nn.Parameter(torch.randn(7, 32) * 0.02)
        self.zero = nn.Parameter(torch.zeros(3))
        self.register_buffer("frequencies", 1 / (100 ** (torch.arange(4).float() / 4)))
        self.register_buffer("table", torch.tensor([1.0, 2.0, 4.0]), persistent=False)
        self.register_buffer("placed", torch.tensor([8.0], device=self.zero.device))
        self.norm = nn.BatchNorm1d(5)
        self.orthogonal = nn.Linear(32, 32)
        nn.init.orthogonal_(self.orthogonal.weight)
        self.encoder = nn.TransformerEncoderLayer(32, 4, 64)
        for name, parameter in self.named_parameters():
            if name.endswith("linear2.weight"):
                nn.init.normal_(parameter, std=0.5)
        self.head, self.tied = nn.Linear(32, 9), nn.Linear(32, 9)
        self.tied.weight = self.head.weight
        with torch.no_grad():
            self.head.weight[:4].fill_(3.0)
        self.copied = copy.deepcopy(self.orthogonal)

def pair(): return nn.ModuleDict({"first": nn.Linear(8, 8), "last": nn.Linear(8, 8)})
def three(): return nn.ModuleDict({"first": nn.Linear(8, 8), "more": nn.Linear(4, 4), "last": nn.Linear(8, 8)})
def model(): return Net()
def module_of_text(): return "no module"
def fails(): raise RuntimeError("the planned failure")
def reads(): return nn.Linear(2, int(torch.ones(1).item()))
def off_meta():
    module = nn.Linear(2, 2)
    module.weight = nn.Parameter(torch.ones(2, 2, device="cpu"))
    return module
def attribute():
    module = nn.Linear(2, 2)
    module.scale = torch.ones(2)
    return module
def frozen(): return nn.Linear(2, 2).requires_grad_(False)
def generator(): return nn.Parameter(torch.randn(2, generator=torch.Generator()))
def unfilled():
    module = nn.Linear(2, 2)
    module.gate = nn.Parameter(torch.empty(2, 2))
    return module
def scale(): return torch.tensor([1.0, 2.0, 4.0])

class OwnInit(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.init_weights()

    def init_weights(self):
        self.register_buffer("scale", scale())

def own_init(): return OwnInit()

class Buffers(nn.Module):
    def __init__(self, dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("table", torch.empty(4, dtype=dtype))

def floats(): return Buffers(torch.float32)
def integers(): return Buffers(torch.int64)

def half():
    module = unfilled()
    nn.init.normal_(module.gate[:1])
    return module
def mixtral():
    from transformers import MixtralConfig, MixtralForCausalLM
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    model = MixtralForCausalLM(MixtralConfig(**sizes, num_local_experts=8, initializer_range=0.5))
    nn.init.zeros_(model.lm_head.weight)
    return nn.ModuleDict({"own": model, "copied": copy.deepcopy(model)})
def pretrained():
    from transformers import LlamaForCausalLM
    return LlamaForCausalLM.from_pretrained("no_folder")
number = 3
"""


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., BuiltModel]:
    name = f"factory_{abs(hash(tmp_path)):x}"  # Python keeps modules by name
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)

    def build(function: str, module: str = name, seed: int = 0, master: str = "float32") -> BuiltModel:
        precision = Precision.model_validate({"master": master, "compute": master})
        return build_model(Model(factory=f"{module}:{function}"), precision, seed=seed, seq_len=1, vocabulary=0)

    return build


def values(built: BuiltModel) -> dict[str, Tensor]:
    parameters = dict(built.model.named_parameters())
    whole = {n: built.fill(n, tuple(slice(0, s) for s in p.shape)) for n, p in reversed(parameters.items())}
    return whole | dict(built.model.named_buffers())


def test_weights_are_what_the_constructor_makes(build: Callable[..., BuiltModel]) -> None:
    built = build("model")
    assert all(parameter.is_meta for parameter in built.model.parameters())
    drawn = values(built)
    torch.testing.assert_close(drawn["orthogonal.weight"] @ drawn["orthogonal.weight"].T, torch.eye(32))
    assert torch.equal(drawn["copied.weight"], drawn["orthogonal.weight"])
    assert drawn["encoder.linear2.weight"].std() == pytest.approx(0.5, rel=0.1)
    assert drawn["encoder.linear1.weight"].std() == pytest.approx(0.1, rel=0.1)  # torch's own
    assert drawn["position"].std() == pytest.approx(0.02, rel=0.2)
    assert (drawn["head.weight"][:4] == 3).all()
    assert drawn["head.weight"][4:].std() == pytest.approx(0.1, rel=0.2)
    assert "tied.weight" not in drawn
    assert torch.equal(drawn["zero"], torch.zeros(3))
    assert torch.equal(drawn["frequencies"], 1 / (100 ** (torch.arange(4).float() / 4)))
    assert torch.equal(drawn["table"], torch.tensor([1.0, 2.0, 4.0]))
    assert torch.equal(drawn["placed"], torch.tensor([8.0]))
    assert torch.equal(drawn["norm.running_var"], torch.ones(5))
    assert drawn["norm.num_batches_tracked"] == 0


def test_weights_depend_on_seed_and_name_alone(build: Callable[..., BuiltModel]) -> None:
    first, again, other = (values(build("model", seed=seed)) for seed in (0, 0, 1))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.bias"], other["head.bias"])
    assert not torch.equal(first["encoder.linear1.bias"], first["encoder.linear1.weight"][:, 0])
    # Weights that stand before and after are drawn alike, with or without what stands between.
    alone, among = values(build("pair")), values(build("three"))
    assert not torch.equal(alone["first.weight"], alone["last.weight"])
    assert torch.equal(alone["last.weight"], among["last.weight"])
    rounded = values(build("model", master="bfloat16"))
    assert torch.equal(rounded["position"], first["position"].bfloat16())
    part = build("model").fill("position", (slice(2, 4), slice(0, 32)))
    assert torch.equal(part, first["position"][2:4])


DRAWS: list[Callable[[], Tensor]] = [
    lambda: torch.nn.init.trunc_normal_(torch.empty(30)),
    lambda: torch.randn(40) + torch.randint(3, 10, (40,)),
    lambda: torch.rand_like(torch.zeros(8)) + torch.nn.functional.dropout(torch.ones(8)),  # these take no generator
]


@pytest.mark.parametrize("draw", DRAWS)
def test_initial_values_leave_the_generator_that_others_draw_from(draw: Callable[[], Tensor]) -> None:
    torch.manual_seed(int.from_bytes(sha256(b"3/a").digest()[:8], "little", signed=True))
    expected = draw()
    torch.manual_seed(5)
    with seeded(3, "a"):
        first = draw()
        with ThreadPoolExecutor() as threads:
            beside = threads.submit(torch.rand, 4).result()
    after = torch.rand(4)
    assert torch.equal(first, expected)
    torch.manual_seed(5)
    assert torch.equal(torch.cat([beside, after]), torch.cat([torch.rand(4), torch.rand(4)]))


def test_a_model_of_transformers_gets_its_own_initialisation(build: Callable[..., BuiltModel]) -> None:
    drawn = values(build("mixtral"))
    gates = [f"own.model.layers.0.mlp.{name}" for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj")]
    for name in (*gates, "own.model.embed_tokens.weight", "own.model.layers.0.self_attn.q_proj.weight"):
        assert drawn[name].std() == pytest.approx(0.5, rel=0.1)  # torch's own are 1 and 0.07
        assert torch.equal(drawn[name], drawn[name.replace("own.", "copied.")])
    assert (drawn["own.model.norm.weight"] == 1).all()
    assert (drawn["own.lm_head.weight"] == 0).all()  # written after the constructor
    frequencies = drawn["own.model.rotary_emb.inv_freq"]
    torch.testing.assert_close(frequencies, 1e6 ** -(torch.arange(len(frequencies)) / len(frequencies)))


def test_a_method_with_the_name_of_transformers_own_is_left_alone(build: Callable[..., BuiltModel]) -> None:
    scale = build("own_init").model.get_buffer("scale")
    assert torch.equal(scale, torch.tensor([1.0, 2.0, 4.0]))


@pytest.mark.parametrize("function", ["unfilled", "half"])
def test_a_weight_that_nothing_fills_is_refused(build: Callable[..., BuiltModel], function: str) -> None:
    built = build(function)
    with pytest.raises(ConfigError, match=rf":{function}: gate has no initial value: nothing fills"):
        values(built)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("module_of_text", "to return a torch.nn.Module, found str"),
        ("fails", "RuntimeError: the planned failure"),
        ("reads", "Tensor.item() cannot be called on meta tensors"),
        ("off_meta", "expected parameters on the meta device, found weight on cpu"),
        ("attribute", 'Write self.register_buffer("scale"'),
        ("frozen", "parameters, but one must train"),
        ("pretrained", "RuntimeError: You are using `from_pretrained` with a meta device"),
        ("generator", "leave `generator` out"),
        ("floats", ":floats: table has no initial value: nothing fills"),  # a buffer
        ("integers", ":integers: table has no initial value: nothing fills"),
        ("number", ":number = 3"),
        ("missing", "has no attribute 'missing'"),
    ],
)
def test_a_wrong_factory_is_refused_with_its_line(build: Callable[..., BuiltModel], function: str, words: str) -> None:
    with pytest.raises(ConfigError) as error:
        build(function)
    assert words in str(error.value)
    if function in ("fails", "reads"):
        assert f"def {function}()" in str(error.value)


def test_a_module_that_is_not_there(build: Callable[..., BuiltModel]) -> None:
    with pytest.raises(ConfigError, match=r"ModuleNotFoundError: .*\n  .* the config's folder and on PYTHONPATH"):
        build("model", module="not_there")
