"""A tokenizer that has grown is told from another one."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from portable_fsdp.config.schema import Model
from portable_fsdp.data.vocabulary import keeps_ids

WORDS = ["<eos>", "a", "b", "c"]


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
    assert keeps_ids(model, str(tmp_path / "empty"))
    assert keeps_ids(model, "auto")
    assert not keeps_ids(model, "bytes")
    assert not keeps_ids(model, write(tmp_path / "tokenizer", WORDS))
    assert not keeps_ids(model, str(tmp_path / "none"))
    assert not keeps_ids(Model(architecture={"model_type": "llama"}), str(tmp_path / "tokenizer"))
