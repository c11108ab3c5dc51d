"""transformers' config as JSON has it, for the manifest: JSON lacks infinities, which some models' configs hold."""

import json
from collections.abc import Mapping
from typing import Any, cast


def config_to_json(config: Any) -> dict[str, Any]:
    """All values of a transformers config, as transformers writes them to a config.json.

    `inf` is `{"__float__": "Infinity"}` (Mamba 2's `time_step_limit`), where plain JSON would have to leave a hole.
    """
    return cast(dict[str, Any], json.loads(config.to_json_string(use_diff=False)))


def config_from_json(values: Mapping[str, Any]) -> Any:
    """The config of what `config_to_json` gave, or of a dict that holds infinities themselves.

    Raises what transformers validates with: exceptions of many classes, all about these values.
    """
    from transformers import AutoConfig, PreTrainedConfig

    # Private: transformers itself asks it in from_pretrained only, which reads a file.
    decoded = PreTrainedConfig._decode_special_floats(dict(values))  # pyright: ignore[reportPrivateUsage]
    return AutoConfig.for_model(**decoded)
