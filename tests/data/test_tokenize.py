"""Bytes equal the tokenizer that they are exported as, and a folder's tokenizer opens or says why not."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from portable_fsdp.data.tokenize import load_tokenizer, token_dtype
from portable_fsdp.runtime.errors import DataError

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


def test_every_byte_has_its_value_as_id(exported: Any) -> None:
    assert sorted(exported.get_vocab().values()) == list(range(256))
    assert len(exported) == 256
    assert exported.eos_token_id == exported.pad_token_id == load_tokenizer("bytes").end_of_text == 0
    assert load_tokenizer("bytes").vocab_size == 256


@pytest.mark.parametrize(("vocab_size", "dtype"), [(1, "u1"), (256, "u1"), (257, "u2"), (65536, "u2"), (65537, "u4")])
def test_the_dtype_is_the_smallest_that_holds_the_vocabulary(vocab_size: int, dtype: str) -> None:
    assert token_dtype(vocab_size) == np.dtype(dtype)


def test_a_folder_of_transformers_opens_and_saves(tmp_path: Path) -> None:
    saved = PreTrainedTokenizerFast(tokenizer_object=word_tokenizer(), unk_token="<unk>", eos_token="</s>")
    saved.save_pretrained(tmp_path / "one")
    load_tokenizer(str(tmp_path / "one")).save(tmp_path / "two")
    for folder in ("one", "two"):
        tokenizer = load_tokenizer(str(tmp_path / folder))
        assert (tokenizer.vocab_size, tokenizer.end_of_text) == (301, 300)
        ids = tokenizer.encode("c a zebra b")
        assert ids.tolist() == [3, 1, 0, 2]
        assert ids.dtype == np.uint16


def test_nothing_is_put_around_a_folder_tokenizers_text(tmp_path: Path) -> None:
    from tokenizers import processors

    tokenizer = word_tokenizer()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 300)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    assert load_tokenizer(str(tmp_path)).encode("a b").tolist() == [1, 2]


def test_a_bare_tokenizer_json_opens_and_names_no_end(tmp_path: Path) -> None:
    word_tokenizer().save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(str(tmp_path))
    assert tokenizer.encode("b c").tolist() == [2, 3]
    assert tokenizer.end_of_text is None


def test_what_is_not_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.tokenizer: expected bytes, a folder .* no such folder: byte\n"):
        load_tokenizer("byte")
    with pytest.raises(DataError, match=r"expected tokenizer_config\.json or tokenizer\.json in .*, found neither"):
        load_tokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"data\.tokenizer: .*: transformers can't open it: "):
        load_tokenizer(str(tmp_path))


def test_bytes_need_no_transformers() -> None:
    code = "from portable_fsdp.data.tokenize import load_tokenizer as load; load('bytes').encode('a'); import sys; "
    code += "print(sorted({'torch', 'transformers', 'tokenizers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
