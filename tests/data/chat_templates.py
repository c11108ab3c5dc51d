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
"""A template like SmolLM2's and Qwen2's: nothing in it marks the assistant's text."""

GENERATION = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>\n' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""The same text, marked by `{% generation %}`."""

DATED = (
    "{% if not date_string is defined %}{% if strftime_now is defined %}"
    "{% set date_string = strftime_now('%d %b %Y') %}"
    "{% else %}{% set date_string = '26 Jul 2024' %}{% endif %}{% endif %}"
    "{{ '<|im_start|>system\nToday: ' + date_string + '<|im_end|>\n' }}"
) + CHATML
"""A template with today's date, like Llama 3.1's and 3.2's."""

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
"""A template like Qwen's: functions in the system's turn, calls in the assistant's, one turn for consecutive answers;
thinking can be switched off."""

TOLD_TOOLS = _MARKED.replace("BEGIN", "{% generation %}").replace("END", "{% endgeneration %}")
"""The same text, marked by `{% generation %}`."""

_TOOLS = "{% if tools %}{{ HEAD }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ TAIL }}{% endif %}"


def _with_tools(template: str, head: str, tail: str) -> str:
    return _TOOLS.replace("HEAD", repr(head)).replace("TAIL", repr(tail)) + template


_CALLS = "{% for call in m.tool_calls or [] %}<call>{{ call.function | tojson }}</call>{% endfor %}"
_ASKS = "{% if add_generation_prompt %}ASKS{% endif %}"

FAMILIES = {
    "qwen": TOOLS,
    # An empty or real thinking block in the last answer only.
    "qwen3": _with_tools(
        "{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' and loop.index0 > ns.last and (loop.last or m.reasoning_content) %}"
        "<think>\n{{ m.reasoning_content or '' }}\n</think>\n\n{% endif %}{{ m.content }}"
        + _CALLS
        + "<|im_end|>\n{% endfor %}"
        + _ASKS.replace("ASKS", "<|im_start|>assistant\n"),
        "<|im_start|>system\n",
        "<|im_end|>\n",
    ),
    # Blanks at the ends of a text are cut; results of tools are JSON; a call is the whole answer.
    "llama3": _with_tools(
        "{{ bos_token }}{% for m in messages %}<|im_start|>{{ 'ipython' if m.role == 'tool' else m.role }}\n\n"
        "{% if m.tool_calls %}{% for call in m.tool_calls %}"
        '{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}{% endfor %}'
        "{% elif m.role == 'tool' %}{{ m.content | tojson }}{% else %}{{ m.content | trim }}{% endif %}"
        "<|im_end|>{% endfor %}" + _ASKS.replace("ASKS", "<|im_start|>assistant\n\n"),
        "<|im_start|>system\n\n",
        "<|im_end|>",
    ),
    # An answer is asked for with an open tag, and given without; calls need null as content and arguments as text.
    "r1": "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% endif %}"
    "{% if m.role == 'user' %}<user>{{ m.content }}{% endif %}{% if m.role == 'tool' %}<tool>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' and m['content'] is none %}<assistant>{% for call in m.tool_calls %}"
    "{{ call.function.name + '\"arguments\": ' + call.function.arguments }}{% endfor %}{{ eos_token }}"
    "{% elif m.role == 'assistant' %}<assistant>{{ m.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    + _ASKS.replace("ASKS", "<assistant><think>\n"),
    # The next role's marker ends a turn.
    "glm": _with_tools(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        + _CALLS
        + "{% endfor %}"
        + _ASKS.replace("ASKS", "<|im_start|>assistant\n"),
        "<|im_start|>system\n",
        "",
    ),
    # The system prompt and the functions are written into the last turn of the user.
    "mistral": "{{ bos_token }}{% set ns = namespace(system='', last=0) %}{% for m in messages %}"
    "{% if m.role == 'system' %}{% set ns.system = m.content + '\n\n' %}{% endif %}"
    "{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if loop.index0 == ns.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    "[INST] {{ (ns.system if loop.index0 == ns.last else '') + m.content }}[/INST]{% elif m.role == 'tool' %}"
    "[RESULT]{{ m.content }}[/RESULT]{% elif m.tool_calls %}[CALL] {{ m.tool_calls[0].function | tojson }}"
    "{{ eos_token }}{% elif m.role == 'assistant' %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
}
"""Published templates in brief: each family with its peculiarities."""

MakeTokenizer = Callable[..., FolderTokenizer]
