"""Plants wrong operations (tests/parity/faulty_worker.py) in one engine, one at a time, and lets parity find them.

python benchmarks/parity_faults.py [--on=native:2,xla:4] [--only=NAME,...]

Each fault is in the second place of --on. Prints one row a fault, and ends with 1 unless parity names each.
"""

import argparse
import contextlib
import io
import os
import sys
from collections.abc import Generator, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import yaml

FAULTY = Path(__file__).parents[1] / "tests/parity"
sys.path.insert(0, str(FAULTY))

from faulty_worker import FAULTS  # noqa: E402

from portable_fsdp.convert.read import load_config  # noqa: E402
from portable_fsdp.parity.__main__ import main as parity  # noqa: E402
from portable_fsdp.parity.__main__ import run_place  # noqa: E402
from portable_fsdp.parity.record import (  # noqa: E402
    Certificate,
    Place,
    PlaceTask,
    RunTask,
    deviation,
    find_culprit,
)

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
    (folder / "corpus.txt").write_text(
        "".join(f"{n} times {n} is {n * n}, and the quick brown fox. " for n in range(900))
    )
    sections = {**CONFIG, "data": {**CONFIG["data"], "path": f"{folder}/corpus.txt"}, "run": {"dir": f"{folder}/run"}}
    (folder / "run.yaml").write_text(yaml.safe_dump(sections))
    return folder / "run.yaml"


@contextlib.contextmanager
def planted(fault: str) -> Generator[None]:
    """The environment of a faulty worker; `fault`: ENGINE:DEVICES:NAME,..., or nothing."""
    before = dict(os.environ)
    path = f"{FAULTY}:{os.environ.get('PYTHONPATH', '')}"
    os.environ.update({"OMP_NUM_THREADS": "1", "XLA_FLAGS": QUICK, "PYTHONPATH": path, "FAULT": fault})
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def certified(folder: Path, *words: str, fault: str = "") -> Result:
    """What the command says of the config."""
    out = io.StringIO()
    with planted(fault), contextlib.redirect_stdout(out):
        code = parity(
            [str(write_config(folder)), "--device=cpu", f"--out={folder}/out", *words], worker="faulty_worker"
        )
    return Result(Certificate.model_validate_json((folder / "out/certificate.json").read_bytes()), code, out.getvalue())


def rows(on: str, names: list[str]) -> Iterator[tuple[bool, str]]:
    """Whether the fault was named, and a row of the table. One process group runs all faults: a start takes longer."""
    first, other = ((engine, int(number)) for engine, number in (place.split(":") for place in on.split(",")))
    with TemporaryDirectory() as folder, planted(f"{other[0]}:{other[1]}:{','.join(names)}"):
        config = load_config(write_config(Path(folder)))
        task = RunTask(config=config.model_dump_json(), steps=20, records=True)
        reference, *wrong = (
            record
            for (engine, devices), count in ((first, 1), (other, len(names)))
            for record in run_place(
                PlaceTask(
                    place=Place(device="cpu", engine=engine, devices=devices),
                    runs=[task] * count,
                    module="faulty_worker",
                    out=f"{folder}/record",
                )
            )
        )
    for name, record in zip(names, wrong, strict=True):
        differs, culprit = deviation(config, reference, record), find_culprit(reference, record, 1e-5)
        is_named = culprit is not None and FAULTS[name].is_named(culprit)
        said = (
            f"{culprit.what} (step {culprit.step}: {culprit.relative:.0e}, before {culprit.before:.0e})"
            if culprit
            else ""
        )
        yield is_named, f"| {name} | {max(differs.losses):.0e} | {differs.first_step or 'none'} | {said} | {is_named} |"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--on", default="native:2,xla:4")
    parser.add_argument("--only", default=",".join(FAULTS))
    options = parser.parse_args()
    print(
        "| planted | loss differs by | first step beyond a bound | certificate | named |\n|---|---|---|---|---|",
        flush=True,
    )
    named: list[bool] = []
    for is_named, row in rows(options.on, options.only.split(",")):
        named.append(is_named)
        print(row, flush=True)
    return int(not all(named))


if __name__ == "__main__":
    sys.exit(main())
