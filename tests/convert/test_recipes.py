"""Files of axolotl and TRL that stand for a whole run: each value against what the tool's own source makes of it."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from foreign_files import plain

from portable_fsdp.config.describe import value_of
from portable_fsdp.convert.read import read_config
from portable_fsdp.runtime.errors import ConfigError

ALPACA = {"datasets": [{"path": "a/b", "type": "alpaca"}]}
AXOLOTL: dict[str, Any] = {
    "base_model": "a/m",
    "micro_batch_size": 2,
    "gradient_accumulation_steps": 4,
    "num_epochs": 4,
}
CHATS = {"path": "a/c", "type": "chat_template", "field_messages": "conversations"}
SHAREGPT = {"message_property_mappings": {"role": "from", "content": "value"}}
OWN = {"format": "[INST] {instruction} {input} [/INST]", "no_input_format": "[INST] {instruction} [/INST]"}
LORA = {"adapter": "lora", "lora_r": 8, "lora_alpha": 16}
TRL: dict[str, Any] = {"model_name_or_path": "a/m", "dataset_name": "a/b"}

# what the file has -> what it means on 4 devices
RECIPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "axolotl's defaults": (
        {"base_model": "a/m", **ALPACA},
        {
            **{"run.seed": 42, "data.seq_len": 512, "train.micro_batch": 1, "train.global_batch": 4, "train.epochs": 1},
            **{"optim.name": "adamw", "optim.weight_decay": 0, "optim.betas": (0.9, 0.999), "optim.eps": 1e-8},
            **{
                "optim.schedule": "cosine",
                "optim.min_lr_ratio": 1e-6,
                "optim.warmup_steps": "3%",
                "data.packing": "none",
            },
            **{"precision.compute": "bfloat16", "precision.master": "bfloat16", "data.long_rows": "skip"},
            **{"memory.gradient_checkpointing": "none", "checkpoint.every": None, "checkpoint.keep": 4},
            **{"train.max_grad_norm": 1, "train.eval_every": None, "data.eval_split": None, "model.lora": None},
        },
    ),
    "alpaca": (
        AXOLOTL | ALPACA | {"val_set_size": 0.05, "evals_per_epoch": 4, "saves_per_epoch": 1, "sample_packing": True},
        {
            **{"data.source": "huggingface", "data.path": "a/b", "data.format": "instruction", "data.prompt": "alpaca"},
            **{
                "train.global_batch": 32,
                "data.eval_split": "5%",
                "train.eval_every": "6.25%",
                "train.eval_on_start": True,
            },
            **{"checkpoint.every": "25%", "data.packing": "documents"},
        },
    ),
    "what trains": (
        AXOLOTL
        | ALPACA
        | {"unfrozen_parameters": ["^lm_head.weight$", "model.layers.2.*", "^model.language_model.layers.[0-9]5."]},
        {"model.train_only": ("lm_head.weight", "model.layers.2*", "model.language_model.layers.[0-9]5.*")},
    ),
    "adapters by an expression": (
        AXOLOTL | ALPACA | LORA | {"lora_target_modules": r"model.language_model.layers.[\d]+.(mlp|attn).(up|q)_proj"},
        {"model.lora": lambda lora: lora.targets == r"model.language_model.layers.[\d]+.(mlp|attn).(up|q)_proj"},
    ),
    "an expression beside weights of experts": (
        AXOLOTL
        | ALPACA
        | LORA
        | {"lora_target_modules": r".*\.q_proj", "lora_target_parameters": ["experts.down_proj"]},
        {"model.lora": lambda lora: lora.targets == r".*\.q_proj|.*\.(experts\.down_proj)"},
    ),
    "an expression in a list": (
        AXOLOTL | ALPACA | LORA | {"lora_target_modules": r"x\.layers\.(3|7)\.q_proj", "lora_target_linear": True},
        {"model.lora": lambda lora: lora.targets == ("all-linear",)},
    ),
    "a file held out": (
        AXOLOTL
        | {"datasets": [{"path": "a.jsonl", "ds_type": "json", "type": "alpaca"}], "evals_per_epoch": 1}
        | {"test_datasets": [{"path": "b.jsonl", "ds_type": "json", "type": "alpaca", "split": "train"}]},
        {"data.path": "a.jsonl", "data.eval_split": "b.jsonl", "train.eval_every": "25%", "data.prompt": "alpaca"},
    ),
    "a split held out": (
        AXOLOTL | {"datasets": [CHATS | {"split": "most"}], "test_datasets": [CHATS]},
        {"data.path": "a/c", "data.split": "most", "data.eval_split": "test", "train.eval_every": None},
    ),
    "one evaluation": (
        AXOLOTL | ALPACA | {"num_epochs": 1, "val_set_size": 0.1, "evals_per_epoch": 1},
        {"train.eval_every": "100%", "train.eval_on_start": True, "checkpoint.every": None},
    ),
    "no rows held out": (AXOLOTL | ALPACA | {"val_set_size": 0, "evals_per_epoch": 4}, {"train.eval_every": None}),
    "alpaca as a chat": (
        AXOLOTL
        | {"datasets": [{"path": "a/b", "type": "alpaca:chat", "split": "train[:20%]"}], "train_on_inputs": True},
        {"data.prompt": "alpaca-chat", "data.split": "train[:20%]", "data.train_on": "all"},
    ),
    "chats": (
        AXOLOTL | {"datasets": [{**CHATS, **SHAREGPT, "drop_system_message": True}], "chat_template": "llama3"},
        {
            **{"data.format": "chat", "data.columns": {"messages": "conversations"}, "data.ignore": ("system",)},
            **{"data.chat_template": "llama3", "data.train_on": "answers"},
        },
    ),
    "the tokenizer's template": (
        AXOLOTL
        | {"datasets": [CHATS], "chat_template": "tokenizer_default", "special_tokens": {"eos_token": "<|eot|>"}},
        {"data.chat_template": None, "data.end": "<|eot|>"},
    ),
    "a template that the model has": (
        AXOLOTL | {"datasets": [CHATS], "chat_template": "gemma3"},
        {"data.chat_template": "gemma3"},
    ),
    "roles": (
        AXOLOTL | {"datasets": [{**CHATS, "roles_to_train": ["user", "assistant"]}]},
        {"data.train_on": ("user", "assistant")},
    ),
    "a format of one's own": (
        AXOLOTL
        | {"datasets": [{"path": "a/b", "type": {**OWN, "field_instruction": "q", "system_prompt": "Be {brief}.\n"}}]},
        {
            "data.columns": {"instruction": "q"},
            "data.prompt": (
                "Be {{brief}}.\n[INST] {instruction} {input} [/INST]",
                "Be {{brief}}.\n[INST] {instruction} [/INST]",
            ),
        },
    ),
    "files": (
        AXOLOTL | {"datasets": [{"path": "json", "data_files": "rows.jsonl", "type": "completion", "field": "body"}]},
        {"data.source": "jsonl", "data.path": "rows.jsonl", "data.format": "text", "data.columns": {"text": "body"}},
    ),
    "several datasets": (
        AXOLOTL | {"datasets": [{"path": "a/b", "type": "alpaca"}, CHATS]},
        {
            "data.mixture": lambda parts: (
                [(part.path, part.format, part.weight) for part in parts]
                == [("a/b", "instruction", "rows"), ("a/c", "chat", "rows")]
            )
        },
    ),
    "adapters": (
        AXOLOTL | ALPACA | LORA | {"lora_target_linear": True, "lora_target_modules": ["q_proj", "experts"]},
        {
            "model.lora": lambda lora: (
                (lora.r, lora.alpha, lora.dropout, lora.targets) == (8, 16, 0, ("all-linear", "q_proj", "experts"))
            ),
            **{"precision.frozen": "bfloat16", "precision.master": "float32"},
        },
    ),
    "4 bits": (
        AXOLOTL | ALPACA | LORA | {"adapter": "qlora", "load_in_4bit": True, "lora_target_linear": True},
        {"precision.frozen": "nf4_double"},
    ),
    "4 bits without scales of 8": (
        AXOLOTL | ALPACA | LORA | {"adapter": "qlora", "bnb_config_kwargs": {"bnb_4bit_use_double_quant": False}},
        {"precision.frozen": "nf4"},
    ),
    "4 bits that axolotl doesn't make": (
        AXOLOTL | ALPACA | LORA | {"load_in_4bit": True, "lora_target_linear": True},
        {"precision.frozen": "bfloat16"},
    ),
    "adapters turned off": (AXOLOTL | ALPACA | {"lora_r": 8, "adapter": None}, {"model.lora": None}),
    "FSDP": (
        AXOLOTL | ALPACA | {"fsdp": ["full_shard", "auto_wrap"], "bf16": True},
        {"sharding.strategy": "FULL_SHARD", "precision.master": "float32", "precision.compute": "bfloat16"},
    ),
    "DeepSpeed by name": (
        AXOLOTL | ALPACA | {"deepspeed": "deepspeed_configs/zero3_bf16_cpuoffload_all.json"},
        {"sharding.strategy": "FULL_SHARD", "memory.cpu_offload": True, "precision.master": "float32"},
    ),
    "steps beside epochs": (
        AXOLOTL | ALPACA | {"max_steps": 5000, "optimizer": "paged_adamw_8bit", "cosine_min_lr_ratio": 0.1},
        {
            **{"train.steps": 5000, "train.epochs": None, "optim.warmup_steps": 100, "optim.name": "adamw8bit"},
            **{"optim.min_lr_ratio": 0.1, "checkpoint.every": "25%"},
        },
    ),
    "a batch of one device": (
        {"base_model": "a/m", **ALPACA, "micro_batch_size": 2, "batch_size": 8},
        {"train.micro_batch": 2, "train.global_batch": 32},
    ),
    "kernels and trackers": (
        AXOLOTL | ALPACA | {"liger_rope": True, "flash_attention": True, "wandb_project": "p", "wandb_entity": None},
        {"observe.trackers": ("wandb",), "model.attention": "auto"},
    ),
    "TRL's defaults": (
        TRL | {"dataset_text_field": "text"},
        {
            **{"data.source": "huggingface", "data.path": "a/b", "data.split": "train", "data.format": "text"},
            **{"data.seq_len": 1024, "data.packing": "none", "train.micro_batch": 8, "train.global_batch": 32},
            **{"train.epochs": 3, "optim.lr": 2e-5, "optim.schedule": "linear", "optim.min_lr_ratio": 1e-6},
            **{"optim.weight_decay": 0, "optim.betas": (0.9, 0.999), "precision.compute": "bfloat16", "run.seed": 42},
            **{"precision.master": "float32", "memory.gradient_checkpointing": "full", "checkpoint.every": 500},
            **{"train.log_every": 10, "data.long_rows": "cut", "train.eval_every": None, "data.eval_split": None},
        },
    ),
    "TRL's adapters": (
        TRL | {"dataset_text_field": "text", "use_peft": True, "lora_target_modules": ["q_proj"], "load_in_4bit": True},
        {
            "model.lora": lambda lora: (lora.r, lora.alpha, lora.dropout, lora.targets) == (16, 32, 0.05, ("q_proj",)),
            "precision.frozen": "nf4",
        },
    ),
    "TRL evaluates its test split": (
        TRL | {"dataset_text_field": "text", "eval_strategy": "steps", "eval_steps": 50, "packing": True},
        {"data.eval_split": "test", "train.eval_every": 50, "data.packing": "documents"},
    ),
    "a mixture of TRL's": (
        {
            "model_name_or_path": "a/m",
            "dataset_text_field": "text",
            "datasets": [{"path": "a/b"}, {"path": "a/c", "name": "x"}],
        },
        {"data.mixture": lambda parts: [part.path for part in parts] == ["a/b", "a/c:x"]},
    ),
}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_means_what_its_tool_makes_of_it(name: str, tmp_path: Path) -> None:
    given, expected = RECIPES[name]
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(given))
    config = read_config(tmp_path / "recipe.yaml", devices=4).config
    for option, value in expected.items():
        actual: Any = value_of(config, option)
        assert value(actual) if isinstance(value, Callable) else actual == value, (option, actual)


@pytest.mark.parametrize(
    ("form", "given", "counts"),
    [
        ("chat", {}, "all"),
        ("chat", {"assistant_only_loss": True}, "answers"),
        ("prompt_completion", {}, "answers"),
        ("prompt_completion", {"completion_only_loss": False}, "all"),
    ],
)
def test_what_counts_in_trl(form: str, given: dict[str, Any], counts: str, tmp_path: Path) -> None:
    (tmp_path / "trl.yaml").write_text(yaml.safe_dump(TRL | given))
    data = read_config(tmp_path / "trl.yaml", [f"data.format={form}"], devices=1).config.data
    assert (data.train_on, data.path, data.long_rows) == (counts, "a/b", "cut")


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a task": (
        AXOLOTL | {"datasets": [CHATS], "rl": "dpo"},
        "recipe.yaml:9: rl: dpo can't be honoured: this task is not",
    ),
    "another type": (
        AXOLOTL | {"datasets": [{"path": "a", "type": "jeopardy"}]},
        "datasets[0]: type: jeopardy is not built",
    ),
    "no such template": (
        AXOLOTL | {"datasets": [CHATS], "chat_template": "mine"},
        "chat_template: no template of this name",
    ),
    "other rows held out": (
        AXOLOTL | ALPACA | {"test_datasets": [CHATS]},
        "test_datasets: expected one file, or split",
    ),
    "rows held out twice": (
        AXOLOTL | ALPACA | {"test_datasets": ALPACA["datasets"], "val_set_size": 0.1},
        "test_datasets: expected one file, or split",
    ),
    "rows by number": (AXOLOTL | ALPACA | {"val_set_size": 100}, "a number of rows, 100, can't be held out"),
    "an unknown key": (AXOLOTL | ALPACA | {"learning_rat": 1}, "learning_rat: unknown key of axolotl"),
    "an unknown key of a dataset": (AXOLOTL | {"datasets": [CHATS | {"fiel": 1}]}, "datasets[0]: fiel is not read"),
    "an expression of what trains": (
        AXOLOTL | ALPACA | {"unfrozen_parameters": ["lm_head", "model.layers.4[4-9]+.mlp"]},
        "unfrozen_parameters: model.layers.4[4-9]+.mlp: a regular expression that no pattern says",
    ),
    "rows that train": (
        AXOLOTL | ALPACA | {"unfrozen_parameters": ["^model.embed_tokens.weight$[:32000]"]},
        "unfrozen_parameters: ^model.embed_tokens.weight$[:32000]: a range of rows",
    ),
    "frozen adapters": (
        AXOLOTL | ALPACA | LORA | {"unfrozen_parameters": ["^lm_head.*"]},
        "unfrozen_parameters: beside adapters axolotl trains nothing",
    ),
    "4 bits of torchao": (
        AXOLOTL | ALPACA | {"optimizer": "adamw_torch_4bit"},
        "Fix: set it to adamw_torch_fused or adamw_bnb",
    ),
    "another DeepSpeed file": (
        AXOLOTL | ALPACA | {"deepspeed": "mine.json"},
        "no such file, nor one of axolotl's own (zero1.json",
    ),
    "TRL without a form": (TRL, "dataset_name: TRL sees from the first row whether rows are texts"),
    "TRL without targets": (
        TRL | {"dataset_text_field": "t", "use_peft": True},
        "TRL takes peft's list for the architecture",
    ),
    "LLaMA-Factory": (
        {"model_name_or_path": "a", "stage": "sft", "dataset": "b"},
        "a config of LLaMA-Factory, which isn't read",
    ),
    "torchtune": (
        {"model": {"_component_": "torchtune.models.x"}, "epochs": 1},
        "a config of torchtune, which isn't read",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_said_is_refused_with_its_line(name: str, tmp_path: Path) -> None:
    given, message = REFUSED[name]
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(given, sort_keys=False))
    with pytest.raises(ConfigError) as error:
        read_config(path, devices=4)
    assert message in plain(str(error.value), tmp_path)


def test_without_devices_the_batch_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(AXOLOTL | ALPACA))
    with pytest.raises(ConfigError, match=r"Pass --num_devices=N, or set train\.global_batch"):
        read_config(path)
    assert read_config(path, ["train.global_batch=16"]).config.train.micro_batch == 2


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"zero_optimization": {"stage": 2}, "bf16": {"enabled": True}}, ("SHARD_GRAD_OP", False)),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, ("FULL_SHARD", True)),
        ({"gradient_clipping": "auto"}, ("NO_SHARD", False)),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}, "offload to nvme is not read"),
        ({"fp16": {"enabled": True}}, "fp16 is not read"),
        ({"optimizer": {"type": "Lamb"}}, "optimizer is not read"),
        ([], "expected the file as a JSON object"),
        ({"zero_optimization": None}, "expected zero_optimization as a JSON object"),
        ({"zero_optimization": {"stage": [3]}}, r"stage \[3\] is not read"),
        ({"zero_optimization": {"offload_param": {"device": ["cpu"]}}}, "offload to .* is not read"),
    ],
)
def test_a_file_of_deepspeed_is_read_whatever_its_name(tmp_path: Path, content: Any, expected: Any) -> None:
    own = tmp_path / "zero1.json"  # a name that axolotl ships with another stage
    own.write_text(json.dumps(content))
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(AXOLOTL | ALPACA | {"deepspeed": str(own)}))
    if isinstance(expected, str):
        with pytest.raises(ConfigError, match=expected):
            read_config(path, devices=4)
    else:
        config = read_config(path, devices=4).config
        assert (config.sharding.strategy, config.memory.cpu_offload) == expected


def test_llama_factorys_adapters_have_its_rank_and_twice_as_much_alpha(tmp_path: Path) -> None:
    path = tmp_path / "trainer.yaml"
    words = ["train.steps=1", "model.pretrained=m", "data.source=python_docs"]
    for given, expected in (({"lora_rank": 4}, (4, 8)), ({"lora_target": "all"}, (8, 16))):
        path.write_text(yaml.safe_dump({"learning_rate": 1e-4, "per_device_train_batch_size": 1, **given}))
        lora = read_config(path, words, devices=1).config.model.lora
        assert lora is not None
        assert (lora.r, lora.alpha, lora.dropout) == (*expected, 0)


WHOLE_RUN = """
base_model: model
adapter: lora
lora_r: 2
lora_alpha: 4
lora_target_linear: true
datasets:
  - {path: json, data_files: rows.jsonl, type: alpaca}
  - {path: json, data_files: chats.jsonl, type: chat_template}
chat_template: chatml
special_tokens: {eos_token: <|im_end|>}
val_set_size: 0.2
sequence_len: 256
sample_packing: true
micro_batch_size: 1
gradient_accumulation_steps: 2
num_epochs: 1
learning_rate: 0.01
bf16: false
evals_per_epoch: 2
logging_steps: 1
"""


@pytest.mark.proof
@pytest.mark.xla
def test_a_recipe_of_axolotl_trains_as_written_on_both_engines(tmp_path: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = {
        token: at for at, token in enumerate(["<s>", "<|im_start|>", "<|im_end|>", *map(chr, range(32, 127)), "\n"])
    }
    made: Any = Tokenizer(models.WordLevel(words, unk_token="<s>"))
    made.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=made, bos_token="<s>").save_pretrained(tmp_path / "model")
    sizes: Any = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, **sizes)).save_pretrained(tmp_path / "model")
    rows = [{"instruction": f"Add {at} and 1.", "output": str(at + 1)} for at in range(24)]
    turns = [
        [{"role": "user", "content": f"{at}+1?"}, {"role": "assistant", "content": str(at + 1)}] for at in range(24)
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "chats.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for messages in turns))
    (tmp_path / "recipe.yaml").write_text(WHOLE_RUN)
    curves: list[list[float]] = []
    for engine in ("native", "xla"):
        flags = ["--device=cpu", f"--backend={engine}", "--num_devices=2", "--config=recipe.yaml", f"run.dir={engine}"]
        subprocess.run([sys.executable, "-m", "portable_fsdp.launch", *flags], cwd=tmp_path, check=True, timeout=300)
        lines = (tmp_path / engine / "metrics.jsonl").read_text().splitlines()
        curves.append([entry["loss"] for entry in map(json.loads, lines) if "loss" in entry])
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert curves[0][-1] < curves[0][0]
