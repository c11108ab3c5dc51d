"""Each config of configs/ loads as it stands, and starts on small shapes with all its other keys."""

import importlib
import json
import math
from pathlib import Path

import pytest
from cli import PYTHON, committed, finish, launch, losses
from gallery import CONFIGS, GALLERY, PUBLISHED, SMALL, stated_plans
from PIL import Image
from test_pretrained_run import write_repository
from transformers import PreTrainedTokenizerFast, T5Config, T5ForConditionalGeneration

from portable_fsdp.config.load import load_config
from portable_fsdp.metrics.sinks import read_jsonl

pytestmark = pytest.mark.slow

T5 = {**PUBLISHED["google-t5/t5-large"], "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2}
T5 |= {"num_layers": 2, "num_decoder_layers": 2}
CHAT = [{"role": "user", "content": "the hub"}, {"role": "assistant", "content": "the model reads"}]


@pytest.fixture
def around(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder with what the configs find on the hub or on a disk, small."""
    tokenizer = write_repository(folder / "model")
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': CHAT})}\n" * 40)
    _write_images(folder / "data/imagenet")
    _write_t5(folder / "t5", tokenizer)
    (folder / "articles").mkdir()
    for split in ("train", "validation"):
        rows = [{"article": "the hub " * number, "highlights": "the model reads"} for number in range(1, 13)]
        (folder / f"articles/{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    monkeypatch.syspath_prepend(CONFIGS)
    summaries = importlib.import_module("t5_summaries")
    monkeypatch.setattr(summaries, "TOKENIZER", "t5")
    monkeypatch.setattr(summaries, "DATASET", ("articles",))
    return folder


def _write_images(folder: Path) -> None:
    for split in ("train", "validation"):
        for name, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            (folder / split / name).mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (300 + number, 240), colour).save(folder / split / name / f"{number}.png")


def _write_t5(folder: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder)
    sizes = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "vocab_size": len(tokenizer)}
    T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)).save_pretrained(folder)


def _words(config: Path) -> list[str]:
    return [f"--config={config}", *SMALL[config.stem], "train.stop_at=2", "run.dir=run"]


@pytest.mark.parametrize("config", GALLERY, ids=lambda path: path.stem)
def test_config_is_started(config: Path, around: Path) -> None:
    assert launch("--device=cpu", "--backend=native", *_words(config)) == 0
    assert committed(around / "run") == [2]
    assert all(math.isfinite(loss) for loss in losses(around / "run"))
    rows = read_jsonl(around / "run/metrics.jsonl")
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["grad_norm"] > 0 and row["lr"] > 0 for row in rows)


OTHERWISE_ON_XLA = {
    "qwen3_30b_a3b": ["model.experts=auto"],  # grouped products are GPUs' alone
    "t5_large": ["data.factory=t5_summaries:random", "model.pretrained=null", f"model.architecture={json.dumps(T5)}"],
}
EVERY_DAY = "vit_large"


@pytest.mark.xla
@pytest.mark.parametrize(
    "name", [name if name == EVERY_DAY else pytest.param(name, marks=pytest.mark.proof) for name in SMALL]
)
def test_config_is_started_on_xla(name: str, around: Path) -> None:
    """As on a slice, in a process of its own."""
    words = [*_words(CONFIGS / f"{name}.yaml"), *OTHERWISE_ON_XLA.get(name, [])]
    finish([*PYTHON, "--device=cpu", "--backend=xla", "--num_devices=2", *words], around)
    assert len(losses(around / "run")) == 2


def test_every_config_is_in_the_gallery_and_loads_as_it_stands() -> None:
    assert [path.stem for path in GALLERY] == sorted(SMALL)
    for path in GALLERY:
        config = load_config(path)
        assert config.run.name == path.stem
        if config.model.pretrained is not None and path.stem != "finetune_smollm2":
            assert config.model.pretrained in PUBLISHED
        if config.data.factory is not None:
            assert (CONFIGS / config.data.factory.partition(":")[0]).with_suffix(".py").is_file()


def test_every_config_states_its_plans() -> None:
    """But those that start on CPUs."""
    without = {path.stem for path in GALLERY if not stated_plans(path)}
    assert without == {"quickstart", "finetune_smollm2"}
