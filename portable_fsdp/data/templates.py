"""A tokenizer with another end (`data.end`), or another chat template: a file, a folder, or one of five."""

import json
from pathlib import Path
from typing import Any, cast

from portable_fsdp.data.chat import ChatTemplate
from portable_fsdp.data.tokenize import ByteTokenizer, Tokenizer
from portable_fsdp.runtime.errors import DataError

_TURNS = "{% for message in messages %}"
_PROMPT = "{% endfor %}{% if add_generation_prompt %}"
_SYSTEM_REFUSED = (
    "{% if messages[0]['role'] == 'system' %}{{ raise_exception('this template has no system role') }}{% endif %}"
)

TEMPLATES = {
    "chatml": _TURNS
    + "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    + _PROMPT
    + "{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "llama3": "{{ bos_token }}"
    + _TURNS
    + "{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}"
    + "{{ message['content'] | trim + '<|eot_id|>' }}"
    + _PROMPT
    + "{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}",
    "gemma": "{{ bos_token }}"
    + _SYSTEM_REFUSED
    + _TURNS
    + "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    + "{{ '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}"
    + _PROMPT
    + "{{ '<start_of_turn>model\\n' }}{% endif %}",
    "phi3": "{{ bos_token }}"
    + _TURNS
    + "{{ '<|' + message['role'] + '|>\\n' + message['content'] + '<|end|>\\n' }}"
    + _PROMPT
    + "{{ '<|assistant|>\\n' }}{% endif %}",
    "alpaca": "{{ bos_token }}"
    + _TURNS
    + "{% if not loop.first %}{{ '\\n\\n' }}{% endif %}"
    + "{% if message['role'] == 'user' %}{{ '### Instruction:\\n' + message['content'] }}"
    + "{% elif message['role'] == 'assistant' %}{{ '### Response:\\n' + message['content'] + eos_token }}"
    + "{% else %}{{ message['content'] }}{% endif %}"
    + _PROMPT
    + "{{ '\\n\\n### Response:\\n' }}{% endif %}",
}
"""Name -> template, as the models of that name write turns."""


def adapt(tokenizer: Tokenizer, end: str | None, chat_template: str | None) -> None:
    """Give a tokenizer this end and this chat template, which an export has too. Raises DataError."""
    key = "data.end" if end else "data.chat_template"
    if isinstance(tokenizer, ByteTokenizer):
        if end or chat_template:
            raise DataError(f"{key}: bytes have no such tokens.\n  Set data.tokenizer to a folder or a hub id.")
        return
    inner = cast(Any, tokenizer)._tokenizer
    if end is not None:
        if end not in inner.get_vocab():
            raise DataError(f"{key}: the tokenizer has no token {end!r}.\n  Name one of its tokens.")
        inner.eos_token = end
        tokenizer.end_of_text = inner.eos_token_id
    if chat_template is not None:
        inner.chat_template = _template_text(chat_template)
        tokenizer.chat_template = ChatTemplate(inner)


def _template_text(name: str) -> str:
    if name in TEMPLATES:
        return TEMPLATES[name]
    path = Path(name)
    if path.is_dir():
        file, settings = path / "chat_template.jinja", path / "tokenizer_config.json"
        if not file.is_file() and settings.is_file():
            text = json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
            if isinstance(text, str):
                return text
        path = file
    if not path.is_file():
        raise DataError(
            f"data.chat_template: expected {', '.join(TEMPLATES)}, a file, or a folder with a chat template, found "
            f"{name}.\n  A path is relative to the folder that the run starts in."
        )
    return path.read_text(encoding="utf-8")
