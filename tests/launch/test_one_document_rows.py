"""Models that can't keep the documents of a row apart: one document per row, the same after a resume."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from cli import STARTS, finish, launch, losses
from torch.nn.functional import cross_entropy
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp import explain, load_config
from portable_fsdp.data.packing import sample_indices
from portable_fsdp.train.preflight import fit_packing

_SIZES: dict[str, Any] = {
    **{"vocab_size": 256, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2},
}
_LINEAR = {"linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2, "linear_num_value_heads": 4}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8, "mamba_chunk_size": 8}
MODELS: dict[str, dict[str, Any]] = {
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5_text": {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8, **_LINEAR},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "num_local_experts": 0, **_MAMBA},
}
TEXTS = [("What? " * (1 + number % 4), f"{number} " * (1 + number % 3)) for number in range(20)]
SEQ_LEN, BATCH, STEPS = 48, 4, 8  # steps: more than an epoch of five
CONFIG: dict[str, Any] = {
    "run": {"dir": "run"},
    "model": {"pretrained": "model", "allow": ["data.tokenizer"]},
    "data": {"source": "jsonl", "path": "rows.jsonl", "format": "prompt_completion", "seq_len": SEQ_LEN}
    | {"packing": "documents", "tokenizer": "bytes"},
    "train": {"steps": STEPS, "global_batch": BATCH, "micro_batch": 2, "max_grad_norm": None},
    "optim": {"name": "sgd", "lr": 0.5, "weight_decay": 0.0, "schedule": "constant", "warmup_steps": 0},
}


def plain_losses(model: Any) -> list[float]:
    """A plain loop: each document alone, without padding."""
    optimizer, curve = torch.optim.SGD(model.parameters(), 0.5), list[float]()
    order = sample_indices(0, np.arange(STEPS * BATCH), len(TEXTS))
    for step in range(STEPS):
        total, count = torch.zeros(()), 0
        for prompt, completion in (TEXTS[number] for number in order[step * BATCH : (step + 1) * BATCH]):
            ids = torch.tensor([[*f"{prompt}{completion}".encode(), 0]])
            begin = len(prompt.encode()) - 1
            total = total + cross_entropy(model(ids).logits[0, begin:-1], ids[0, begin + 1 :], reduction="sum")
            count += ids.shape[1] - begin - 1
        optimizer.zero_grad()
        (total / count).backward()
        optimizer.step()
        curve.append(float(total.detach()) / count)
    return curve


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    rows = [{"prompt": prompt, "completion": completion} for prompt, completion in TEXTS]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "packed.yaml").write_text(yaml.safe_dump(CONFIG))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.xla
@pytest.mark.parametrize("name", ["lfm2", *(pytest.param(n, marks=pytest.mark.proof) for n in MODELS if n != "lfm2")])
def test_one_document_rows_train_as_a_plain_loop_and_resume_on_another_engine(
    name: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **_SIZES, **MODELS[name]))
    model.save_pretrained("model")
    assert launch("--device=cpu", "--backend=native", "--config=packed.yaml", "train.stop_at=3") == 0
    written = capsys.readouterr().err
    padding = 1 - sum(len(f"{prompt}{completion}") + 1 for prompt, completion in TEXTS) / (len(TEXTS) * SEQ_LEN)
    assert written.count("keep the documents of a row apart") == 1
    assert f"Each row holds one document: {100 * padding:.0f}% of all tokens are padding\n" in written
    manifest = json.loads((folder / "run/checkpoints/step-00000003/manifest.json").read_text())
    assert manifest["config"]["data"]["packing"] == "none"
    finish([*STARTS["xla"], "--config=packed.yaml"], folder)  # two devices
    assert losses(folder / "run") == pytest.approx(plain_losses(model), rel=2e-5)

    assert explain.main(["--config=packed.yaml", "--rows=3"]) == 0
    shown = capsys.readouterr().out
    assert "Each row holds one document" in shown
    assert shown.count(" 1 document(s), ") == 3


def test_only_models_that_mix_documents_have_one_in_a_row(folder: Path) -> None:
    def fitted(*overrides: str) -> tuple[str, str]:
        config, problem = fit_packing(load_config("packed.yaml", ["model={}", *overrides]))
        return config.data.packing, problem.partition(":")[0]

    def architecture(name: str) -> str:
        return f"model.architecture={json.dumps({'model_type': name, **_SIZES, **MODELS.get(name, {})})}"

    for name, mixing in {"lfm2": "Lfm2", "qwen3_5_text": "Qwen3_5", "granitemoehybrid": "GraniteMoeHybrid"}.items():
        assert fitted(architecture(name)) == ("none", f"{mixing}ForCausalLM doesn't keep the documents of a row apart")
    assert fitted(architecture("llama")) == ("documents", "")
    mistral = [architecture("mistral"), "model.attention=sdpa"]  # transformers' own drops its window beside our mask
    _, problem = fit_packing(load_config("packed.yaml", ["model={}", *mistral]))
    assert problem.endswith("(with model.attention=sdpa; auto may keep them apart)")
    assert fitted(architecture("lfm2"), "data.packing=none") == ("none", "")
    assert fitted("model.pretrained=no_such_folder") == ("documents", ""), "the run says what is wrong"
