"""Tokenizers for the tests of data: byte-level BPE, trained on CPython's reference, with a chat template."""

import shutil
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import pytest
from chat_templates import CHATML, SPECIAL, MakeTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from portable_fsdp.data.tokenize import FolderTokenizer


@pytest.fixture(scope="session")
def bpe() -> str:
    """A trained tokenizer, as JSON."""
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(sorted(topics.values())[:20], trainer)
    return str(tokenizer.to_str())


@pytest.fixture
def make_tokenizer(bpe: str, tmp_path: Path) -> MakeTokenizer:
    """`make_tokenizer(chat_template=..., around="<begin> $A")`; its folder is `tmp_path / "tokenizer"`."""

    def make(chat_template: str | None = CHATML, around: str | None = None) -> FolderTokenizer:
        fast: Any = Tokenizer.from_str(bpe)
        if around is not None:
            special = [(token, fast.token_to_id(token)) for token in SPECIAL if token in around]
            fast.post_processor = processors.TemplateProcessing(single=around, special_tokens=special)
        tokenizer = PreTrainedTokenizerFast(
            tokenizer_object=fast, bos_token="<begin>", eos_token="<end>", pad_token="<pad>"
        )
        tokenizer.chat_template = chat_template
        shutil.rmtree(tmp_path / "tokenizer", ignore_errors=True)  # an earlier one may have a template
        tokenizer.save_pretrained(tmp_path / "tokenizer")
        return FolderTokenizer(tmp_path / "tokenizer")

    return make
