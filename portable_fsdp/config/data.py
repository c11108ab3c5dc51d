"""The section `data`: which documents a run learns, and how they become rows."""

import re
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from portable_fsdp.config.section import Float, Section

Source = Literal["python_docs", "python_source", "text", "jsonl", "parquet", "huggingface"]
Format = Literal["text", "prompt_completion", "chat"]
Column = Literal["text", "prompt", "completion", "messages", "tools"]

FORMAT_COLUMNS: dict[Format, tuple[Column, ...]] = {
    "text": ("text",),
    "prompt_completion": ("prompt", "completion"),
    "chat": ("messages",),
}
"""What each format reads; a column has this name in the file unless `columns` gives another."""

OPTIONAL_COLUMNS: dict[Format, tuple[Column, ...]] = {"text": (), "prompt_completion": (), "chat": ("tools",)}
"""What it reads too where `columns` names it."""


class Documents(Section):
    """Where documents come from, and what they hold."""

    source: Source = Field(
        default="python_docs",
        description="python_docs: CPython's reference; python_source: the standard library's source; text, jsonl, "
        "parquet: the files of path; huggingface: a data set of the hub, or one that `datasets` saved",
    )
    path: str | None = Field(
        default=None,
        description="a file or a glob (text, jsonl: also compressed by gzip or zstd; parquet); a hub id "
        "`org/name[:subset][@revision]`, or a folder of save_to_disk (huggingface)",
    )
    split: str | None = Field(
        default=None, description="huggingface: a split or a part of one, as `train[:10%]`; null: train"
    )
    format: Format = Field(
        default="text",
        description="text: every token counts; prompt_completion: those of the completion; chat: those of the "
        "assistant's turns, in the tokenizer's own chat template",
    )
    columns: dict[Column, str] = Field(
        default={},
        description="text, prompt, completion or messages -> the column's name in the file, where it differs; tools -> "
        "the column of the functions that a chat may call (JSON schemas), where there is one",
    )
    chat_template_kwargs: dict[str, Any] = Field(
        default={},
        description="what the chat template takes beside the messages, as `{enable_thinking: false}`",
    )

    @model_validator(mode="after")
    def _keys_go_with_the_source(self) -> Self:
        needs_path = self.source not in ("python_docs", "python_source")
        if needs_path != (self.path is not None):
            raise ValueError("path goes with source: text, jsonl, parquet or huggingface, and with no other source")
        if self.split is not None and self.source != "huggingface":
            raise ValueError("split goes with source: huggingface, and with no other source")
        has_columns = self.source in ("jsonl", "parquet", "huggingface")
        if not has_columns and (self.format != "text" or self.columns):
            raise ValueError("format and columns go with source: jsonl, parquet or huggingface: the others are text")
        read = (*FORMAT_COLUMNS[self.format], *OPTIONAL_COLUMNS[self.format])
        unread = [column for column in self.columns if column not in read]
        if unread:
            raise ValueError(f"columns: format {self.format} reads {', '.join(read)}, found {', '.join(unread)}")
        if self.chat_template_kwargs and self.format == "text":
            raise ValueError("chat_template_kwargs goes with format: chat or prompt_completion: text has no template")
        return self


class MixtureSource(Documents):
    """One of several sources."""

    weight: Float = Field(
        default=1.0, gt=0, description="its share of the rows, next to the others' weights; taken to a thousandth"
    )


class Data(Documents):
    mixture: tuple[MixtureSource, ...] = Field(
        default=(),
        description="several sources instead of one, each with a weight; rows are drawn from them in these shares",
        strict=False,
    )
    tokenizer: str = Field(
        default="auto",
        description="bytes, a folder with a tokenizer (transformers or tokenizer.json), or a hub id; auto: that of "
        "model.pretrained, or else bytes",
    )
    seq_len: int = Field(default=256, ge=1, description="tokens in a row")
    packing: Literal["auto", "stream", "documents", "none"] = Field(
        default="auto",
        description="stream: all documents one after the other, cut into rows; documents: whole ones, several in a "
        "row, attention within each; none: one in a row, padded; auto: stream for text, else documents",
    )
    eval_split: str | None = Field(
        default=None,
        description="what is held out: a share of the documents (`5%`), a file or a glob, or a split of the data set; "
        "null: nothing",
    )
    on_error: Literal["stop", "skip"] = Field(
        default="stop",
        description="a document that can't be read, rendered, or fitted into seq_len: end, or go on without it and say "
        "how many",
    )
    cache_dir: str | None = Field(
        default=None,
        description="folder for what was tokenized, shared by all runs; null: portable_fsdp/tokens in the user's cache",
    )

    @property
    def resolved_packing(self) -> Literal["stream", "documents", "none"]:
        """`packing`, without `auto`."""
        if self.packing != "auto":
            return self.packing
        return "stream" if all(part.format == "text" for part in self.mixture or (self,)) else "documents"

    @model_validator(mode="after")
    def _mixture_stands_alone(self) -> Self:
        own = [name for name in Documents.model_fields if getattr(self, name) != Documents.model_fields[name].default]
        if self.mixture and own:
            raise ValueError(f"mixture stands instead of {', '.join(Documents.model_fields)}: each part has its own")
        return self

    @model_validator(mode="after")
    def _packing_fits_the_format(self) -> Self:
        if self.packing == "stream" and any(part.format != "text" for part in self.mixture or (self,)):
            raise ValueError("packing: stream goes with format: text; take documents, none, or auto")
        return self

    @model_validator(mode="after")
    def _something_is_held_out(self) -> Self:
        if self.eval_split is None:
            return self
        share = share_held_out(self.eval_split)
        if share is not None and not 0 < share < 1:
            raise ValueError(f"eval_split: expected a share between 0% and 100%, found {self.eval_split}")
        if share is None and (self.mixture or self.source in ("python_docs", "python_source")):
            raise ValueError(
                f"eval_split: expected a share of the documents, as 5%, found {self.eval_split}: a file or a split "
                "goes with one source that has files or splits"
            )
        return self


def share_held_out(eval_split: str) -> float | None:
    """0.05 for `5%`; None for the name of a file or a split."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", eval_split)
    return float(match[1]) / 100 if match else None
