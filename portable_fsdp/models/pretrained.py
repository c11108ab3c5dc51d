"""`model.pretrained`: open, check and read a local Hugging Face folder, a repository of the hub, or a GGUF file.

The files must hold the whole model and nothing else, except for tensors that `model.allow` names and those that
transformers itself leaves out.
"""

import copy
import logging
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash
from torch import Tensor, nn

from portable_fsdp.config import schema
from portable_fsdp.config.describe import matches
from portable_fsdp.models.architecture import last_line, log_unknown_keys, models_of, trains
from portable_fsdp.models.tensor_files import GgufFile, SafetensorsFolder
from portable_fsdp.models.weights import FLOATS, RandomWeights, TensorFile, TensorSlices, names_of_weights
from portable_fsdp.runtime.errors import ConfigError
from portable_fsdp.runtime.hub import CONFIG_FILES, MODEL_FILES, local_folder

if TYPE_CHECKING:
    from portable_fsdp.models.multimodal import Published

log = logging.getLogger("portable_fsdp")

_UNQUANTISED = "Use the model's unquantised folder, or dequantise it with transformers and save_pretrained it."
_ROWS = 4096  # rows of a table read at a time


def fingerprint(file: TensorFile) -> str:
    """Return a hash that identifies the tensors of a folder, independent of its location and its split into files.

    128-bit XXH3 of each tensor's name, dtype and shape, and of some KiB from its middle: one read per tensor. It
    detects another model, further training, another dtype or quantisation; not a change of a few elements elsewhere,
    nor one of config.json.
    """
    digest = xxhash.xxh3_128()
    for key in sorted(file.shapes):
        digest.update(f"{key} {file.dtype_of(key)} {list(file.shapes[key])}\n".encode())
        digest.update(file.sample(key))
    return digest.hexdigest()


def open_pretrained(model: schema.Model, task: str = "causal_lm") -> tuple[Any, TensorFile]:
    """Open `model.pretrained`, after a download if it is on the hub: the transformers config, and the tensors' file.

    Raises ConfigError if that fails.
    """
    name = cast(str, model.pretrained)
    if model.gguf_file is not None:
        path = local_folder("model.pretrained", name, (model.gguf_file,)) / model.gguf_file
        if not path.is_file():
            raise ConfigError(f"model.gguf_file: no such file in {path.parent}: {path.name}.")
        gguf = GgufFile(path)
        return gguf.config, gguf
    folder = local_folder("model.pretrained", name, MODEL_FILES)
    config, file = _config(folder, task), SafetensorsFolder(folder)
    if getattr(config, "quantization_config", None) is None:
        return config, file
    from portable_fsdp.models.quantised import BitsandbytesFolder

    del config.quantization_config
    return config, BitsandbytesFolder(file)


def open_config(model: schema.Model) -> Any:
    """Return the transformers config of a causal `model.pretrained`; downloads no weights, unless it is a GGUF file."""
    if model.gguf_file is not None:
        return open_pretrained(model)[0]
    folder = local_folder("model.pretrained", cast(str, model.pretrained), CONFIG_FILES)
    config = _config(folder, "causal_lm", logs=False)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    return config


def _config(folder: Path, task: str, *, logs: bool = True) -> Any:
    from transformers import AutoConfig

    path = folder / "config.json"
    if not path.is_file():
        raise ConfigError(
            f"model.pretrained: no config.json in {folder}\n  Name the Hugging Face folder of a model. For a GGUF file "
            "set model.gguf_file; for an adapter (peft) name its base."
        )
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # transformers validates with exceptions of many classes, all about this file
        raise ConfigError(f"model.pretrained: {path}: {last_line(error)}") from error
    if not trains(config, task):
        raise ConfigError(
            f"model.pretrained: {path}: expected {models_of(task)} of transformers, found model_type "
            f"{config.model_type!r}."
        )
    quantised = getattr(config, "quantization_config", None)
    if quantised is not None:
        method = cast(dict[str, Any], quantised).get("quant_method", "") if isinstance(quantised, dict) else quantised
        if method != "bitsandbytes":
            raise ConfigError(
                f"model.pretrained: {path}: expected weights in float32, bfloat16 or float16, or quantised by "
                f"bitsandbytes, found quantised ones (quantization_config: {str(method)[:80]}).\n  {_UNQUANTISED}"
            )
    if logs:
        values, _ = config.get_config_dict(folder, local_files_only=True)
        values.pop("quantization_config", None)
        log_unknown_keys("model.pretrained", config, values)
    return config


class PretrainedWeights:
    """The `fill` from files: reads only the requested slices, except for tensors that transformers joins from several.

    Casts to the dtype of the model's parameter or buffer. `model` is on meta; `twin` keeps its meta parameters. `drawn`
    draws tensors that `allow` (name patterns) lets be missing. `rows_before`: rows of the vocabulary before embedding
    and head grew; their new rows are the mean of the old ones. `published`: the files are those of a multimodal model.
    """

    def __init__(
        self,
        file: TensorFile,
        model: nn.Module,
        twin: nn.Module,
        drawn: RandomWeights,
        *,
        allow: Sequence[str],
        rows_before: int | None,
        published: "Published | None" = None,
    ) -> None:
        self._file, self._drawn, self.published = file, drawn, published
        self._tensors = ConvertedTensors(file, twin, published)
        stored = stored_tensors(model)
        self._dtypes = {name: tensor.dtype for name, tensor in stored.items()}
        tied = names_of_weights(model)  # a folder may hold any name of a tied weight
        aliases = {first: tied.get(tensor, [first]) for first, tensor in stored.items()}
        stored_names = {first: [n for n in names if n in self._tensors.shapes] for first, names in aliases.items()}
        missing = [names for first, names in aliases.items() if not stored_names[first]]
        _refuse_missing(file, model, missing, len(aliases), allow)
        _refuse_unexpected(file, published.model if published else model, self._tensors.unexpected, allow)
        self._where = {first: names[0] for first, names in stored_names.items() if names}
        self._rows = {} if rows_before is None else dict.fromkeys(vocabulary_tables(model), rows_before)
        self._means: dict[str, Tensor] = {}
        for first, names in stored_names.items():
            for name in names:
                self._check(first, name, stored[first])
            self._check_ties(first, names)

    def __call__(self, fqn: str, slices: TensorSlices) -> Tensor:
        if fqn not in self._where:
            return self._drawn(fqn, slices)
        if fqn in self._rows:
            return self._grown(fqn, slices)
        return self._tensors.read(self._where[fqn], slices).to(self._dtypes[fqn])

    def stored(self, fqn: str) -> Any:
        """Return `TensorFile.stored` of a weight; None also if it is joined from several tensors."""
        name = self._where.get(fqn)
        return None if name is None or name in self._tensors.joined else self._file.stored(self._tensors.keys[name][0])

    def is_quantised(self, fqn: str) -> bool:
        """Whether any tensor of a weight is quantised in the file."""
        keys = self._tensors.keys[self._where[fqn]] if fqn in self._where else ()
        return not self._file.quantised.isdisjoint(keys)

    def holds(self, fqn: str) -> bool:
        return fqn in self._where

    @property
    def drawn(self) -> list[str]:
        """FQNs of tensors that are missing in the files, and are drawn instead."""
        return [fqn for fqn in self._dtypes if fqn not in self._where]

    def _grown(self, fqn: str, slices: TensorSlices) -> Tensor:
        """Return the old rows, and their mean for each new row."""
        before, name, dtype = self._rows[fqn], self._where[fqn], self._dtypes[fqn]
        rows = slices[0]
        old = slice(min(rows.start, before), min(rows.stop, before))
        new = max(rows.stop, before) - max(rows.start, before)
        kept = self._tensors.read(name, (old, *slices[1:])).to(dtype)
        if new == 0:
            return kept
        mean = self._mean(fqn)[slices[1:]].to(dtype)
        return torch.cat([kept, mean.expand(new, *mean.shape)])

    def _mean(self, fqn: str) -> Tensor:
        """Return the mean of the old rows, in float32. All processes read all rows in one order: equal results."""
        if fqn not in self._means:
            name = self._where[fqn]
            shape = self._tensors.shapes[name]
            total = torch.zeros(shape[1:], dtype=torch.float64)
            for part in _parts(shape):
                total += self._tensors.read(name, part).double().sum(0)
            self._means[fqn] = (total / shape[0]).float()
        return self._means[fqn]

    def _check(self, fqn: str, name: str, tensor: Tensor) -> None:
        keys, shape = self._tensors.keys[name], self._tensors.shapes[name]
        where = f"model.pretrained: {self._file.where}: {name}: expected"
        expected = (self._rows[fqn], *tensor.shape[1:]) if fqn in self._rows else tuple(tensor.shape)
        if shape != expected:
            config = "config.json" if self._file.where.is_dir() else "its metadata"
            actual = f"{list(shape)} in {self._file.file_of(keys[0])}"
            raise ConfigError(f"{where} {list(expected)} ({config}), found {actual}.")
        other = next((key for key in keys if self._file.dtype_of(key) not in FLOATS), None)
        if tensor.is_floating_point() and other is not None:
            raise ConfigError(
                f"{where} {', '.join(FLOATS)}, found {self._file.dtype_of(other)} in {self._file.file_of(other)}: a "
                f"quantised model.\n  {_UNQUANTISED}"
            )

    def _check_ties(self, first: str, names: Sequence[str]) -> None:
        """Raise ConfigError if a tied weight that the folder holds under several names differs between them."""
        if (other := self._tensors.first_unequal(names)) is not None:
            raise ConfigError(
                f"model.pretrained: {self._file.where}: the tied weights {names[0]} and {other} differ.\n"
                "  If it was trained untied, set tie_word_embeddings=false in its config.json."
            )


def _parts(shape: tuple[int, ...]) -> Iterator[TensorSlices]:
    """Yield slices of _ROWS rows each that cover the tensor."""
    rest = [slice(0, size) for size in shape[1:]]
    for start in range(0, shape[0], _ROWS):
        yield (slice(start, min(start + _ROWS, shape[0])), *rest)


def _refuse_missing(
    file: TensorFile, model: Any, missing: Sequence[Sequence[str]], count: int, allow: Sequence[str]
) -> None:
    """Raise ConfigError for missing tensors that `allow` doesn't match. `missing`: the FQNs of each."""
    patterns = model._keys_to_ignore_on_load_missing or ()
    allowed = [names for names in missing if any(_is_allowed(name, allow, patterns) for name in names)]
    refused = sorted(names[0] for names in missing if names not in allowed)
    if refused:
        raise ConfigError(
            f"model.pretrained: {file.where}: of the model's {count} tensors these are missing: "
            f"{refused[0]}" + (f", and {len(refused) - 1} more." if len(refused) > 1 else ".") + "\n"
            "  Name in model.allow those that may be missing; they are then drawn from run.seed."
        )
    if allowed:
        names = _some(names[0] for names in allowed)
        log.warning("model.pretrained: %s: missing, and drawn from run.seed: %s", file.where, names)


def _refuse_unexpected(file: TensorFile, model: Any, unexpected: Sequence[str], allow: Sequence[str]) -> None:
    patterns = {*(model._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq$"}
    computed = {name for name, _ in model.named_buffers()} - set(model.state_dict())
    computed |= {name.removeprefix(f"{model.base_model_prefix}.") for name in computed}
    left_out = [key for key in unexpected if key in computed or _is_allowed(key, allow, patterns)]
    refused = [key for key in unexpected if key not in left_out]
    if refused:
        raise ConfigError(
            f"model.pretrained: {file.where}: {len(refused)} tensor(s) don't belong to {type(model).__name__}: "
            f"{_some(refused)}.\n"
            f"  They would be lost. To ignore them, name them, as in model.allow='[{refused[0]}]'."
        )
    if left_out:
        where = f"model.pretrained: {file.where}"
        log.info("%s: left out by transformers' rules or model.allow: %s", where, _some(left_out))


def _is_allowed(name: str, allow: Iterable[str], patterns: Iterable[str]) -> bool:
    return any(matches(pattern, name) for pattern in allow) or any(re.search(pattern, name) for pattern in patterns)


def _some(names: Iterable[str]) -> str:
    first, *others = names
    return ", ".join([first, *others[:2]]) + (f", and {len(others) - 2} more" if len(others) > 2 else "")


def stored_tensors(model: nn.Module) -> dict[str, Tensor]:
    """FQN -> tensor that a folder stores: parameters, tied ones once, and persistent buffers."""
    persistent = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in persistent}
    return {**dict(model.named_parameters()), **buffers}


def vocabulary_tables(model: Any) -> list[str]:
    """First FQNs of the embedding and the head, with its bias: tensors with one row per id."""
    modules = filter(None, (model.get_input_embeddings(), model.get_output_embeddings()))
    tables = {id(parameter) for module in modules for parameter in module.parameters()}
    return [fqn for fqn, parameter in model.named_parameters() if id(parameter) in tables]


# --------------------------------------------------------------------------------------------- names of older releases


@dataclass
class _Group:
    """Tensors of the model that one of transformers' converters makes from several keys."""

    converter: Any
    first: str  # first of the model's names, by which transformers names the group
    sources: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])  # (the converter's pattern, key)


class ConvertedTensors:
    """A folder's tensors under the model's own names: transformers renames, joins and splits what older releases saved.

    Experts are separate tensors on the hub and one tensor in the model; GPT-2's own folder lacks a prefix. This follows
    transformers' private tables (`conversion_mapping`) as `from_pretrained` does (tested with 5.23), but lazily: it
    reads a renamed tensor by the slice, makes a joined one on demand, and keeps that until the next.

    `shapes`: by the model's names; `keys`: the file's keys of each name; `unexpected`: the other keys; `joined`:
    names of tensors made from several keys, and how. Files of a `published` multimodal model have tensors of other
    parts too: they aren't listed."""

    def __init__(self, file: TensorFile, model: Any, published: "Published | None" = None) -> None:
        self._file, self._model = file, published.model if published else model
        self.joined: dict[str, _Group] = {}
        self._last: tuple[_Group, dict[str, Tensor]] | None = None
        self.keys: dict[str, list[str]] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.unexpected: list[str] = []
        self._sort(file.shapes)
        self._theirs = {name: published.name(name) if published else name for name in model.state_dict()}
        names = self._theirs.items()
        self.keys = {ours: self.keys[theirs] for ours, theirs in names if theirs in self.keys}
        self.shapes = {ours: self.shapes[theirs] for ours, theirs in names if theirs in self.shapes}
        self.joined = {ours: self.joined[theirs] for ours, theirs in names if theirs in self.joined}

    def read(self, name: str, slices: TensorSlices) -> Tensor:
        group = self.joined.get(name)
        if group is None:
            return self._file.read(self.keys[name][0], slices)
        if self._last is None or self._last[0] is not group:
            self._last = None  # dropped first, so that two are never in memory
            self._last = (group, self._make(group, lambda key: self._file.read(key, ())))
        return self._last[1][self._theirs[name]][slices].clone()

    def first_unequal(self, names: Sequence[str]) -> str | None:
        """Return the first name whose tensor isn't that of the first name; None: all are equal."""
        for other in names[1:]:
            for part in _parts(self.shapes[names[0]]):
                if not torch.equal(self.read(names[0], part), self.read(other, part)):
                    return other
        return None

    def _sort(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key, rename_source_key

        tables = get_model_conversion_mapping(self._model)
        renamings: Any = [table for table in tables if isinstance(table, WeightRenaming)]
        converters: Any = [table for table in tables if isinstance(table, WeightConverter)]
        by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
        base, named = self._model.base_model_prefix, dict(self._model.state_dict())
        groups: dict[str, _Group] = {}
        for key in sorted(shapes, key=dot_natural_key):
            name, pattern = rename_source_key(key, renamings, converters, base, named)
            if name not in named and key in named:
                name, pattern = rename_source_key(key, [], [], base, named)
            if name not in named:
                self.unexpected.append(key)
            elif pattern is None:
                self._add(name, [key], shapes[key])
            else:
                groups.setdefault(name, _Group(by_pattern[pattern], name)).sources.append((pattern, key))
        for group in groups.values():
            tensors = self._make(group, lambda key: torch.empty(shapes[key], device="meta"))
            for name, tensor in tensors.items():
                self._add(name, [key for _, key in group.sources], tuple(tensor.shape))
                self.joined[name] = group

    def _add(self, name: str, keys: list[str], shape: tuple[int, ...]) -> None:
        if name in self.keys:
            raise ConfigError(
                f"model.pretrained: {self._file.where}: expected one tensor for {name}, found two: "
                f"{self.keys[name][0]} and {keys[0]}.\n  Remove one of them from the folder."
            )
        self.keys[name], self.shapes[name] = keys, shape

    def _make(self, group: _Group, read: Any) -> dict[str, Tensor]:
        converter = copy.deepcopy(group.converter)  # a converter keeps its tensors
        for pattern, key in group.sources:
            converter.add_tensor(group.first, key, pattern, lambda key=key: read(key))
        try:
            tensors = converter.convert(group.first, model=self._model, config=self._model.config)
        except Exception as error:  # shapes that don't fit each other, or a missing expert
            raise ConfigError(
                f"model.pretrained: {self._file.where}: transformers can't make {group.first} from "
                f"{', '.join(key for _, key in group.sources[:3])}, ...: {type(error).__name__}: {error}\n"
                "  Compare config.json with the weights."
            ) from error
        return {name: value[0] if isinstance(value, list) else value for name, value in tensors.items()}
