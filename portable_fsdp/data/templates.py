"""A tokenizer with another end (`data.end`), or another chat template: a file, a folder, or one of five."""

import json
from pathlib import Path
from typing import Any, cast

import xxhash

from portable_fsdp.data.chat import ChatTemplate
from portable_fsdp.data.tokenize import ByteTokenizer, Tokenizer
from portable_fsdp.runtime.errors import DataError
from portable_fsdp.runtime.hub import import_transformers

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


DIGESTS = {
    "cohere": "0aae59c962b4280e",
    "aya": "0aae59c962b4280e",
    "command_a": "e032444893ef71ce",
    "deepseek_v2": "ab81dc0acc869e34",
    "deepseek_v3": "681bcb20232c9f4f",
    "exaone": "b1926e1233109d5f",
    "exaone4": "e02f2333ded39317",
    "falcon_h1": "28331fed853d467f",
    "gemma3": "9c41a2f6f7fedec6",
    "gemma3n": "9c41a2f6f7fedec6",
    "gemma4": "dc6952bf4ac0d8e0",
    "gemma4_unified": "dc6952bf4ac0d8e0",
    "jamba": "469132dfe5bc121f",
    "llama4": "711617dc3185d110",
    "llava": "77e4b8c76c5ab241",
    "mistral_v1": "297d3ba7f08b3108",
    "mistral_v2v3": "9c3fdd7763ff7848",
    "mistral_v3_tekken": "cc2b24b7b0d0d981",
    "pixtral": "cc2b24b7b0d0d981",
    "mistral_v7_tekken": "0b7a2c015cee64e3",
    "phi_35": "478577bb37fe7a1a",
    "phi_4": "349e423e6bbbc127",
    "qwen2_vl": "fce215f459ebd6a0",
    "qwen3": "a499952419703eab",
    "qwen3_5": "a499952419703eab",
    "qwen_25": "c45229672aee4419",
}
"""axolotl's name of a template -> `digest_of` it (utils/chat_templates/ at 067b021): models have their own copies."""

_USER, _ANSWER = {"role": "user", "content": "What is it?"}, {"role": "assistant", "content": "A statement."}
_PROBES = (
    [_USER, _ANSWER],
    [_USER, _ANSWER, {"role": "user", "content": " And\nthat? "}, {"role": "assistant", "content": "\nIt ends. "}],
    [{"role": "system", "content": "Be short."}, _USER, _ANSWER],
)


def digest_of(template: str) -> str:
    """Return a hash of how a template renders a few chats: 16 hexadecimal digits, equal for equal renderings."""
    texts: list[str] = []
    for chat in _PROBES:
        try:
            tokens = {f"{name}_token": f"<{name}>" for name in ("bos", "eos", "pad", "unk")}
            render = import_transformers().utils.chat_template_utils.render_jinja_template
            texts += render([chat], chat_template=template, add_generation_prompt=False, **tokens)[0]
        except Exception as error:  # a template may raise anything
            texts.append(type(error).__name__)
    return xxhash.xxh3_64_hexdigest("\0".join(texts).encode())


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
    if chat_template in DIGESTS:  # the tokenizer's own, if it is this one
        if inner.chat_template is None or digest_of(inner.get_chat_template()) != DIGESTS[chat_template]:
            raise DataError(
                f"data.chat_template: the tokenizer's own template renders other texts than {chat_template}, and this "
                "package has no copy.\n  Name the template's file, or null for the tokenizer's own."
            )
    elif chat_template is not None:
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
