"""Tokenizing the standard library's source: our cache next to `datasets.map(num_proc=2)`, the same tokenizer and texts.

python benchmarks/tokenizing.py [--tokenizer=FOLDER] [--repeats=3] [--copies=1]

Each measurement is a process of its own, the two sides in turn. Imports, opening the tokenizer and (for datasets) the
saving of the texts as Arrow are not timed; reading, hashing, tokenizing and writing are. Without --tokenizer one of
32,768 ids is trained first. Needs the extra `data`.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any, cast

SIDES = ("ours", "theirs", "ours again")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--copies", type=int, default=1, help="how often the library is written, for a larger corpus")
    parser.add_argument("--side", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.side:
        seconds, tokens = {"ours": ours, "theirs": theirs, "ours again": ours}[options.side](options)
        print(json.dumps({"seconds": seconds, "tokens": tokens}))
        return
    with tempfile.TemporaryDirectory() as folder:
        compare(options, Path(folder))


def compare(options: argparse.Namespace, folder: Path) -> None:
    size = write_corpus(folder, options.copies)
    tokenizer = options.tokenizer or trained(folder)
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for repeat in range(options.repeats):
        for side in SIDES:
            found[side].append(measured(side, tokenizer, folder, repeat))
    tokens = sorted({int(one["tokens"]) for sides in found.values() for one in sides})
    print(f"{size / 1e6:.1f} MB, tokens {tokens}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    for side, values in found.items():
        seconds = [one["seconds"] for one in values]
        process = [one["process"] for one in values]
        print(
            f"{side:10}  median {median(seconds):6.2f} s ({', '.join(f'{one:.2f}' for one in seconds)}), "
            f"{size / 1e6 / median(seconds):6.1f} MB/s; whole process {median(process):.2f} s"
        )
    ratios = [b["seconds"] / a["seconds"] for a, b in zip(found["ours"], found["theirs"], strict=True)]
    print(
        f"our speed / that of datasets.map: median {median(ratios):.2f} ({', '.join(f'{one:.2f}' for one in ratios)})"
    )


def measured(side: str, tokenizer: Path, folder: Path, repeat: int) -> dict[str, float]:
    arguments = [f"--side={side}", f"--tokenizer={tokenizer}", f"--folder={folder / str(repeat)}"]
    (folder / str(repeat)).mkdir(exist_ok=True)
    began = time.perf_counter()
    ended = subprocess.run([sys.executable, __file__, *arguments], check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(ended.stdout.splitlines()[-1]) | {"process": time.perf_counter() - began}


def write_corpus(folder: Path, copies: int) -> int:
    """The library's files as text files and as an Arrow data set; their size in bytes."""
    import datasets

    from portable_fsdp.config.data import Documents
    from portable_fsdp.data.examples import Example
    from portable_fsdp.data.sources import open_source

    datasets.disable_progress_bars()
    source = open_source(Documents(source="python_source"))
    texts = [one.fields["text"] for one in source.read() if isinstance(one, Example)] * copies
    files = folder / "files"
    files.mkdir()
    for number, text in enumerate(texts):
        (files / f"{number:06d}.txt").write_bytes(text.encode())
    datasets.Dataset.from_dict({"text": texts}).save_to_disk(folder / "arrow")
    return sum(len(text.encode()) for text in texts)


def trained(folder: Path) -> Path:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer: Any = trainers.BpeTrainer(
        vocab_size=32_768, special_tokens=["<end>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    tokenizer.train([str(path) for path in sorted((folder / "files").iterdir())[:500]], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>").save_pretrained(folder / "tokenizer")
    return folder / "tokenizer"


def ours(options: argparse.Namespace) -> tuple[float, int]:
    from portable_fsdp.config.schema import Data
    from portable_fsdp.data.build import build_data
    from portable_fsdp.data.packing import PackedRows
    from portable_fsdp.data.tokenize import load_tokenizer

    load_tokenizer(str(options.tokenizer)).encode("x")
    keys: dict[str, Any] = {"source": "text", "path": str(options.folder.parent / "files" / "*.txt"), "seq_len": 1024}
    began = time.perf_counter()
    corpus = build_data(Data(**keys, tokenizer=str(options.tokenizer), cache_dir=str(options.folder / "cache")))
    seconds = time.perf_counter() - began
    assert isinstance(corpus.rows, PackedRows)
    return seconds, len(corpus.rows.tokens)


def theirs(options: argparse.Namespace) -> tuple[float, int]:
    import datasets
    from transformers import AutoTokenizer

    datasets.disable_progress_bars()
    tokenizer = AutoTokenizer.from_pretrained(options.tokenizer)
    texts = datasets.load_from_disk(options.folder.parent / "arrow")

    def tokenize(batch: dict[str, list[str]]) -> dict[str, Any]:
        # verbose=False: no warning that a document is longer than the model's context
        encoded = tokenizer(batch["text"], add_special_tokens=False, return_attention_mask=False, verbose=False)
        return {"input_ids": encoded["input_ids"]}

    began = time.perf_counter()
    mapped = cast(Any, texts).map(
        tokenize,
        batched=True,
        batch_size=100,
        num_proc=2,
        remove_columns=["text"],
        cache_file_name=str(options.folder / "mapped.arrow"),
    )
    seconds = time.perf_counter() - began
    lists = mapped.with_format("arrow")[:]["input_ids"]
    return seconds, sum(len(chunk.values) for chunk in lists.chunks) + len(mapped)  # our ends of documents


if __name__ == "__main__":
    main()
