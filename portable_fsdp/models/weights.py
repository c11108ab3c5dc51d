"""Sources of weights: drawn from (seed, FQN) (here) or read from files (`pretrained.py`); and what a built model is.

Both sources are a `fill(fqn, slices)`: a backend requests the pieces that its devices need, one at a time.
"""

# Parameters and buffers are replaced in a module's own tables: torch has no public way for all of them.
# pyright: reportPrivateUsage=false

import hashlib
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from portable_fsdp.runtime.errors import ConfigError

if TYPE_CHECKING:  # a run without model.pretrained doesn't load it
    from portable_fsdp.models.multimodal import Published
    from portable_fsdp.models.pretrained import PretrainedWeights

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TensorSlices = tuple[slice, ...]
"""One slice per dimension, with start and stop set."""

WeightFill = Callable[[str, TensorSlices], Tensor]
"""`fill(fqn, slices)`: a piece of a weight, on the host, in the dtype of the model's parameter."""

FLOATS = ("F32", "BF16", "F16", "F64")
"""Dtypes of unquantised weights, by safetensors' names."""


class TensorFile(Protocol):
    """Tensors in a file, or in the files of a folder, by their names there."""

    where: Path
    shapes: dict[str, tuple[int, ...]]
    scheme: str | None = None
    """How `quantised` tensors are stored, as precision.frozen names it; None: as they are."""
    quantised: frozenset[str] = frozenset()

    def stored(self, key: str) -> Any:
        """Return a quantised tensor's codes and scales (`models.quantised.StoredWeight`); None: it isn't quantised."""
        return None

    def file_of(self, key: str) -> str:
        """Return the name of the file that holds a tensor, for messages."""
        ...

    def dtype_of(self, key: str) -> str:
        """Return the dtype by safetensors' name: F32, BF16, F8_E4M3, I64, ..."""
        ...

    def read(self, key: str, slices: TensorSlices) -> Tensor:
        """Return the requested slices of a tensor, all of it for `()`, on the host."""
        ...

    def sample(self, key: str) -> bytes:
        """Return some KiB from the middle of a tensor, as stored in the file: cheap for any tensor size."""
        ...


def plain_name(fqn: str) -> str:
    """The FQN of a base weight in the model without adapters."""
    return fqn.replace(".base_layer.", ".")


def names_of_weights(model: nn.Module) -> dict[Tensor, list[str]]:
    """Weight -> all its FQNs: a tied one has several."""
    names: dict[Tensor, list[str]] = {}
    for fqn, weight in model.named_parameters(remove_duplicate=False):
        names.setdefault(weight, []).append(fqn)
    return names


def fill_buffers(model: nn.Module, twin: nn.Module) -> set[str]:
    """Create the real buffers of `model`; computed ones (rotary frequencies) get their values from `_init_weights`.

    Returns the FQNs of those that `_init_weights` leaves unset: they keep the number that filled them before.
    """
    unset, after = set[str](), dict[str, Tensor]()
    for recurse in (False, True):  # Falcon-H1's model sets the buffers of its layers
        before, after = _computed_buffers(twin, 0, recurse), _computed_buffers(twin, 1, recurse)
        if not (unset := {fqn for fqn, value in after.items() if not torch.equal(value, before[fqn])}):
            break
    for fqn, value in after.items():
        owner, _, leaf = fqn.rpartition(".")
        model.get_submodule(owner)._buffers[leaf] = value
    return unset


def _computed_buffers(twin: nn.Module, filling: int, recurse: bool) -> dict[str, Tensor]:
    """FQN -> buffer, filled with one number and then set by `_init_weights` of the modules that have it."""
    for fqn, buffer in list(twin.named_buffers()):
        owner, _, leaf = fqn.rpartition(".")
        module = twin.get_submodule(owner)
        module._buffers[leaf] = torch.full(buffer.shape, filling, dtype=buffer.dtype, device="cpu")
    for name, module in reversed([*twin.named_modules()]):
        if any(True for _ in module.buffers(recurse=recurse)):
            with torch.no_grad():
                _init_weights(twin, name)
    return dict(twin.named_buffers())


def _init_weights(twin: nn.Module, name: str) -> None:
    """Initialise a module by the innermost model around it, as transformers does: Gemma 3n's parts differ in theirs."""
    parts = name.split(".") if name else []
    around = [twin.get_submodule(".".join(parts[:length])) for length in range(len(parts), -1, -1)]
    cast(Any, next(module for module in around if hasattr(module, "_init_weights")))._init_weights(around[0])


def seeded(seed: int, fqn: str) -> AbstractContextManager[Any]:
    """Context in which torch's draws on the host depend on (seed, FQN) alone, and leave the process's generator."""
    digest = hashlib.sha256(f"{seed}/{fqn}".encode()).digest()
    return _Drawing(torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True)))


_DEFAULT_GENERATOR = Lock()
_WITH_GENERATOR = {"default": "generator", "low": "low_generator"}  # overloads of rand, randn, randint and randperm


class _Drawing(TorchDispatchMode):
    """Draws from `generator` in place of the process's own."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags or kwargs.get("generator") is not None:
            return func(*args, **kwargs)
        packet = func._overloadpacket
        name = _WITH_GENERATOR.get(func._overloadname)
        func = getattr(packet, name) if name and name in packet.overloads() else func
        if any(argument.name == "generator" for argument in func._schema.arguments):
            return func(*args, **kwargs, generator=self._generator)
        with _DEFAULT_GENERATOR, torch.random.fork_rng(devices=[]):  # rand_like, dropout: these take no generator
            torch.default_generator.set_state(self._generator.get_state())
            result = func(*args, **kwargs)
            self._generator.set_state(torch.default_generator.get_state())
        return result


class RandomWeights:
    """The `fill` of a new model: each weight depends on (seed, FQN) alone, not on the mesh or the order of requests.

    Draws one whole weight at a time, and keeps it until the next: a host needs memory for the largest. A weight is
    drawn in float32 and then rounded to `dtype`, so that a seed gives the same weights in all dtypes.
    """

    def __init__(self, twin: nn.Module, seed: int, dtype: torch.dtype) -> None:
        self._twin, self._seed, self._dtype = twin, seed, dtype
        self._last = "", torch.empty(0)

    def __call__(self, fqn: str, slices: TensorSlices) -> Tensor:
        if self._last[0] != fqn:
            self._last = fqn, self._draw(fqn).to(self._dtype)
        return self._last[1][slices].clone()

    def _draw(self, fqn: str) -> Tensor:
        owner, _, leaf = fqn.rpartition(".")
        module = self._twin.get_submodule(owner)
        placeholder = cast(nn.Parameter, module._parameters[leaf])
        unset = torch.full(placeholder.shape, torch.nan, dtype=placeholder.dtype, device="cpu")
        weight = nn.Parameter(unset, requires_grad=False)
        module._parameters[leaf] = weight
        try:
            # transformers' own initialisation of the module, and of those around it up to the root.
            parts = owner.split(".") if owner else []
            with seeded(self._seed, fqn), torch.no_grad():
                for length in range(len(parts), -1, -1):
                    _init_weights(self._twin, ".".join(parts[:length]))
        except NotImplementedError as error:  # torch's, for a copy from a weight that is on meta here
            raise _no_value(fqn, module, "has an initial value computed from other weights") from error
        finally:
            module._parameters[leaf] = placeholder
        if weight.isnan().any():
            raise _no_value(fqn, module, "has no initial value of its own")
        return weight.data


def _no_value(fqn: str, module: nn.Module, problem: str) -> ConfigError:
    return ConfigError(
        "model.architecture: transformers can't initialise all weights one by one: "
        f"{fqn} ({type(module).__name__}) {problem}.\n"
        "  Start from a folder (model.pretrained), or use another model."
    )


@dataclass(frozen=True)
class ModelSize:
    """Sizes of a model, from which `models/flops.py` computes the FLOPs of a step."""

    parameters: int  # a tied weight once
    frozen_parameters: int  # without tables that are only looked up
    trained_parameters: int
    embedding_parameters: int = 0  # in those tables
    layers: int = 0
    hidden: int = 0  # attention heads * head_dim
    has_experts: bool = False  # not every token uses every weight


def size_of(model: Any) -> ModelSize:
    """Return the sizes of a transformers model. Raises ConfigError if its config has no layers of one width."""
    head = getattr(model.get_output_embeddings(), "weight", None)
    weights = [table.weight for table in model.modules() if isinstance(table, nn.Embedding)]
    tables = {id(weight): weight for weight in weights if weight is not head}
    config = model.config.get_text_config()
    if missing := [key for key in ("hidden_size", "num_hidden_layers") if not hasattr(config, key)]:
        raise ConfigError(
            f"model: {type(model).__name__}: only a stack of layers of one width is supported, and its config has no "
            f"{missing[0]}: its parts have their own configs.\n  Use another model."
        )
    frozen = [weight for weight in model.parameters() if not weight.requires_grad]
    return ModelSize(
        parameters=sum(parameter.numel() for parameter in model.parameters()),
        frozen_parameters=sum(weight.numel() for weight in frozen if id(weight) not in tables),
        trained_parameters=sum(weight.numel() for weight in model.parameters() if weight.requires_grad),
        embedding_parameters=sum(table.numel() for table in tables.values()),
        layers=config.num_hidden_layers,
        hidden=_attention_width(config),
        has_experts=any(getattr(config, key, None) for key in ("num_experts", "num_local_experts", "n_routed_experts")),
    )


def _attention_width(config: Any) -> int:
    """Return heads * head_dim; if layers differ (Gemma 4), their mean."""
    layers = getattr(config, "per_layer_config", None)
    each = [layers[index] for index in range(config.num_hidden_layers)] if layers else [config]
    heads = [getattr(layer, "num_attention_heads", 1) for layer in each]
    widths = [getattr(layer, "head_dim", None) or layer.hidden_size // n for layer, n in zip(each, heads, strict=True)]
    return sum(n * width for n, width in zip(heads, widths, strict=True)) // len(each)


@dataclass(frozen=True)
class Base:
    """Weights that come whole from `model.pretrained`, and that no step changes: the base of adapters, or what is
    quantised."""

    pretrained: str
    gguf_file: str | None
    file: TensorFile
    names: frozenset[str]  # FQNs in the model with adapters
    fill: WeightFill  # quantised weights dequantised
    weights: "PretrainedWeights"  # by `plain_name`
    scheme: str | None = None
    quantised: Mapping[str, tuple[int, ...]] = field(default_factory=lambda: {})  # FQN -> shape


@dataclass(frozen=True)
class BuiltModel:
    """A model on meta (its buffers are real, on the host), its weights, and its transformers config.

    The config is unchanged: with the dropout and the cache that training switches off. It is JSON, from which
    `config_from_json` restores an equal config. Empty: a model of `model.factory`, not of transformers.
    """

    model: nn.Module
    fill: WeightFill
    config: dict[str, Any]
    size: ModelSize
    weights: "PretrainedWeights | None" = None  # of `model.pretrained`, before adapters
    base: Base | None = None  # of `model.lora` or of quantised weights, if it comes from `model.pretrained`
    dropout: str = ""  # what `model.dropout` is here, for the log

    @property
    def published(self) -> "Published | None":
        """The multimodal model in `model.pretrained` whose text this is; None: the files have only this model."""
        return None if self.weights is None else self.weights.published

    @property
    def saved_config(self) -> dict[str, Any]:
        """The config for checkpoints and exports: that of `published`, else the model's own."""
        return self.config if self.published is None else self.published.config

    def published_name(self, fqn: str) -> str:
        """Return the name of a weight or module in `published`, else the FQN itself."""
        return fqn if self.published is None else self.published.name(fqn)
