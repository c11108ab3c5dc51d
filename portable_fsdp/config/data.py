"""The base of every section, and the section `data`: the documents of a run, and how they become rows."""

import itertools
import re
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Le
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    Strict,
    StringConstraints,
    field_validator,
    model_validator,
)

from portable_fsdp.runtime.factory import FACTORY_PATTERN


class Section(BaseModel):
    """Frozen, with strict keys and types. The text below a key is its description in documents and messages."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


PERCENT = StringConstraints(pattern=r"^(\d{1,2}(\.\d+)?|100)%$")
"""A share as text: `5%`."""

Source = Literal["python_docs", "python_source", "text", "jsonl", "parquet", "huggingface"]
Format = Literal["text", "prompt_completion", "chat", "instruction"]
Column = Literal["text", "prompt", "completion", "messages", "instruction", "input", "output", "system", "tools"]

FORMAT_COLUMNS: dict[Format, tuple[Column, ...]] = {
    "text": ("text",),
    "prompt_completion": ("prompt", "completion"),
    "chat": ("messages",),
    "instruction": ("instruction", "output"),
}
"""Columns that each format needs; `columns` maps them to other names in the file."""

OPTIONAL_COLUMNS: dict[Format, tuple[Column, ...]] = {
    "text": (),
    "prompt_completion": ("system", "tools"),
    "chat": ("system", "tools"),
    "instruction": ("input", "system", "tools"),
}
"""Columns that a format reads where a file has them."""


def _as_share(value: Any) -> Any:
    """`5%` for 0.05; text stays."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 < value < 1:
            raise ValueError(f"expected a share of the documents (5% or 0.05), a file or a split, found {value}")
        return f"{100 * value:g}%"
    return value


class Documents(Section):
    """Where documents come from and which columns they have."""

    source: Source = "python_docs"
    """python_docs: CPython's reference; python_source: the standard library; text, jsonl, parquet: the files of
    path; huggingface: a data set of the hub, or saved by `datasets`"""
    path: str | None = None
    """text, jsonl (also gzip or zstd), parquet: a file or a glob; huggingface: a hub id
    `org/name[:subset][@revision]`, or a folder of save_to_disk"""
    split: str | None = None
    """huggingface: a split or part of one (`train[:10%]`); null: train"""
    format: Format = "text"
    """tokens that enter the loss: all (text), the completion's (prompt_completion), the assistant's turns in the
    tokenizer's chat template (chat), or alpaca's output (instruction)"""
    columns: dict[Column, str] = {}
    """the format's name of a column (text, prompt, completion, messages, instruction, input, output, system, tools)
    -> its name in the file, where it differs"""
    ignore: tuple[str, ...] = Field(default=(), strict=False)
    """columns, keys of messages and roles to leave out, where they would mean something for training (system,
    tools, weight, reasoning_content, ...) and the format or chat template can't use them"""
    chat_template_kwargs: dict[str, Any] = {}
    """further arguments of the chat template, as `{enable_thinking: false}`"""

    @model_validator(mode="after")
    def _keys_go_with_the_source(self) -> Self:
        needs_path = self.source not in ("python_docs", "python_source")
        if needs_path != (self.path is not None):
            raise ValueError("path goes with source: text, jsonl, parquet or huggingface, and with no other source")
        if self.split is not None and self.source != "huggingface" and not getattr(self, "factory", None):
            raise ValueError("split goes with source: huggingface, and with no other source")
        has_columns = self.source in ("jsonl", "parquet", "huggingface")
        if not has_columns and (self.format != "text" or self.columns or self.ignore):
            raise ValueError(
                "format, columns and ignore go with source: jsonl, parquet or huggingface: the others are text"
            )
        read = (*FORMAT_COLUMNS[self.format], *OPTIONAL_COLUMNS[self.format])
        unread = [column for column in self.columns if column not in read]
        if unread:
            raise ValueError(f"columns: format {self.format} reads {', '.join(read)}, found {', '.join(unread)}")
        if self.chat_template_kwargs and self.format == "text":
            raise ValueError("chat_template_kwargs goes with any format but text, which has no template")
        return self


Size = Annotated[int, Ge(1), Le(2**20)]

MOST_BUCKETS, MOST_WORKERS = 16, 64


class MixtureSource(Documents):
    """One source of a mixture."""

    weight: float = Field(default=1.0, gt=0)
    """its share of the rows relative to the other weights, rounded to 1/1000"""


class Data(Documents):
    factory: str | None = Field(default=None, pattern=FACTORY_PATTERN)
    """a dataset of your own: `module:function`, called with the split (data.split, else `train`), which returns a
    torch Dataset of dicts of tensors, or that and a collate function"""
    buckets: dict[str, Annotated[tuple[Size, ...], Strict(False)]] = {}
    """data.factory: pad these keys of a row along dimension 0 to the first sizes that hold all of them, as
    `{input_ids: [64, 128], labels: [64, 128]}`; XLA compiles a program for each; {}: rows stay as they are"""
    workers: int = Field(default=0, ge=0, le=MOST_WORKERS)
    """data.factory: processes that read rows ahead; 0: a thread does"""
    mixture: tuple[MixtureSource, ...] = Field(default=(), strict=False)
    """several sources instead of one; their weights are their shares of the rows"""
    tokenizer: str = "auto"
    """bytes, a folder with a tokenizer (transformers or tokenizer.json), or a hub id; auto: model.pretrained's,
    else bytes"""
    seq_len: int = Field(default=256, ge=1)
    """tokens per row"""
    packing: Literal["auto", "stream", "documents", "none"] = "auto"
    """stream: documents joined and cut into rows; documents: several whole documents per row, each attends to
    itself only; none: one per row, padded; auto: stream for text, else documents"""
    eval_split: Annotated[str | None, BeforeValidator(_as_share)] = None
    """validation set: a share of the documents (`5%`, 0.05), a file, a glob, or a split of the data set; null: none"""
    on_error: Literal["stop", "skip"] = "stop"
    """stop, or skip and count, documents that can't be read, rendered or fitted into seq_len"""
    cache_dir: str | None = None
    """folder of tokenized documents, shared by all runs; null: portable_fsdp/tokens in the user's cache"""

    @property
    def resolved_packing(self) -> Literal["stream", "documents", "none"]:
        """`packing`, without `auto`."""
        if self.packing != "auto":
            return self.packing
        return "stream" if all(part.format == "text" for part in self.mixture or (self,)) else "documents"

    @property
    def shapes(self) -> int:
        """How many shapes batches may have, where engines compile a program for each."""
        return len(next(iter(self.buckets.values()), ("one",)))

    @field_validator("buckets")
    @classmethod
    def _sizes_ascend(cls, buckets: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        if not buckets:
            return buckets
        counts = {len(sizes) for sizes in buckets.values()}
        if len(counts) > 1 or not 1 <= max(counts) <= MOST_BUCKETS:
            actual = ", ".join(f"{len(sizes)} for {key}" for key, sizes in buckets.items())
            raise ValueError(f"expected as many sizes for each key, 1 to {MOST_BUCKETS}, found {actual}")
        by_bucket = list(zip(*buckets.values(), strict=True))
        for smaller, larger in itertools.pairwise(by_bucket):
            if smaller == larger or any(a > b for a, b in zip(smaller, larger, strict=True)):
                names = ", ".join(buckets)
                raise ValueError(
                    f"expected sizes that ascend from bucket to bucket, found {list(larger)} after {list(smaller)} for "
                    f"{names}: no row would go there first"
                )
        return buckets

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        fields = Data.model_fields
        own_keys = ("factory", "buckets", "workers")
        if self.factory is not None:
            of_text = [n for n in fields if n not in (*own_keys, "split", "eval_split", "cache_dir")]
            if given := [name for name in of_text if getattr(self, name) != fields[name].default]:
                raise ValueError(f"{given[0]} goes with text; data.factory makes the rows by itself")
            return self
        if self.buckets or self.workers:
            name = "buckets" if self.buckets else "workers"
            reason = "rows of text have one length, data.seq_len" if self.buckets else "a thread reads text fast enough"
            raise ValueError(f"{name} goes with data.factory: {reason}")
        own = [name for name in Documents.model_fields if getattr(self, name) != fields[name].default]
        if self.mixture and own:
            raise ValueError(f"mixture stands instead of {', '.join(Documents.model_fields)}: each part has its own")
        if self.packing == "stream" and any(part.format != "text" for part in self.mixture or (self,)):
            raise ValueError("packing: stream goes with format: text; take documents, none, or auto")
        share = None if self.eval_split is None else share_held_out(self.eval_split)
        if share is not None and not 0 < share < 1:
            raise ValueError(f"eval_split: expected a share between 0% and 100%, found {self.eval_split}")
        has_files = not self.mixture and self.source not in ("python_docs", "python_source")
        if self.eval_split is not None and share is None and not has_files:
            raise ValueError(
                f"eval_split: expected a share of the documents, as 5%, found {self.eval_split}: a file or a split "
                "goes with one source that has files or splits"
            )
        return self


def share_held_out(eval_split: str) -> float | None:
    """0.05 for `5%`; None for the name of a file or a split."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", eval_split)
    return float(match[1]) / 100 if match else None
