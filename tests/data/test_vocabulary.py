"""A tokenizer that has grown is told from another one."""

import logging
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from portable_fsdp.config.schema import Model
from portable_fsdp.data import tokenize
from portable_fsdp.data.tokenize import load_tokenizer
from portable_fsdp.runtime.errors import ConfigError

WORDS = ["<eos>", "a", "b", "c"]


def keeps_ids(model: Model, name: str) -> bool:
    return tokenize.keeps_ids(model, name, load_tokenizer(name))


def require_own_ids(model: Model, name: str) -> None:
    tokenize.require_own_ids(model, name, load_tokenizer(name))


def write(folder: Path, words: list[str], *added: str) -> str:
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(vocabulary, unk_token="<eos>")), eos_token="<eos>"
    )
    tokenizer.add_tokens(list(added))
    tokenizer.save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize(
    ("words", "added", "keeps"),
    [
        (WORDS, (), True),
        (WORDS, ("<tool>", "d"), True),
        ([*WORDS, "d"], (), True),
        (["<eos>", "b", "a", "c"], ("d",), False),  # the same tokens under other ids
        (["<eos>", "a", "b"], ("d", "e"), False),  # one is missing
    ],
)
def test_all_tokens_stay_under_their_ids(tmp_path: Path, words: list[str], added: tuple[str, ...], keeps: bool) -> None:
    own = write(tmp_path / "model", WORDS)
    assert keeps_ids(Model(pretrained=own), write(tmp_path / "tokenizer", words, *added)) is keeps


def test_its_own_needs_no_look_and_without_one_it_cannot_be_told(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    model = Model(pretrained=str(tmp_path / "empty"))
    assert tokenize.keeps_ids(model, str(tmp_path / "empty"), load_tokenizer("bytes"))  # not asked
    assert keeps_ids(model, "auto")
    assert not keeps_ids(model, "bytes")
    assert not keeps_ids(model, write(tmp_path / "tokenizer", WORDS))
    assert not keeps_ids(Model(architecture={"model_type": "llama"}), str(tmp_path / "tokenizer"))


def test_another_models_tokenizer_is_refused_unless_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    own = write(tmp_path / "model", WORDS)
    others = {
        "bytes": ("0, '<eos>' to the model and '\\x00' in bytes", 4),
        write(tmp_path / "other", ["<eos>", "b", "a"]): ("1, 'a' to the model and 'b' in ", 2),
        write(tmp_path / "larger", ["<eos>", "a", "b", "d", "e"]): ("3, 'c' to the model and 'd' in ", 1),
    }
    for tokenizer, (expected, count) in others.items():
        with pytest.raises(ConfigError, match=r"^data\.tokenizer: expected tokens by the ids(.|\n)*") as error:
            require_own_ids(Model(pretrained=own, allow=("lm_head",)), tokenizer)
        for said in (expected, f"of {count}\n", "data.tokenizer=auto", "model.allow='[lm_head, data.tokenizer]'"):
            assert said in str(error.value)
        require_own_ids(Model(pretrained=own, allow=("lm_head", "data.tokenizer")), tokenizer)
    for tokenizer in (own, "auto", write(tmp_path / "smaller", WORDS[:2]), write(tmp_path / "grown", WORDS, "d")):
        require_own_ids(Model(pretrained=own), tokenizer)
    load_tokenizer("bytes").save(tmp_path / "export")
    require_own_ids(Model(pretrained=str(tmp_path / "export")), "bytes")
    (tmp_path / "empty").mkdir()
    with caplog.at_level(logging.INFO):
        require_own_ids(Model(pretrained=str(tmp_path / "empty")), "bytes")
    assert caplog.messages == [f"model.pretrained: {tmp_path}/empty: no tokenizer to compare data.tokenizer=bytes with"]
