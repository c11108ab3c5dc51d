"""Families of models that can't be trained are refused by name, each with the reason that docs/features.md gives."""

import re
from pathlib import Path
from typing import Any

import pytest
from small_models import SEQ_LEN, VOCABULARY, materialise

from portable_fsdp.config.schema import Model
from portable_fsdp.models.build import build_model
from portable_fsdp.runtime.errors import ConfigError

PAGE = (Path(__file__).parents[2] / "docs/features.md").read_text()
SAID = {
    model_type: reason
    for cells, reason in re.findall(r"^\| (`[\w`, -]+`) \| refused: `(.+?)` \|", PAGE, re.MULTILINE)
    for model_type in re.findall(r"`([\w-]+)`", cells)
}
_SIZES: dict[str, Any] = {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
REFUSED: dict[str, dict[str, Any]] = {
    "bert": _SIZES | {"intermediate_size": 80},
    "t5": {},
    "jetmoe": {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_key_value_heads": 2}
    | {"kv_channels": 8, "intermediate_size": 40, "num_local_experts": 4, "num_experts_per_tok": 2},
    "longcat_flash": {"vocab_size": VOCABULARY, "hidden_size": 48, "num_attention_heads": 4}
    | {"n_routed_experts": 4, "num_layers": 1, "ffn_hidden_size": 40, "expert_ffn_hidden_size": 20},
    "openai-gpt": {"vocab_size": VOCABULARY, "n_embd": 48, "n_layer": 2, "n_head": 4},
    "rwkv": {"vocab_size": VOCABULARY, "hidden_size": 48, "num_hidden_layers": 2, "context_length": 64},
    "apertus": _SIZES | {"num_key_value_heads": 2, "intermediate_size": 80},
    "falcon_h1": _SIZES | {"num_key_value_heads": 2, "intermediate_size": 80},
    "blt": {"vocab_size": VOCABULARY},
}


def test_the_page_lists_them() -> None:
    assert SAID.keys() == REFUSED.keys()


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_family_that_cannot_be_trained_is_refused(model_type: str) -> None:
    section = Model(architecture={"model_type": model_type, **REFUSED[model_type]})
    with pytest.raises(ConfigError) as error:
        materialise(build_model(section, seed=0, seq_len=SEQ_LEN, vocabulary=VOCABULARY))
    assert SAID[model_type] in str(error.value)
