"""Ids and labels of 500 examples of each format, next to those that TRL's SFTTrainer makes of the same examples.

python benchmarks/beside_trl.py TOKENIZER_FOLDER

Needs the extra `data` and `pip install trl` (1.16 was compared). The tokenizer is SmolLM2's, with its chat template.
Labels are compared shifted: ours are the next tokens, TRL's are shifted in the loss. Prints, for each format, how many
examples are equal, and the first that isn't.
"""

import argparse
import json
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

os.environ["USE_TORCH_XLA"] = "0"

import importlib
import logging
from pydoc_data.topics import topics

import numpy as np

from portable_fsdp.config.schema import Data
from portable_fsdp.data.build import build_data

logging.getLogger("trl").setLevel(logging.ERROR)  # it warns of each prompt that ends within a token

EXAMPLES = 500
IGNORED = -100
Example = dict[str, Any]
Sequence = tuple[list[int], list[int]]
"""Ids, and the labels shifted: at each place the token that follows, or -100."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizer", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        for name, form, examples, tokenizer, template in cases(options.tokenizer, Path(folder)):
            ours = our_sequences(form, examples, tokenizer, Path(folder))
            theirs = trl_sequences(form, examples, tokenizer, template)
            report(name, ours, theirs)


def report(name: str, ours: list[Sequence], theirs: list[Sequence]) -> None:
    ids = sum(a[0] == b[0] for a, b in zip(ours, theirs, strict=True))
    labels = sum(a[1] == b[1] for a, b in zip(ours, theirs, strict=True))
    print(f"{name}: {len(ours)} examples, ids equal in {ids}, labels equal in {labels}")
    for number, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a != b:
            places = [at for at, pair in enumerate(zip(a[1], b[1], strict=False)) if pair[0] != pair[1]]
            print(f"  first difference: example {number}, lengths {len(a[0])} and {len(b[0])}, labels at {places[:8]}")
            return


# ----------------------------------------------------------------------------------------------------- examples


def sentences() -> list[str]:
    found = [part.strip() for text in sorted(topics.values()) for part in text.split("\n\n")]
    return [part for part in found if 20 < len(part) < 600]


def cases(plain: Path, folder: Path) -> Iterator[tuple[str, str, list[Example], Path, str | None]]:
    """Name, format, examples, tokenizer's folder, and the template that TRL is to take for chats."""
    draw = random.Random(0)
    parts = sentences()
    begun = with_begin(plain, folder / "begun")
    for name, tokenizer in (("", plain), (", a tokenizer that begins with <bos>", begun)):
        yield f"text{name}", "text", [{"text": text} for text in parts[:EXAMPLES]], tokenizer, None
        pairs = [cut(text, draw) for text in parts[:EXAMPLES]]
        yield f"prompt_completion of texts{name}", "prompt_completion", pairs, tokenizer, None
    chats = [chat(parts, draw) for _ in range(EXAMPLES)]
    asked = [{"prompt": one[:-1], "completion": one[-1:]} for one in chats]
    yield "prompt_completion of messages", "prompt_completion", asked, plain, None
    messages: list[Example] = [{"messages": one} for one in chats]
    yield "chat, template without {% generation %}", "chat", messages, plain, marked(plain)
    with_marks = with_template(plain, folder / "with_marks", marked(plain))
    yield "chat, template with {% generation %}", "chat", messages, with_marks, None
    for family in ("llama3", "phi3", "gemma", "qwen2_5"):
        without_system: list[Example] = [{"messages": [m for m in one if m["role"] != "system"]} for one in chats]
        original, training = trl_template(family), trl_template(f"{family}_training")
        given = with_template(plain, folder / family, original)
        yield f"chat, {family}'s template, beside TRL's own for training", "chat", without_system, given, training


def cut(text: str, draw: random.Random) -> Example:
    at = draw.randrange(1, len(text) - 1)
    return {"prompt": text[:at], "completion": text[at:]}


def chat(parts: list[str], draw: random.Random) -> list[dict[str, str]]:
    turns = [
        {"role": role, "content": draw.choice(parts)}
        for _ in range(draw.randrange(1, 4))
        for role in ("user", "assistant")
    ]
    return [{"role": "system", "content": "Be short."}, *turns] if draw.random() < 0.5 else turns


def marked(folder: Path) -> str:
    """The tokenizer's template (ChatML) with the assistant's text in `{% generation %}`."""
    header = "{{'<|im_start|>' + message['role'] + '\n' }}"
    body = "{{ message['content'] + '<|im_end|>' + '\n'}}"
    generated = f"{{% generation %}}{body}{{% endgeneration %}}"
    turn = f"{{% if message['role'] == 'assistant' %}}{generated}{{% else %}}{body}{{% endif %}}"
    template = str(opened(folder).chat_template)
    line = "{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    assert line in template, "expected SmolLM2's template"
    return template.replace(line, header + turn)


def trl_template(name: str) -> str:
    trl = importlib.import_module("trl")
    return (Path(str(trl.__file__)).parent / "chat_templates" / f"{name}.jinja").read_text()


def opened(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def with_template(folder: Path, target: Path, template: str) -> Path:
    tokenizer = opened(folder)
    tokenizer.chat_template = template
    tokenizer.save_pretrained(target)
    return target


def with_begin(folder: Path, target: Path) -> Path:
    from tokenizers import processors

    tokenizer = opened(folder)
    bos = tokenizer.bos_token
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A", special_tokens=[(bos, tokenizer.bos_token_id)]
    )
    tokenizer.save_pretrained(target)
    return target


# -------------------------------------------------------------------------------------------------------- sides


def our_sequences(form: str, examples: list[Example], tokenizer: Path, folder: Path) -> list[Sequence]:
    path = folder / "examples.jsonl"
    path.write_text("".join(json.dumps(example) + "\n" for example in examples))
    keys: dict[str, Any] = {"source": "jsonl", "path": str(path), "format": form, "packing": "none"}
    data = Data(**keys, tokenizer=str(tokenizer), seq_len=4096, cache_dir=str(folder / "cache"))
    rows = build_data(data).rows
    batch = rows.rows(np.arange(len(rows)))
    held = [int(count) for count in (batch["segments"] > 0).sum(dim=1)]
    for row, count in enumerate(held):
        assert batch["positions"][row, :count].tolist() == list(range(count))
    return [
        (batch["input_ids"][row, :count].tolist(), batch["labels"][row, :count].tolist())
        for row, count in enumerate(held)
    ]


def trl_sequences(form: str, examples: list[Example], tokenizer: Path, template: str | None) -> list[Sequence]:
    import datasets
    from transformers import LlamaConfig, LlamaForCausalLM

    trl = importlib.import_module("trl")
    processing = opened(tokenizer)
    if template is not None:
        processing.chat_template = template
    sizes: dict[str, Any] = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    arguments = {"use_cpu": True, "bf16": False, "report_to": "none", "packing": False, "max_length": None}
    with tempfile.TemporaryDirectory() as output:
        trainer = trl.SFTTrainer(
            LlamaForCausalLM(LlamaConfig(vocab_size=len(processing), **sizes)),
            args=trl.SFTConfig(output, assistant_only_loss=form == "chat", shuffle_dataset=False, **arguments),
            train_dataset=datasets.Dataset.from_list(examples),
            processing_class=processing,
        )
        prepared = cast(list[dict[str, list[int]]], list(trainer.train_dataset))
    return [(one["input_ids"], [*one["labels"][1:], IGNORED]) for one in prepared]


if __name__ == "__main__":
    main()
