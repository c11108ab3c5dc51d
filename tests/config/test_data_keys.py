"""What the keys of `data` take together."""

from typing import Any

import pytest
from pydantic import ValidationError

from portable_fsdp.config.data import Data, share_held_out

FILE = {"source": "jsonl", "path": "a.jsonl"}


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"source": "jsonl"}, "path goes with source: text, jsonl, parquet or huggingface"),
        ({"path": "a"}, "path goes with source"),
        ({**FILE, "split": "train"}, "split goes with source: huggingface"),
        ({"source": "text", "path": "a", "format": "chat"}, "format and columns go with source: jsonl, parquet"),
        ({"columns": {"text": "body"}}, "format and columns go with source"),
        ({**FILE, "columns": {"prompt": "q"}}, "columns: format text reads text, found prompt"),
        ({**FILE, "columns": {"body": "q"}}, "'text', 'prompt', 'completion', 'messages' or 'tools'"),
        ({**FILE, "format": "chat", "packing": "stream"}, "packing: stream goes with format: text"),
        ({**FILE, "mixture": [FILE]}, "mixture stands instead of source, path, split, format, columns, chat"),
        (
            {**FILE, "chat_template_kwargs": {"a": 1}},
            "chat_template_kwargs goes with format: chat or prompt_completion",
        ),
        ({**FILE, "format": "prompt_completion", "columns": {"tools": "t"}}, "reads prompt, completion, found tools"),
        ({"mixture": [{**FILE, "format": "chat"}, FILE], "packing": "stream"}, "packing: stream goes with"),
        ({"mixture": [{**FILE, "weight": 0.0}]}, "greater than 0"),
        ({"mixture": [{"source": "jsonl"}]}, "path goes with source"),
        (
            {"mixture": [FILE], "eval_split": "b.jsonl"},
            "eval_split: expected a share of the documents, as 5%, found b.j",
        ),
        ({"eval_split": "validation"}, "eval_split: expected a share of the documents"),
        ({**FILE, "eval_split": "0%"}, "eval_split: expected a share between 0% and 100%, found 0%"),
        ({**FILE, "eval_split": "100%"}, "eval_split: expected a share between 0% and 100%, found 100%"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        Data(**keys)


@pytest.mark.parametrize(
    "keys",
    [
        {},
        {**FILE, "format": "prompt_completion", "columns": {"prompt": "q"}, "eval_split": "b.jsonl"},
        {**FILE, "format": "chat", "columns": {"tools": "t"}, "chat_template_kwargs": {"enable_thinking": False}},
        {"source": "huggingface", "path": "org/name", "split": "train[:10%]", "eval_split": "test"},
        {"mixture": [{**FILE, "weight": 3}, {"source": "python_docs"}], "eval_split": "2.5%", "packing": "stream"},
    ],
)
def test_what_goes_together_survives_being_written_and_read_back(keys: dict[str, Any]) -> None:
    data = Data(**keys)
    assert Data(**data.model_dump(mode="json")) == data


def test_a_share_is_told_from_a_name() -> None:
    shares = {"5%": 0.05, "2.5%": 0.025, "50 %": None, "5%.jsonl": None, "train[:5%]": None}
    assert {text: share_held_out(text) for text in shares} == shares
