"""Bytes equal their exported tokenizer; a folder's opens or says why not, and takes bounded time and memory."""

import json
import logging
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from portable_fsdp.config.data import Format
from portable_fsdp.config.schema import Data, Model
from portable_fsdp.data import tokenize
from portable_fsdp.data.build import build_data
from portable_fsdp.data.tokenize import load_tokenizer, token_dtype
from portable_fsdp.runtime.errors import ConfigError, DataError

WORDS = {"<unk>": 0, "a": 1, "b": 2, "c": 3, "</s>": 300}


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("bytes")
    load_tokenizer("bytes").save(folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def word_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return tokenizer


def random_text(seed: int, length: int = 200) -> str:
    """Code points of all planes, with the first 512 (controls, and the letters of the byte alphabet) as often."""
    rng = random.Random(seed)
    points = [rng.randrange(512) if rng.random() < 0.5 else rng.randrange(0x110000) for _ in range(length)]
    return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)


@pytest.mark.parametrize("text", ["", "Grüße, 世界 😀\r\n\ttwo  spaces ", "ĀĠa\0b Ā", *map(random_text, range(20))])
def test_bytes_and_their_export_give_the_same_ids_and_the_text_again(exported: Any, text: str) -> None:
    ids = load_tokenizer("bytes").encode(text)
    assert exported(text)["input_ids"] == ids.tolist() == list(text.encode())
    assert exported.decode(ids.tolist()) == text


def test_every_byte_has_its_value_as_id_in_the_smallest_dtype_that_holds_the_vocabulary(exported: Any) -> None:
    ours = load_tokenizer("bytes")
    assert sorted(exported.get_vocab().values()) == list(range(256)) == list(range(len(exported)))
    assert exported.eos_token_id == exported.pad_token_id == ours.end_of_text == ours.padding == 0
    assert ours.vocab_size == 256
    dtypes = {1: "u1", 256: "u1", 257: "u2", 65536: "u2", 65537: "u4"}
    assert {size: token_dtype(size) for size in dtypes} == {size: np.dtype(dtype) for size, dtype in dtypes.items()}
    # Bytes need no transformers.
    code = "from portable_fsdp.data.tokenize import load_tokenizer as load; load('bytes').encode('a'); import sys; "
    code += "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_folder_of_transformers_opens_and_saves_and_a_bare_tokenizer_json_names_no_end(tmp_path: Path) -> None:
    """Nothing is put around a text."""
    saved = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(), unk_token="<unk>", eos_token="</s>")
    saved.save_pretrained(tmp_path / "one")
    load_tokenizer(str(tmp_path / "one")).save(tmp_path / "two")
    for folder in ("one", "two"):
        tokenizer = load_tokenizer(str(tmp_path / folder))
        assert (tokenizer.vocab_size, tokenizer.end_of_text) == (301, 300)
        ids = tokenizer.encode("c a zebra b")
        assert ids.tolist() == [3, 1, 0, 2]
        assert ids.dtype == np.uint16
    bare = word_tokenizer()
    bare.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 300)])
    bare.save(str(tmp_path / "tokenizer.json"))
    opened = load_tokenizer(str(tmp_path))
    assert opened.encode("a b").tolist() == [1, 2]
    assert opened.end_of_text is None


def test_what_is_not_a_tokenizer_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And code beside one is never run; several templates need a default."""
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"data\.tokenizer: .*: transformers can't open it: "):
        load_tokenizer(str(tmp_path))
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "own.py").write_text("raise SystemExit('ran')")
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    monkeypatch.setattr("builtins.input", lambda prompt: "y")  # transformers would ask whether to run it
    with pytest.raises(DataError, match=r"data\.tokenizer: .*: transformers can't open it: .*custom code"):
        load_tokenizer(str(tmp_path))
    load_tokenizer("bytes").save(tmp_path / "several")
    (tmp_path / "several/additional_chat_templates").mkdir()
    for name in ("one", "two"):
        (tmp_path / f"several/additional_chat_templates/{name}.jinja").write_text("{{ messages }}")
    with pytest.raises(DataError, match="multiple chat templates with no default"):
        load_tokenizer(str(tmp_path / "several"))


OWN = ["<eos>", "a", "b", "c"]


def keeps_ids(model: Model, name: str) -> bool:
    return tokenize.keeps_ids(model, name, load_tokenizer(name))


def require_own_ids(model: Model, name: str) -> None:
    tokenize.require_own_ids(model, name, load_tokenizer(name))


def write_tokenizer(folder: Path, words: list[str], *added: str) -> str:
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>")), eos_token="<eos>"
    )
    tokenizer.add_tokens(list(added))
    tokenizer.save_pretrained(folder)
    return str(folder)


def test_all_tokens_stay_under_their_ids(tmp_path: Path) -> None:
    """A model's own needs no look, and without one it can't be told."""
    own = write_tokenizer(tmp_path / "model", OWN)
    for number, (words, added, keeps) in enumerate(
        (
            (OWN, (), True),
            (OWN, ("<tool>", "d"), True),
            ([*OWN, "d"], (), True),
            (["<eos>", "b", "a", "c"], ("d",), False),  # the same tokens under other ids
            (["<eos>", "a", "b"], ("d", "e"), False),  # one is missing
        )
    ):
        name = write_tokenizer(tmp_path / str(number), words, *added)
        assert keeps_ids(Model(pretrained=own), name) is keeps, (words, added)
    (tmp_path / "empty").mkdir()
    model = Model(pretrained=str(tmp_path / "empty"))
    assert tokenize.keeps_ids(model, str(tmp_path / "empty"), load_tokenizer("bytes"))  # not asked
    assert keeps_ids(model, "auto")
    assert not keeps_ids(model, "bytes")
    assert not keeps_ids(model, write_tokenizer(tmp_path / "tokenizer", OWN))
    assert not keeps_ids(Model(architecture={"model_type": "llama"}), str(tmp_path / "tokenizer"))


def test_another_models_tokenizer_is_refused_unless_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = write_tokenizer(tmp_path / "model", OWN)
    others = {
        "bytes": ("0, '<eos>' to the model and '\\x00' in bytes", 4),
        write_tokenizer(tmp_path / "other", ["<eos>", "b", "a"]): ("1, 'a' to the model and 'b' in ", 2),
        write_tokenizer(tmp_path / "larger", ["<eos>", "a", "b", "d", "e"]): ("3, 'c' to the model and 'd' in ", 1),
    }
    for tokenizer, (expected, count) in others.items():
        with pytest.raises(ConfigError, match=r"^data\.tokenizer: the same ids are other tokens(.|\n)*") as error:
            require_own_ids(Model(pretrained=own, allow=("lm_head",)), tokenizer)
        for part in (expected, f"differ: {count};", "data.tokenizer=auto", "model.allow='[lm_head, data.tokenizer]'"):
            assert part in str(error.value)
        require_own_ids(Model(pretrained=own, allow=("lm_head", "data.tokenizer")), tokenizer)
    smaller, grown = write_tokenizer(tmp_path / "smaller", OWN[:2]), write_tokenizer(tmp_path / "grown", OWN, "d")
    for tokenizer in (own, "auto", smaller, grown):
        require_own_ids(Model(pretrained=own), tokenizer)
    load_tokenizer("bytes").save(tmp_path / "export")
    require_own_ids(Model(pretrained=str(tmp_path / "export")), "bytes")
    (tmp_path / "empty").mkdir()
    with caplog.at_level(logging.INFO):
        require_own_ids(Model(pretrained=str(tmp_path / "empty")), "bytes")
    assert caplog.messages == [f"model.pretrained: {tmp_path}/empty: no tokenizer to compare data.tokenizer=bytes with"]


_MESSAGES = [{"role": "user", "content": "a" * 40 + "b"}, {"role": "assistant", "content": "c"}]


def build(folder: Path, *, form: Format, template: str = "", split: str | None = None) -> None:
    tokenizer = folder / "tokenizer"
    load_tokenizer("bytes").save(tokenizer)
    (tokenizer / "chat_template.jinja").write_text(template or "{{ messages }}")
    if split is not None:
        values = json.loads((tokenizer / "tokenizer.json").read_text())
        first = {"type": "Split", "pattern": {"Regex": split}, "behavior": "Isolated", "invert": False}
        values["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [first, values["pre_tokenizer"]]}
        (tokenizer / "tokenizer.json").write_text(json.dumps(values))
    (folder / "rows.jsonl").write_text(json.dumps({"text": "a" * 40 + "b", "messages": _MESSAGES}) + "\n")
    path, cache = f"{folder}/rows.jsonl", f"{folder}/cache"
    build_data(Data(source="jsonl", path=path, format=form, seq_len=8, tokenizer=str(tokenizer), cache_dir=cache))


def test_a_template_runs_in_a_sandbox_and_a_panic_ends_in_a_sentence(tmp_path: Path) -> None:
    """Protects a host from code in a template; nothing is left in the cache. A panic is no Exception."""
    with pytest.raises(DataError, match="refuses it: access to attribute '__class__' of 'str' object is unsafe"):
        build(tmp_path, form="chat", template="{{ ''.__class__.__mro__ }}")
    assert not list(tmp_path.glob("cache/*.tmp-*"))
    with pytest.raises(DataError, match=r"rows\.jsonl:1: the tokenizer or its chat template failed"):
        build(tmp_path, form="text", split="(a+)+$")
