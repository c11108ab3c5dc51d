"""trl's SFTTrainer and DPOTrainer on both engines, against the same class alone with the same global batch."""

import os
import random
import warnings
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple, cast

import pytest
from jobs import device_count
from trainer_runs import CASES, example_losses, model_of, plain_class
from trainer_runs import _counting as counting
from workers import GetWorkers, Group, JobFailed, marked

TWO, XLA = Group("gloo", 2), Group("xla", 4)
BATCH, LENGTH = 8, 24


class Rows(NamedTuple):
    """A kind of rows, and the settings of its config."""

    kind: str
    settings: Mapping[str, Any] = {}
    lora: bool = False
    reference: bool = False  # a model of its own; else adapters are switched off, or trl loads the model once more
    tolerance: float = 1e-5


FIXED = {"max_length": LENGTH, "pad_to_multiple_of": LENGTH}
PAIRS = {"dataloader_drop_last": True}
EVALUATES = {"eval_strategy": "steps", "eval_steps": 5}
KINDS = {
    "texts": Rows("text", FIXED),
    "bf16": Rows("text", FIXED | {"bf16": True}, tolerance=2e-3),
    "accumulation": Rows("text", FIXED | {"gradient_accumulation_steps": 2}),
    "metrics": Rows("text", FIXED | EVALUATES),
    "bfd": Rows("text", {"packing": True, "max_length": LENGTH}),
    "wrapped": Rows("text", {"packing": True, "packing_strategy": "wrapped", "max_length": LENGTH}),
    "chats": Rows("messages", FIXED),
    "assistants": Rows("messages", FIXED | {"assistant_only_loss": True}),
    "completions": Rows("completion", FIXED | EVALUATES),
    "lora": Rows("text", FIXED, lora=True),
    "lora bf16": Rows("text", FIXED | {"bf16": True}, lora=True, tolerance=2e-3),
    "dpo": Rows("chosen", PAIRS, reference=True),
    "dpo lora": Rows("chosen", PAIRS, lora=True),
    "dpo loaded": Rows("chosen", PAIRS),
    "dpo bf16": Rows("chosen", PAIRS | {"bf16": True, "learning_rate": 1e-3}, reference=True, tolerance=2e-3),
}
IN_TEST_LATEST = ("completions", "lora bf16", "dpo lora")
RUNS = [
    *(marked(TWO, name, in_suite=name in IN_TEST_LATEST) for name in KINDS),
    *(marked(XLA, name, in_suite=False) for name in KINDS if name != "bfd" and "dpo" not in name),
]
REFUSED = {
    "bfd": (XLA, {}, "packing_strategy='wrapped'"),
    "texts": (XLA, {"pad_to_multiple_of": None}, "each length would be another program"),
    "dpo": (XLA, {}, "by a mask, whose size XLA compiles anew"),
    "dpo lora": (TWO, {"dataloader_drop_last": False}, "dataloader_drop_last=True"),
    "dpo loaded": (TWO, {"precompute_ref_log_probs": True}, "before the engine has sharded it"),
}


def tokenizer() -> Any:
    """A token for each letter, and a chat template."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = ["<pad>", "<eos>", "<user>", "<assistant>", *"0123456789+=."]
    made = Tokenizer(models.WordLevel({name: at for at, name in enumerate(names)}, unk_token="<pad>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    extra: Any = {"additional_special_tokens": ["<user>", "<assistant>"]}
    words = PreTrainedTokenizerFast(tokenizer_object=made, pad_token="<pad>", eos_token="<eos>", **extra)
    answer = "{% generation %}{{ m['content'] + '<eos>' }}{% endgeneration %}"
    turn = f"{{% if m['role'] == 'user' %}}{{{{ m['content'] }}}}{{% else %}}{answer}{{% endif %}}"
    words.chat_template = f"{{% for m in messages %}}{{{{ '<' + m['role'] + '>' }}}}{turn}{{% endfor %}}"
    return words


def rows_of(kind: str) -> Any:
    from datasets import Dataset

    draw, rows = random.Random(0), list[dict[str, Any]]()
    for _ in range(90):
        left, right = draw.randrange(1000), draw.randrange(100)
        question, answer = f"{left}+{right}=", f"{left + right}" + "." * draw.randrange(8)
        turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        made: dict[str, Any] = {"text": {"text": question + answer}, "messages": {"messages": turns}}
        made["completion"] = {"prompt": question, "completion": answer}
        made["chosen"] = {"prompt": question, "chosen": answer, "rejected": answer[::-1] + "+"}
        rows.append(made[kind])
    return Dataset.from_list(rows)


def accuracy(prediction: Any) -> dict[str, float]:
    labels = prediction.label_ids[:, 1:]
    hits = (prediction.predictions[:, :-1].argmax(-1) == labels)[labels != -100]
    return {"accuracy": float(hits.mean()), "rows": len(labels)}


def run(name: str, folder: Path, alone: bool, resume: str | None = None, **more: Any) -> tuple[dict[str, float], int]:
    """Step and name -> number, and how many programs XLA has compiled in the last quarter."""
    case = KINDS[name]
    plain_class()  # keeps XLA out of transformers
    import trl

    from portable_fsdp.trainers import on_portable

    name_of_trl = "DPO" if case.kind == "chosen" else "SFT"
    config, trainer = (getattr(trl, f"{name_of_trl}{end}") for end in ("Config", "Trainer"))
    each = BATCH // (1 if alone else device_count())
    settings: dict[str, Any] = {"max_steps": 10, "logging_steps": 1, "save_strategy": "no", "report_to": []}
    settings |= {"learning_rate": 1e-2, "bf16": False, "use_cpu": True, "disable_tqdm": True, **case.settings, **more}
    sizes = {"per_device_train_batch_size": each, "per_device_eval_batch_size": each}
    extra: dict[str, Any] = {"ref_model": model_of(CASES["plain"])} if case.reference else {}
    if case.lora:
        from peft import LoraConfig

        extra["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    if name == "metrics":
        extra["compute_metrics"] = accuracy
    model: Any = model_of(CASES["plain"])
    model.config._name_or_path = str(folder)  # where trl loads a reference from
    if alone:
        model.save_pretrained(folder)
    if "eval_strategy" in settings:
        extra["eval_dataset"] = rows_of(case.kind).select(range(21))
    args = config(output_dir=str(folder), **sizes, **settings)
    data: dict[str, Any] = {"train_dataset": rows_of(case.kind), "processing_class": tokenizer()}
    if not alone:
        start = {"device": os.environ["GROUP_DEVICE"], "backend": os.environ["GROUP_BACKEND"]}
        trainer = on_portable(trainer, **start, num_devices=device_count())
    made: Any = trainer(model=model, args=args, **data, **extra)
    programs: list[int] = []
    try:
        if not alone:
            made.add_callback(counting(programs))
        made.train(resume_from_checkpoint=resume)
    finally:
        if not alone:
            made.accelerator.end_training()
    names = ("loss", "eval_loss", "eval_accuracy", "eval_rows", "grad_norm", "num_tokens")
    log = made.state.log_history
    curve = {f"{entry['step']} {key}": entry[key] for entry in log for key in names if key in entry}
    return curve, 0 if alone else programs[-1] - programs[len(programs) * 3 // 4]


@cache
def curve_alone(name: str) -> dict[str, float]:
    with TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return run(name, Path(folder), alone=True)[0]


@pytest.mark.parametrize(("group", "name"), RUNS)
def test_the_losses_are_those_of_trl_alone(group: Group, name: str, workers: GetWorkers, tmp_path: Path) -> None:
    expected = curve_alone(name)
    cast(Any, model_of(CASES["plain"])).save_pretrained(tmp_path)
    for curve, late in workers(group).run(run, name=name, folder=tmp_path, alone=False):
        assert curve.keys() == expected.keys()
        for key, value in expected.items():
            if not (key.endswith("grad_norm") and name.endswith("bf16")):  # bfloat16's norm has other roundings
                tolerance = 1e-4 if key.endswith("grad_norm") and "dpo" in name else KINDS[name].tolerance
                assert curve[key] == pytest.approx(value, rel=tolerance), key
        assert late == 0


@pytest.mark.proof
@pytest.mark.xla
def test_a_run_goes_on_elsewhere_and_comes_back(workers: GetWorkers, tmp_path: Path) -> None:
    name, saves = "accumulation", {"save_strategy": "steps", "save_steps": 4}
    expected, checkpoint = curve_alone(name), None
    for at, group in enumerate((TWO, XLA, TWO)):
        arguments = {"folder": tmp_path / str(at), "resume": checkpoint, **saves}
        curves = [curve for curve, _ in workers(group).run(run, name=name, alone=False, **arguments)]
        checkpoint = str(tmp_path / str(at) / f"checkpoint-{4 if at == 0 else 8}")
        for curve in curves:
            numbers = {key: value for key, value in curve.items() if not key.endswith("num_tokens")}  # trl's restart
            assert numbers == pytest.approx({key: expected[key] for key in numbers}, rel=1e-5)
            assert len(numbers) == 20


@pytest.mark.parametrize(
    ("group", "name", "settings", "message"),
    [marked(at[0], name, *at[1:], in_suite=at[0] == TWO) for name, at in REFUSED.items()],
)
def test_what_an_engine_cannot_do_is_refused(
    group: Group, name: str, settings: dict[str, Any], message: str, workers: GetWorkers, tmp_path: Path
) -> None:
    with pytest.raises(JobFailed) as failure:
        workers(group).run(run, name=name, folder=tmp_path, alone=False, **settings)
    assert failure.value.kind == "ConfigError"
    assert message in failure.value.message


@pytest.mark.proof
@pytest.mark.xla
def test_the_example_learns_and_resumes_elsewhere(tmp_path: Path) -> None:
    losses = example_losses("sft", tmp_path)
    assert losses[-1] < losses[0] * 0.75
