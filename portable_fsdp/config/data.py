"""The base class of all sections, and the section `data`: the documents, and how they become rows."""

import itertools
import re
from typing import Annotated, Any, Literal, Self

from annotated_types import Ge, Gt, Le
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
    """Base class: frozen, strict keys and types. The string below a field is its description in docs and messages."""

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
"""Required columns of each format; `columns` maps them to the names in the file."""

OPTIONAL_COLUMNS: dict[Format, tuple[Column, ...]] = {
    "text": (),
    "prompt_completion": ("system", "tools"),
    "chat": ("system", "tools"),
    "instruction": ("input", "system", "tools"),
}
"""Optional columns of each format."""


def _as_share(value: Any) -> Any:
    """`5%` for 0.05, also as text; other text stays."""
    if isinstance(value, str) and re.fullmatch(r"0?\.\d+", value):
        value = float(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not 0 < value < 1:
            raise ValueError(f"expected a share of the documents (5% or 0.05), a file or a split, found {value}")
        return f"{100 * value:g}%"
    if isinstance(value, str) and (share := share_held_out(value)) is not None and not 0 < share < 1:
        raise ValueError(f"expected a share between 0% and 100%, found {value}")
    return value


class Documents(Section):
    """The source of documents, and their columns."""

    source: Source = "python_docs"
    """python_docs: CPython's reference; python_source: source of the standard library; text, jsonl, parquet: files
    at path; huggingface: a dataset from the hub, or saved with `datasets`"""
    path: str | None = None
    """text, jsonl (also gzip or zstd), parquet: a file or a glob; huggingface: a hub id
    `org/name[:subset][@revision]`, or a folder written by save_to_disk"""
    split: str | None = None
    """huggingface: a split or part of one (`train[:10%]`); null: train"""
    format: Format = "text"
    """how documents are read, and which tokens enter the loss; text: all; prompt_completion: the completion; chat:
    the assistant's turns in the tokenizer's chat template; instruction: Alpaca's output"""
    columns: dict[Column, str] = {}
    """column of the format (text, prompt, completion, messages, instruction, input, output, system, tools) -> its
    name in the file, if different"""
    ignore: tuple[str, ...] = Field(default=(), strict=False)
    """columns, message keys and roles to drop although they affect training (system, tools, weight,
    reasoning_content, ...), because the format or chat template can't use them"""
    chat_template_kwargs: dict[str, Any] = {}
    """extra arguments for the chat template, such as `{enable_thinking: false}`"""
    prompt: str | Annotated[tuple[str, str], Strict(False)] | None = None
    """instruction: the text before the answer, tokenized apart: alpaca, alpaca-chat, or yours with {instruction},
    {input}, {system} (or two texts, the second for rows without input); null: the chat template, else Alpaca's
    headings"""
    train_on: Literal["answers", "all", "last"] | Annotated[tuple[str, ...], Strict(False)] = "answers"
    """tokens that enter the loss: answers; all; last: the last answer; or, in chats, the turns of a list of roles"""

    @model_validator(mode="after")
    def _keys_go_with_the_source(self) -> Self:
        needs_path = self.source not in ("python_docs", "python_source")
        if needs_path != (self.path is not None):
            name = (self.path or "").removesuffix(".gz").removesuffix(".zst")
            kinds = {".jsonl": "jsonl", ".json": "jsonl", ".parquet": "parquet", ".txt": "text"}
            likely = next((kind for suffix, kind in kinds.items() if name.endswith(suffix)), None)
            raise ValueError(
                "source: text, jsonl, parquet and huggingface need path; no other source takes path"
                + (f".\n  For {self.path} set source to {likely} (data.source={likely})" if likely else "")
            )
        if self.split is not None and self.source != "huggingface" and not getattr(self, "factory", None):
            raise ValueError("split works only with source: huggingface")
        has_columns = self.source in ("jsonl", "parquet", "huggingface")
        if not has_columns and (self.format != "text" or self.columns or self.ignore):
            raise ValueError(
                "format, columns and ignore need source: jsonl, parquet or huggingface; other sources are plain text"
            )
        read = (*FORMAT_COLUMNS[self.format], *OPTIONAL_COLUMNS[self.format])
        unread = [column for column in self.columns if column not in read]
        if unread:
            raise ValueError(f"columns: expected {', '.join(read)} (format: {self.format}), found {', '.join(unread)}")
        if self.prompt and self.format != "instruction":
            raise ValueError(f"prompt needs format: instruction, found format: {self.format}")
        if self.train_on not in ("answers", "all") and self.format != "chat":
            raise ValueError(f"train_on: expected answers or all with format: {self.format}, found {self.train_on}")
        if self.chat_template_kwargs and self.format == "text":
            raise ValueError("chat_template_kwargs needs another format: format: text uses no chat template")
        return self


Size = Annotated[int, Ge(1), Le(2**20)]

MOST_BUCKETS, MOST_WORKERS = 16, 64


class MixtureSource(Documents):
    """One source of a mixture."""

    weight: Literal["rows"] | Annotated[float, Gt(0)] = 1.0
    """share of the rows relative to the other weights, rounded to 1/1000; rows: the source's number of rows, for all
    sources, so that an epoch has each row once"""


class Data(Documents):
    factory: str | None = Field(default=None, pattern=FACTORY_PATTERN)
    """your own dataset: `module:function`, which gets the split (data.split or `train`) and returns a torch Dataset
    of dicts of tensors, or (dataset, collate function)"""
    buckets: dict[str, Annotated[tuple[Size, ...], Strict(False)]] = {}
    """data.factory: pad these keys of a row along dimension 0 to the smallest bucket that fits all of them, as in
    `{input_ids: [64, 128], labels: [64, 128]}`; XLA compiles one program per bucket; {}: no padding"""
    workers: int = Field(default=0, ge=0, le=MOST_WORKERS)
    """data.factory: worker processes that prefetch rows; 0: the run itself reads between steps"""
    mixture: tuple[MixtureSource, ...] = Field(default=(), strict=False)
    """several sources instead of one; their weights are shares of the rows"""
    tokenizer: str = "auto"
    """bytes, a folder with a tokenizer (transformers or tokenizer.json), or a hub id; auto: model.pretrained's,
    else bytes"""
    seq_len: int = Field(default=256, ge=1)
    """tokens per row"""
    packing: Literal["auto", "stream", "documents", "none"] = "auto"
    """stream: concatenate documents and cut into rows; documents: several whole documents per row, each attends to
    itself only (one per row if the model mixes them); none: one per row, padded; auto: stream for text, else
    documents"""
    eval_split: Annotated[str | None, BeforeValidator(_as_share)] = None
    """validation set: a share of the documents (`5%`, 0.05), a file, a glob, or a split of the dataset; null: none"""
    on_error: Literal["stop", "skip"] = "stop"
    """a document that can't be read or rendered: stop the run, or skip and count it"""
    long_rows: Literal["stop", "skip", "cut"] = "stop"
    """a document longer than seq_len in rows of documents: stop the run, skip and count it, or cut its end off; texts
    are cut into pieces, but for `cut`"""
    chat_template: str | None = None
    """in place of the tokenizer's: a file, a folder with one, or chatml, llama3, gemma, phi3, alpaca"""
    end: str | None = None
    """token of the tokenizer that ends answers and texts; null: its eos_token"""
    cache_dir: str | None = None
    """cache of tokenized documents, shared by all runs; null: portable_fsdp/tokens in the user's cache folder"""

    @property
    def resolved_packing(self) -> Literal["stream", "documents", "none"]:
        """`packing`, with `auto` resolved."""
        if self.packing != "auto":
            return self.packing
        return "stream" if all(part.format == "text" for part in self.mixture or (self,)) else "documents"

    @property
    def shapes(self) -> int:
        """Number of batch shapes; engines with static shapes compile a program for each."""
        return len(next(iter(self.buckets.values()), ("one",)))

    @field_validator("buckets")
    @classmethod
    def _sizes_ascend(cls, buckets: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        if not buckets:
            return buckets
        counts = {len(sizes) for sizes in buckets.values()}
        if len(counts) > 1 or not 1 <= max(counts) <= MOST_BUCKETS:
            actual = ", ".join(f"{len(sizes)} for {key}" for key, sizes in buckets.items())
            raise ValueError(f"expected the same number of sizes for each key, 1 to {MOST_BUCKETS}, found {actual}")
        by_bucket = list(zip(*buckets.values(), strict=True))
        for smaller, larger in itertools.pairwise(by_bucket):
            if smaller == larger or any(a > b for a, b in zip(smaller, larger, strict=True)):
                names = ", ".join(buckets)
                raise ValueError(
                    f"expected sizes that ascend from bucket to bucket, found {list(larger)} after {list(smaller)} for "
                    f"{names}: no row would use the later bucket"
                )
        return buckets

    @model_validator(mode="after")
    def _keys_go_together(self) -> Self:
        fields = Data.model_fields
        own_keys = ("factory", "buckets", "workers")
        if self.factory is not None:
            text_keys = [n for n in fields if n not in (*own_keys, "split", "eval_split", "cache_dir")]
            if changed := [name for name in text_keys if getattr(self, name) != fields[name].default]:
                raise ValueError(f"{changed[0]} applies to text only; data.factory makes its own rows")
            return self
        if self.buckets or self.workers:
            name = "buckets" if self.buckets else "workers"
            reason = "rows of text have one length, data.seq_len" if self.buckets else "a thread reads text fast enough"
            raise ValueError(f"{name} needs data.factory: {reason}")
        own = [name for name in Documents.model_fields if getattr(self, name) != fields[name].default]
        if self.mixture and own:
            raise ValueError(f"mixture replaces {', '.join(Documents.model_fields)}; set them in each of its sources")
        if (by_rows := [part.weight == "rows" for part in self.mixture]) and any(by_rows) and not all(by_rows):
            raise ValueError("mixture: weight: rows: all sources have it, or none; found both")
        if self.packing == "stream" and any(part.format != "text" for part in self.mixture or (self,)):
            raise ValueError("packing: stream needs format: text; set documents, none or auto")
        share = None if self.eval_split is None else share_held_out(self.eval_split)
        has_files = not self.mixture and self.source not in ("python_docs", "python_source")
        if self.eval_split is not None and share is None and not has_files:
            raise ValueError(
                f"eval_split: expected a share of the documents such as 5%, found {self.eval_split}: a file or a split "
                "needs a single source with files or splits"
            )
        return self


def share_held_out(eval_split: str) -> float | None:
    """Return 0.05 for `5%`, None for the name of a file or a split."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)%", eval_split)
    return float(match[1]) / 100 if match else None
