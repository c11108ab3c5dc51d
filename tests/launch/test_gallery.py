"""Each config of configs/ loads as it stands, and starts on small shapes with all its other keys."""

import importlib
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest
from cli import PYTHON, ROOT, committed, finish, launch, losses
from gallery import CONFIGS, GALLERY, PUBLISHED, SMALL, WITHOUT_PLAN, Stated, as_stated, plan_again, stated_plans
from PIL import Image
from test_pretrained_run import write_repository
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from portable_fsdp.convert.read import load_config
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.plan.target import parse_target

pytestmark = pytest.mark.slow

PAGE = (ROOT / "docs/gallery.md").read_text()

SMALL_T5 = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2}
T5 = PUBLISHED["google-t5/t5-large"] | SMALL_T5
CHAT = [{"role": "user", "content": "the hub"}, {"role": "assistant", "content": "the model reads"}]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the configs find on the hub or on a disk, small."""
    folder = tmp_path_factory.mktemp("found")
    tokenizer = write_repository(folder / "model")
    (folder / "chats.jsonl").write_text(f"{json.dumps({'messages': CHAT})}\n" * 40)
    tokenizer.pad_token = tokenizer.eos_token
    tokenizer.save_pretrained(folder / "t5")
    sizes: dict[str, Any] = {**T5, "vocab_size": len(tokenizer)}
    AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**sizes)).save_pretrained(folder / "t5")
    (folder / "articles").mkdir()
    for split in ("train", "validation"):
        rows = [{"article": "the hub " * number, "highlights": "the model reads"} for number in range(1, 13)]
        (folder / f"articles/{split}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
        for name, colour in (("blue", (0, 0, 255)), ("red", (255, 0, 0))):
            images = folder / "data/imagenet" / split / name
            images.mkdir(parents=True)
            for number in range(4):
                Image.new("RGB", (300 + number, 240), colour).save(images / f"{number}.png")
    return folder


@pytest.fixture
def around(found: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder."""
    for path in found.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(CONFIGS)
    summaries = importlib.import_module("t5_summaries")
    monkeypatch.setattr(summaries, "TOKENIZER", "t5")
    monkeypatch.setattr(summaries, "DATASET", ("articles",))
    return tmp_path


def _words(config: Path) -> list[str]:
    return [f"--config={config}", *SMALL[config.stem], *WITHOUT_PLAN, "train.stop_at=2", "run.dir=run"]


@pytest.mark.parametrize("config", GALLERY, ids=lambda path: path.stem)
def test_config_is_started(config: Path, around: Path) -> None:
    assert launch("--device=cpu", "--backend=native", *_words(config)) == 0
    assert committed(around / "run") == [2]
    assert [math.isfinite(loss) for loss in losses(around / "run")] == [True, True]
    rows = read_jsonl(around / "run/metrics.jsonl")
    assert all(row["grad_norm"] > 0 and row["lr"] > 0 for row in rows)


@pytest.mark.proof
@pytest.mark.xla
@pytest.mark.parametrize("name", SMALL)
def test_config_is_started_on_xla(name: str, around: Path) -> None:
    """As on a slice, in a new process."""
    words = _words(CONFIGS / f"{name}.yaml")
    if name == "t5_large":
        words += ["data.factory=t5_summaries:random", "model.pretrained=null", f"model.architecture={json.dumps(T5)}"]
    finish([*PYTHON, "--device=cpu", "--backend=xla", "--num_devices=2", *words], around)
    assert len(losses(around / "run")) == 2


def test_every_config_loads_as_it_stands_and_states_its_plans_as_the_page_does() -> None:
    """But those that start on CPUs state none."""
    assert [path.stem for path in GALLERY] == sorted(SMALL)
    for path in GALLERY:
        config = load_config(path)
        assert (config.run.name, config.run.dir) == (path.stem, f"runs/{path.stem}")
        if config.model.pretrained is not None and path.stem != "finetune_smollm2":
            assert config.model.pretrained in PUBLISHED
        if config.data.factory is not None:
            assert (CONFIGS / config.data.factory.partition(":")[0]).with_suffix(".py").is_file()
    assert {path.stem for path in GALLERY if not stated_plans(path)} == {"quickstart", "finetune_smollm2"}
    rows = re.findall(r"^\| \[(\w+)\]\(\.\./configs/(\w+)\.yaml\) \|.*\| (.*?) \|$", PAGE, re.MULTILINE)
    assert [(name, file) for name, file, _ in rows] == [(name, name) for name in SMALL]
    for name, _, cell in rows:
        plans = stated_plans(CONFIGS / f"{name}.yaml").values()
        stated = [f"`{plan.on}`: {plan.gib:.1f} of {plan.limit_gib:.1f} GiB" for plan in plans]
        assert cell == (", ".join(stated) or "none"), name


@pytest.mark.proof
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("config", "stated"),
    [
        pytest.param(config, stated, id=f"{config.stem}-{stated.on}", marks=[pytest.mark.xla] * is_slice)
        for config in GALLERY
        for stated in stated_plans(config).values()
        for is_slice in [parse_target(stated.on).hardware.kind == "tpu"]
    ],
)
def test_a_config_has_the_plan_that_it_states(config: Path, stated: Stated) -> None:
    """Planned anew: the verdict, and memory and the time of a step within 5 %."""
    plan = as_stated(plan_again(config, stated), stated.overrides)
    assert (plan.chosen, plan.verdict) == (stated.chosen, stated.verdict)
    assert plan.limit_gib == pytest.approx(stated.limit_gib, abs=0.01)
    assert (plan.gib, plan.seconds) == (pytest.approx(stated.gib, rel=0.05), pytest.approx(stated.seconds, rel=0.05))
