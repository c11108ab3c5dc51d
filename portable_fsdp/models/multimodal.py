"""The text model inside a multimodal one: newer families (Gemma 3, Qwen 3.5, Mistral 3) are published only so.

The text alone trains, in transformers' class of the config's text part. Towers are neither built with it nor read; an
export copies them from `model.pretrained`, and gives the text the names of the published files (formats/published.py).
"""

import copy
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import nn

from portable_fsdp.models.architecture import config_to_json, last_line
from portable_fsdp.models.pretrained import ConvertedTensors
from portable_fsdp.models.weights import TensorFile, names_of_weights
from portable_fsdp.runtime.errors import ConfigError


class Published(NamedTuple):
    """A multimodal model as published, on meta, and its transformers config as JSON.

    `parts`: prefix of FQNs in the text model -> prefix in this model.
    """

    model: Any
    config: dict[str, Any]
    parts: Mapping[str, str]

    def name(self, fqn: str) -> str:
        """Return the FQN in the published model, of a weight or module of the text model."""
        return next((there + fqn.removeprefix(here) for here, there in self.parts.items() if fqn.startswith(here)), fqn)

    def holding(self, text: Any) -> "Published":
        """Find the model `text` (on meta) inside, by class, names and shapes. Raises ConfigError if it isn't there."""
        parts = {"": _inside(self.model, text)}
        if not parts[""]:  # the head is outside
            head, top = (
                {part: f"{name}." for name, part in each.named_modules()}.get(each.get_output_embeddings(), "")
                for each in (text, self.model)
            )
            parts = {f"{text.base_model_prefix}.": _inside(self.model, text.base_model), head: top}
        whole, shapes = self._replace(parts=parts), _shapes(self.model)
        if not all(parts.values()) or any(shapes.get(whole.name(key)) != shape for key, shape in _shapes(text).items()):
            raise ConfigError(
                f"model: {type(self.model).__name__} doesn't hold a {type(text).__name__}, which its config names as "
                "its text.\n  Save its text with transformers (save_pretrained), and name that folder."
            )
        return whole

    @property
    def opens_as_text(self) -> bool:
        """Whether `AutoModelForCausalLM` opens the text alone (Qwen 3.5, Llama 4), not this model (Gemma 3)."""
        from transformers.models.auto import modeling_auto

        own: Any = type(self.model.config)
        opened: Any = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING.get(own, None)
        return opened is not None and opened.config_class is not own


def open_published(config: Any, text: Any, file: TensorFile | None = None) -> Published:
    """Build the published model of `config`, and let both it and `text`, its part, tie the head as that model does.

    As in transformers, different tensors in the `file` untie it (Mistral Small 3.1). Raises ConfigError if transformers
    can't build the model.
    """
    from transformers.models.auto import modeling_auto

    kind: Any = modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING[type(config)]
    try:
        with torch.device("meta"):
            model = kind._from_config(copy.deepcopy(config))
    except Exception as error:  # a tower that needs another package, sizes that don't fit
        raise ConfigError(f"model: {kind.__name__}: transformers can't build it: {last_line(error)}") from error
    head = model.get_output_embeddings()
    embedding = model.get_input_embeddings().weight
    is_tied = getattr(head, "weight", None) is embedding
    if is_tied and file is not None:
        tensors = ConvertedTensors(file, model)
        held = [name for name in names_of_weights(model)[embedding] if name in tensors.shapes]
        is_tied = not held or tensors.first_unequal(held) is None
    text.tie_word_embeddings = config.tie_word_embeddings = is_tied
    return Published(model, config_to_json(config), {})


def _inside(model: nn.Module, text: nn.Module) -> str:
    """Return the prefix of the part of `model` that is a `text` by class, names and shapes; empty: there isn't one."""
    shapes = _shapes(text)
    places = [name for name, part in model.named_modules() if type(part) is type(text) and _shapes(part) == shapes]
    return f"{places[0]}." if len(places) == 1 else ""


def _shapes(module: nn.Module) -> Mapping[str, tuple[int, ...]]:
    """FQN -> shape of what files hold, tied weights under each of their names."""
    return {name: tuple(tensor.shape) for name, tensor in module.state_dict().items()}
