"""Samples of a run: its files, the export that writes the same, a resume, refusals. Engines: test_contract.py."""

from pathlib import Path
from typing import Any

import pytest
from cases import TINY

from portable_fsdp.backends.open import open_backend
from portable_fsdp.config.schema import Config, Model
from portable_fsdp.data.tokenize import ByteTokenizer, load_tokenizer
from portable_fsdp.formats import exporting
from portable_fsdp.observe.callbacks import Callback, SamplesEnd, StepEnd
from portable_fsdp.observe.run_files import read_jsonl
from portable_fsdp.runtime.errors import PortableFSDPError
from portable_fsdp.sample import sample
from portable_fsdp.train.build import build_training
from portable_fsdp.train.evaluate import Sampler
from portable_fsdp.train.loop import train

SAMPLED: dict[str, Any] = {"sample_every": 3, "sample_prompts": ["The ", "Grüße"], "sample_tokens": 12}
LENGTH = r"\(data\.seq_len - train\.sample_tokens\)"


def config(folder: Path, *, export: bool = False, **settings: Any) -> Config:
    train = {"steps": 8, "global_batch": 2, **settings}
    checkpoint = {"every": 4, "export": export}
    return Config.model_validate(TINY | {"run": {"dir": str(folder)}, "train": train, "checkpoint": checkpoint})


class Hooks(Callback):
    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def on_samples(self, samples: SamplesEnd) -> None:
        self.seen.append(("samples", samples.step))

    def on_step(self, step: StepEnd) -> None:
        self.seen.append(("step", step.step))


@pytest.mark.slow
def test_a_run_samples_what_its_export_writes(tmp_path: Path) -> None:
    hooks, folder = Hooks(), tmp_path / "run"
    assert train(config(folder, **SAMPLED, stop_at=6), device="cpu", callbacks=[hooks]) == 0
    for step in (3, 6):
        assert hooks.seen.index(("samples", step)) + 1 == hooks.seen.index(("step", step))
    (folder / "checkpoints/step-00000006").rename(tmp_path / "lost")  # so that it resumes from step 4
    assert train(config(folder, **SAMPLED, export=True), device="cpu", exporter=exporting) == 0
    rows = read_jsonl(folder / "samples.jsonl")
    assert [(row["step"], row["prompt"]) for row in rows] == [(s, p) for s in (3, 6, 8) for p in ("The ", "Grüße")]
    for row in rows[-2:]:
        [text] = sample(folder / "export", row["prompt"], count=1, tokens=12, temperature=0, seed=0)
        assert text == row["text"] != row["prompt"]
    events = [event for event in read_jsonl(folder / "events.jsonl") if event["event"] == "samples"]
    assert [(event["step"], event["seconds"] > 0) for event in events] == [(step, True) for step in (3, 6, 6, 8)]


def test_a_text_ends_with_an_end_and_a_request_to_stop_ends_all(tmp_path: Path) -> None:
    model = Model(architecture=TINY["model"]["architecture"] | {"eos_token_id": list(range(256))})
    settings = config(tmp_path, **SAMPLED).model_copy(update={"model": model})
    with open_backend(settings, device="cpu", backend="native") as backend:
        training = build_training(settings, backend, 256)
        sampler = Sampler(backend, training.model, ByteTokenizer(), settings.train, 32)
        assert [len(text) for text in sampler() or []] == [5, 6]
        assert sampler(lambda: True) is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sample_every": 2}, r"train\.sample_every=2.*without train\.sample_prompts"),
        ({"sample_prompts": ["a"]}, r"train\.sample_prompts.*without train\.sample_every"),
        ({**SAMPLED, "sample_prompts": ["a", ""]}, r"the prompt '' has no tokens; give some text"),
        ({**SAMPLED, "sample_prompts": ["a" * 21]}, rf"expected at most 20 tokens in each {LENGTH}, found 21 in 'aaaa"),
        ({**SAMPLED, "sample_tokens": 32}, r"train\.sample_tokens: expected less than data\.seq_len=32, found 32"),
    ],
)
def test_refused_before_the_first_step(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(PortableFSDPError, match=f"(?s){message}"):
        train(config(tmp_path / "run", **settings), device="cpu")
    assert not (tmp_path / "run/metrics.jsonl").exists()


def test_ids_become_text_as_in_the_exported_tokenizer(tmp_path: Path) -> None:
    ids = [0, *"Grüße €".encode()[:-1], 0, 255, 65]
    load_tokenizer("bytes").save(tmp_path)
    assert load_tokenizer("bytes").decode(ids) == load_tokenizer(str(tmp_path)).decode(ids) == "Grüße \ufffd\ufffdA"
