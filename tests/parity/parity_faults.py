"""Wrong operations (faulty_worker.py), planted in one engine one at a time, for parity to find."""

import contextlib
import io
import os
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import yaml
from faulty_worker import FAULTS

from portable_fsdp.convert.read import load_config
from portable_fsdp.parity.__main__ import main as parity
from portable_fsdp.parity.__main__ import run_place
from portable_fsdp.parity.record import Certificate, Place, PlaceTask, RunTask, deviation, find_culprit

MODEL = {
    **{"model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128},
    **{"num_hidden_layers": 3, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64},
    **{"tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": 0},
}
CONFIG = {
    "model": {"architecture": MODEL},
    "data": {"source": "text", "tokenizer": "bytes", "seq_len": 32},
    "train": {"steps": 50, "global_batch": 8, "micro_batch": 2},
    "optim": {"lr": 2e-3},
}
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


class Result(NamedTuple):
    certificate: Certificate
    exit_code: int
    text: str


def write_config(folder: Path) -> Path:
    """A small model on a text of its own; returns the file."""
    text = "".join(f"{n} times {n} is {n * n}, and the quick brown fox. " for n in range(900))
    (folder / "corpus.txt").write_text(text)
    sections = {**CONFIG, "data": {**CONFIG["data"], "path": f"{folder}/corpus.txt"}, "run": {"dir": f"{folder}/run"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    return folder / "run.yaml"


def planted(fault: str) -> Any:
    """Context with the environment of a faulty worker; `fault`: ENGINE:DEVICES:NAME,..., or nothing."""
    path = f"{Path(__file__).parent}:{os.environ.get('PYTHONPATH', '')}"
    return patch.dict(os.environ, {"OMP_NUM_THREADS": "1", "XLA_FLAGS": QUICK, "PYTHONPATH": path, "FAULT": fault})


def certified(folder: Path, *words: str) -> Result:
    """What the command says of the config."""
    out, words = io.StringIO(), (str(write_config(folder)), "--device=cpu", f"--out={folder}/out", *words)
    with planted(""), contextlib.redirect_stdout(out):
        code = parity([*words], worker="faulty_worker")
    return Result(Certificate.model_validate_json((folder / "out/certificate.json").read_bytes()), code, out.getvalue())


def rows(on: str, names: list[str]) -> Iterator[tuple[bool, str]]:
    """Whether the fault was named, and a row of the table. One process group runs all faults: a start takes longer."""
    words = [place.split(":") for place in on.split(",")]
    places = [Place(device="cpu", engine=engine, devices=int(number)) for engine, number in words]
    with TemporaryDirectory() as folder, planted(f"{places[1]}:{','.join(names)}"):
        config = load_config(write_config(Path(folder)))
        task = RunTask(config=config.model_dump_json(), steps=20, records=True)
        runs = zip(places, (1, len(names)), strict=True)
        tasks = [PlaceTask(place=place, runs=[task] * count, module="faulty_worker") for place, count in runs]
        reference, *wrong = (record for each in tasks for record in run_place(each))
    for name, record in zip(names, wrong, strict=True):
        differs, culprit = deviation(config, reference, record), find_culprit(reference, record, 1e-5)
        is_named = culprit is not None and FAULTS[name].is_named(culprit)
        size = f"{culprit.relative:.0e}, before {culprit.before:.0e}" if culprit else ""
        said = f"{culprit.what} (step {culprit.step}: {size})" if culprit else ""
        yield is_named, f"| {name} | {max(differs.losses):.0e} | {differs.first_step or 'none'} | {said} | {is_named} |"
