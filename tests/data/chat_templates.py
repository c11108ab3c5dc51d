"""Chat templates for the tests of data, and the type of the fixture that makes tokenizers."""

from collections.abc import Callable

from portable_fsdp.data.tokenize import FolderTokenizer

SPECIAL = ["<end>", "<begin>", "<pad>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('no such role: ' + message['role']) }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As SmolLM2's and Qwen2's: nothing in it tells the assistant's text."""

GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same text, told by `{% generation %}`."""

DATED = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}"
    "{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}{% endif %}"
    "{{ '<|im_start|>system\nToday: ' + date_string + '<|im_end|>\n' }}"
) + CHATML
"""The day it is, as Llama 3.1's and 3.2's."""

_MARKED = (
    "{% if tools %}{{ '<|im_start|>system\n' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "{{ '<|im_end|>\n' }}{% endif %}{% for message in messages %}"
    "{% if message.role == 'tool' %}"
    "{% if loop.first or loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}"
    "{{ '\n<response>' + message.content + '</response>' }}"
    "{% if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\n' }}{% endif %}"
    "{% elif message.role == 'assistant' %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}"
    "BEGIN{{ message.content or '' }}{% for call in message.tool_calls or [] %}"
    "{{ '<call>' + (call.function | tojson) + '</call>' }}{% endfor %}{{ '<|im_end|>\n' }}END"
    "{% else %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}"
    "{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"
)

TOOLS = _MARKED.replace("BEGIN", "").replace("END", "")
"""As Qwen's: functions in the system's turn, calls in the assistant's, one turn for answers that follow each other; and
thinking that can be switched off."""

TOLD_TOOLS = _MARKED.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")
"""The same text, told by `{% generation %}`."""

MakeTokenizer = Callable[..., FolderTokenizer]
