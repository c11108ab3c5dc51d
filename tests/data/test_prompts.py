"""Prompts, templates and ends that a config names: ids beside what the tokenizer itself makes of the parts."""

import json
import random
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pytest
from chat_templates import MakeTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from portable_fsdp.config.load import make_config
from portable_fsdp.config.schema import Data
from portable_fsdp.data.build import build_data, renderer
from portable_fsdp.data.examples import Broken, Example, Rendered
from portable_fsdp.data.templates import TEMPLATES, adapt
from portable_fsdp.data.tokenize import load_tokenizer
from portable_fsdp.runtime.errors import ConfigError, DataError

SPECIAL = ["<s>", "</s>", "<turn>"]
KINDS: dict[str, Any] = {
    "bytes": pre_tokenizers.ByteLevel(add_prefix_space=False),
    "numbers and words apart": pre_tokenizers.Sequence(
        [pre_tokenizers.Split(" ", "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    ),
    "metaspace": pre_tokenizers.Metaspace(),
}


@pytest.fixture(scope="module", params=KINDS)
def tokenizer(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a trained tokenizer, which begins each text with <s>."""
    made: Any = Tokenizer(models.BPE(unk_token="<s>"))
    made.pre_tokenizer = KINDS[request.param]
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=500, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    made.train_from_iterator(sorted(topics.values())[:10], trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return folder


def rows(count: int) -> list[dict[str, str]]:
    draw, words = random.Random(0), sorted(topics.values())[0].split()

    def text(most: int) -> str:
        return draw.choice(["", "\n", " "]) + " ".join(draw.choices(words, k=draw.randrange(1, most)))

    made = [{"instruction": text(9), "input": draw.choice(["", text(5)]), "output": text(20)} for _ in range(count)]
    return [{key: value for key, value in row.items() if value or key != "input"} for row in made]


def render(tokenizer: Any, row: dict[str, Any], **keys: Any) -> Rendered | Broken:
    [rendered] = renderer(Data(source="jsonl", path="a.jsonl", **keys), tokenizer, stream=False)(
        [Example(0, "", 1, row)]
    )
    return rendered


def adapted(folder: Path, end: str | None, chat_template: str | None) -> Any:
    tokenizer = load_tokenizer(str(folder))
    adapt(tokenizer, end, chat_template)
    return tokenizer


FORMS: dict[str, tuple[str | list[str], str, str]] = {
    "alpaca": (
        "alpaca",
        "Below is an instruction that describes a task, paired with an input that provides further context. Write a "
        "response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n### Input:\n{input}"
        "\n\n### Response:\n",
        "Below is an instruction that describes a task. Write a response that appropriately completes the request."
        "\n\n### Instruction:\n{instruction}\n\n### Response:\n",
    ),
    "alpaca-chat": (
        "alpaca-chat",
        "SYSTEM: Below is an instruction that describes a task, paired with an input that provides further context. "
        "Write a response that appropriately completes the request.\nUSER: {instruction}\n{input}\nASSISTANT:",
        "SYSTEM: Below is an instruction that describes a task. Write a response that appropriately completes the "
        "request.\nUSER: {instruction}\nASSISTANT:",
    ),
    "own": (
        ["Q: {instruction}\n{input}\nA:", "Q: {instruction}\nA: "],
        "Q: {instruction}\n{input}\nA:",
        "Q: {instruction}\nA: ",
    ),
    "one": ("{{{instruction}}} {input}=", "{{{instruction}}} {input}=", "{{{instruction}}} {input}="),
}


@pytest.mark.parametrize("form", FORMS)
def test_prompt_and_answer_are_tokenized_apart(form: str, tokenizer: Path) -> None:
    given, with_input, without = FORMS[form]
    own, plain = load_tokenizer(str(tokenizer)), PreTrainedTokenizerFast.from_pretrained(tokenizer)
    for row in rows(100):
        text = (with_input if row.get("input") else without).format(**{"input": "", **row})
        prompt, answer = plain(text)["input_ids"], [*plain(row["output"])["input_ids"][1:], plain.eos_token_id]
        rendered = render(own, row, format="instruction", prompt=given)
        assert isinstance(rendered, Rendered), rendered
        assert rendered.ids.tolist() == prompt + answer
        assert rendered.counted is not None
        assert rendered.counted.tolist() == [False] * len(prompt) + [True] * len(answer)
        all_count = render(own, row, format="instruction", prompt=given, train_on="all")
        assert isinstance(all_count, Rendered)
        assert (all_count.ids.tolist(), all_count.counted is not None and all_count.counted.all()) == (
            rendered.ids.tolist(),
            True,
        )


def test_a_column_that_the_prompt_leaves_out_is_no_silent_loss(tokenizer: Path) -> None:
    row = {"instruction": "Say", "output": "this", "system": "Be brief."}
    broken = render(load_tokenizer(str(tokenizer)), row, format="instruction", prompt="alpaca")
    assert isinstance(broken, Broken)
    assert "doesn't contain the column system" in broken.problem
    kept = render(load_tokenizer(str(tokenizer)), row, format="instruction", prompt="{system} {instruction}:")
    assert isinstance(kept, Rendered)


CHAT = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "What is it?"},
    {"role": "assistant", "content": "A statement."},
    {"role": "user", "content": "And that?"},
    {"role": "assistant", "content": "It ends."},
]
TRAINED = {
    "answers": ["A statement.<|im_end|>", "It ends.<|im_end|>"],
    "last": ["It ends.<|im_end|>"],
    "user": ["What is it?<|im_end|>", "And that?<|im_end|>"],
    "assistant": ["A statement.<|im_end|>", "It ends.<|im_end|>"],
}


@pytest.mark.parametrize("train_on", [*TRAINED, "all"])
def test_turns_that_train(train_on: str, make_tokenizer: MakeTokenizer) -> None:
    own: Any = make_tokenizer()
    value = [train_on] if train_on in ("user", "assistant") else train_on
    rendered = render(own, {"messages": CHAT}, format="chat", train_on=value)
    assert isinstance(rendered, Rendered), rendered
    assert rendered.counted is not None
    if train_on == "all":
        assert rendered.counted.all()
        return
    edges = np.flatnonzero(np.diff(np.concatenate([[0], rendered.counted.astype(int), [0]])))
    texts = [own.decode(rendered.ids[begin:end].tolist(), special_tokens=True) for begin, end in edges.reshape(-1, 2)]
    assert [text.rstrip("\n") for text in texts] == TRAINED[train_on]


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_named_template_renders_its_turns(name: str, tokenizer: Path) -> None:
    own = adapted(tokenizer, None, name)
    turns = CHAT[1:]
    rendered = render(own, {"messages": turns}, format="chat")
    assert isinstance(rendered, Rendered), rendered
    prompt = own._tokenizer.apply_chat_template(turns[:-1], tokenize=False, add_generation_prompt=True)
    whole = own._tokenizer.apply_chat_template(turns, tokenize=False)
    assert whole.startswith(prompt + turns[-1]["content"])
    assert rendered.counted is not None
    assert 0 < rendered.counted.sum() < len(rendered.ids)


def test_a_template_of_a_file_or_a_folder_and_an_end(tokenizer: Path, tmp_path: Path) -> None:
    text = "{% for m in messages %}{{ m.role + ':' + m.content + eos_token }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(text)
    for name in (tmp_path, tmp_path / "chat_template.jinja"):
        own = adapted(tokenizer, "<turn>", str(name))
        rendered = render(own, {"messages": CHAT}, format="chat")
        assert isinstance(rendered, Rendered), rendered
        assert rendered.ids[-1] == own.end_of_text == 2
    own.save(tmp_path / "export")
    saved = PreTrainedTokenizerFast.from_pretrained(tmp_path / "export")
    assert (saved.eos_token, saved.chat_template) == ("<turn>", text)
    with pytest.raises(DataError, match=r"data\.end: the tokenizer has no token '<none>'"):
        adapted(tokenizer, "<none>", None)
    with pytest.raises(DataError, match=r"data\.chat_template: expected chatml, llama3, gemma, phi3, alpaca, a file"):
        adapted(tokenizer, None, "chatlm")
    with pytest.raises(DataError, match=r"data\.chat_template: bytes have no such tokens"):
        adapt(load_tokenizer("bytes"), None, "chatml")


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "another format": ({"format": "chat", "prompt": "alpaca"}, "prompt needs format: instruction, found format: chat"),
    "roles of no chat": (
        {"format": "instruction", "train_on": ["user"]},
        "expected answers or all with format: instru",
    ),
    "another column": ({"prompt": "{question}?"}, r"found question.*\n.*instruction: question"),
    "no column": ({"prompt": "{}?"}, r"found \{\}"),
    "half a brace": ({"prompt": "{instruction?"}, "found expected '}' before end of string"),
    "three": ({"prompt": ["a", "b", "c"]}, "prompt: expected"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_keys_are_refused(name: str, make_tokenizer: MakeTokenizer) -> None:
    keys, message = WRONG[name]
    given, tokenizer = {"source": "jsonl", "path": "a.jsonl", "format": "instruction", **keys}, make_tokenizer()
    with pytest.raises((ConfigError, DataError), match=message):
        renderer(make_config(data=given).data, tokenizer, stream=False)


def test_weights_by_rows_give_each_row_once_an_epoch(tmp_path: Path) -> None:
    for name, count in (("a", 3), ("b", 11)):
        lines = [json.dumps({"text": f"{name}{at}"}) for at in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    sources: list[dict[str, Any]] = [
        {"source": "jsonl", "path": str(tmp_path / f"{name}.jsonl"), "weight": "rows"} for name in "ab"
    ]
    corpus = build_data(
        Data.model_validate({"mixture": sources, "packing": "none", "seq_len": 8, "cache_dir": str(tmp_path)})
    )
    assert len(corpus.rows) == 14
    for epoch in range(3):
        assert sorted(corpus.rows.order(0, np.arange(14 * epoch, 14 * epoch + 14))) == [*range(14)]
