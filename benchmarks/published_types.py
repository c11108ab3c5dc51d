"""Trains a tiny model of each causal type of transformers, and compares the losses with those of a plain PyTorch loop.

python benchmarks/published_types.py [TYPE ...] [--xla] [--seconds=N]

Both loops start from one folder that transformers wrote, on the same rows: float32, eager attention in the plain loop,
AdamW, gradients clipped at 1, three steps. Each type runs in a child process with bounds of time and memory. `--xla`:
types that are equal on native, on one XLA device. Without names all types run. Writes results/published_types.json and
.md, and ends with 1 if a type is silently different or ends with a traceback.
"""

import argparse
import dataclasses
import datetime
import json
import math
import os
import re
import resource
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TOKENIZERS_PARALLELISM": "false"}

import torch
from measuring import RESULTS, markdown
from torch.nn import functional as F
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import __version__ as transformers_version
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from portable_fsdp.config.load import make_config
from portable_fsdp.observe.callbacks import Callback, StepEnd
from portable_fsdp.runtime.child import Worker, WorkerFailedError
from portable_fsdp.runtime.errors import PortableFSDPError
from portable_fsdp.train.loop import train

RESULT = RESULTS / "published_types.json"
VOCABULARY, TOKENS, STEPS, LR = 128, 24, 3, 1e-3
BOUND, BOUND_XLA = 1e-5, 1e-4  # of a loss
MEMORY = 64 * 2**30  # of addresses: each read of a tensor maps its file
RATE: dict[str, Any] = {"lr": LR, "betas": (0.9, 0.95), "weight_decay": 0.0}

# ------------------------------------------------------------------------------------------------------- small configs

SIZES: dict[int, str] = {
    1: "topk_group",
    2: "num_experts_per_tok linear_num_key_heads swa_num_key_value_heads moe_topk moe_k num_layers_per_stack "
    "n_input_layers n_recurrent_layers n_output_layers "
    "encoder_layers decoder_layers num_encoder_layers num_decoder_layers n_layer n_layers num_layers num_blocks depth "
    "n_group num_expert_group",
    4: "num_attention_heads decoder_attention_heads encoder_attention_heads n_head n_heads num_heads attention_heads "
    "num_encoder_attention_heads num_decoder_attention_heads num_experts n_routed_experts num_local_experts "
    "moe_num_experts index_n_heads linear_num_value_heads linear_num_heads swa_num_attention_heads",
    8: "head_dim global_head_dim dim_head attention_head_size d_head qk_rope_head_dim qk_nope_head_dim v_head_dim "
    "index_head_dim linear_key_head_dim linear_value_head_dim linear_head_dim swa_head_dim rotary_dim kv_channels d_kv "
    "sliding_window sliding_window_size window_size attention_window_size local_attention attention_chunk_size "
    "chunk_size mamba_chunk_size mamba_d_state state_size ssm_state_size index_topk hidden_size_per_layer_input "
    "laurel_rank patch_size adapter_rank local_attention_window_len mamba_num_heads mamba_head_dim",
    16: "kv_lora_rank q_lora_rank o_lora_rank qk_head_dim time_step_rank mamba_dt_rank",
    32: "hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_size lru_width word_embed_proj_dim "
    "moe_intermediate_size image_size hidden_size_global out_hidden_size backbone_hidden_size router_hidden_size",
    64: "intermediate_size decoder_ffn_dim encoder_ffn_dim ffn_dim ffn_hidden_size dff dim_ff d_inner d_ff mlp_dim "
    "feed_forward_size shared_expert_intermediate_size expert_ffn_hidden_size intermediate_size_mlp "
    "shared_intermediate_size dense_intermediate_size shared_experts_intermediate_size "
    "moe_shared_expert_intermediate_size max_position_embeddings n_positions n_ctx max_seq_len max_target_positions "
    "original_max_position_embeddings context_length model_max_length max_source_positions",
    VOCABULARY: "vocab_size vocab_size_per_layer_input decoder_vocab_size codebook_size unpadded_vocab_size",
}
SIZE_OF = {key: size for size, keys in SIZES.items() for key in keys.split()}
IDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
MOST_LAYERS = 8

_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8}
_SWA = {f"swa_{key}": size for key, size in {"num_attention_heads": 4, "num_key_value_heads": 4}.items()} | {
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
    "swa_head_dim": 16,
    "swa_qk_nope_head_dim": 8,
    "swa_v_head_dim": 8,
}
_GEMMA4 = {"global_head_dim": 16, "num_kv_shared_layers": 0}
_QWEN3_5 = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
_QWEN4: dict[str, Any] = {"indexer_n_heads": 4, "indexer_kv_heads": 1, "indexer_head_dim": 8, "indexer_budget": 8} | {
    "indexer_compress_ratio": 2,
}
ADJUSTED: dict[str, dict[str, Any]] = {
    "bailing_hybrid": {"n_group": 2, "num_experts": 4},
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "granitemoehybrid": _MAMBA | {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]},
    "mamba2": {"num_heads": 8},
    "kolibri1": {"num_local_experts": 4, "num_experts": 4},
    "blt": {"encoder_hash_byte_group_vocab": 64},
    "cohere_compass_text": {"rope_parameters": {"full_attention": _ROPE, "sliding_attention": _ROPE}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 64, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "dory": {
        "num_hidden_layers": 8,
        "n_recurrent_layers": 4,
        "layer_types": ["sliding_attention", "mlp"] * 2 + ["full_attention", "mlp"] * 2,
    },
    "dots1": {"n_shared_experts": 1},
    "dots3_note_text": _SWA,
    "dots3_note": {
        "text_config": _SWA,
        "vision_config": {"adapter_in_dim": 32},
        "audio_config": {"adapter_input_size": 32},
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "num_hidden_layers": 2,
        "activation_sparsity_pattern": [0.0, 0.0],
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "gemma4_text": _GEMMA4,
    "gemma4_unified_text": _GEMMA4,
    "gemma4": {"text_config": _GEMMA4},
    "gemma4_unified": {"text_config": _GEMMA4},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "hrm_text": {"num_layers_per_stack": 1, "num_hidden_layers": 8},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "use_mamba_kernels": False},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "qwen3_5": {"text_config": _QWEN3_5},
    "qwen3_5_moe": {"text_config": _QWEN3_5},
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": _QWEN3_5,
    "qwen3_next": _QWEN3_5,
    "lara_mini": _QWEN3_5,
    "qwen4_exp": {"text_config": _QWEN3_5 | _QWEN4},
    "qwen4_exp_text": _QWEN3_5 | _QWEN4,
    "recurrent_gemma": {"num_hidden_layers": 3},
    "xmod": {"languages": ["en_XX"], "default_language": "en_XX"},
    "zamba": {"num_hidden_layers": 6, "layers_block_type": ["linear_attention", "hybrid"] * 3},
    "reformer": {"axial_pos_shape": [4, 6], "axial_pos_embds_dim": [16, 16]}
    | {"local_attn_chunk_length": 8, "lsh_attn_chunk_length": 8},
}
"""Type -> keys that the rule above doesn't get right."""


def small(config: Any, layers: int | None) -> dict[str, Any]:
    """The keys that make a default config small. `layers`: also cut lists by layer to that many."""
    keys: dict[str, Any] = {}
    whole = config.to_dict()
    values = {field.name: whole.get(field.name, vars(config).get(field.name)) for field in dataclasses.fields(config)}
    values |= {key: getattr(config, key, None) for key in config.sub_configs}
    depth = values.get("num_hidden_layers")
    kinds = values.get("layer_types") or values.get("layers_block_type") or []
    kept = min(MOST_LAYERS, max([2, *(kinds.index(kind) + 1 for kind in set(kinds))]))
    heads, groups = values.get("num_attention_heads"), values.get("num_key_value_heads")
    for key, value in values.items():
        if key in config.sub_configs:
            if hasattr(value, "sub_configs"):
                keys[key] = {"model_type": value.model_type, **small(value, layers)}
        elif key == "num_hidden_layers" and value:
            keys[key] = kept
        elif key == "num_key_value_heads" and (value is None or isinstance(value, int)):
            keys[key] = 4 if groups == heads else 2
        elif value is None and key in ("head_dim", "num_experts_per_tok", "n_routed_experts"):
            keys[key] = SIZE_OF[key]
        elif key.endswith(("_token_id", "_token_index")) and value is not None:
            keys[key] = IDS.get(key, VOCABULARY - 4)
        elif "drop" in key and isinstance(value, float):
            keys[key] = 0.0
        elif isinstance(value, list) and depth and len(value) == depth and layers:
            keys[key] = value[:kept]
        elif isinstance(value, int) and not isinstance(value, bool) and value > SIZE_OF.get(key, value):
            keys[key] = SIZE_OF[key]
        elif key == "is_decoder":
            keys[key] = True  # else it is an encoder
    return keys


def save(model_type: str, folder: Path) -> None:
    """Save a tiny model with weights off their defaults."""
    config, problem = None, None
    for layers in (None, 1):
        try:
            default = CONFIG_MAPPING[model_type]()
            keys = small(default, layers)
            for key, value in ADJUSTED.get(model_type, {}).items():
                keys[key] = keys[key] | value if key in default.sub_configs else value
            config = AutoConfig.for_model(model_type, **keys)
            torch.manual_seed(0)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            count = sum(weight.numel() for weight in model.parameters())
            if count > 20e6:
                big = max(model.named_parameters(), key=lambda item: item[1].numel())
                raise ValueError(f"{count:,} parameters, {big[0]} {[*big[1].shape]}")
            model = AutoModelForCausalLM.from_config(config)
            break
        except Exception as error:
            problem = error
    else:
        raise problem or AssertionError
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            scale = 0.1 if weight.dim() > 1 else 0.02  # scalings may be small (nGPT's)
            weight.add_(torch.randn(weight.shape, generator=generator) * scale)
    model.save_pretrained(folder)


# ------------------------------------------------------------------------------------------------------ the two loops


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(4, 120, (TOKENS + 1,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids[:-1], "labels": ids[1:]}


def data(split: str) -> Rows:
    return Rows()


def plain_losses(folder: Path) -> list[float]:
    """The losses of a plain loop."""
    chosen = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **chosen).train()
    optimizer = torch.optim.AdamW(model.parameters(), **RATE)
    losses: list[float] = []
    ids, labels = (torch.stack([Rows()[index][key] for index in range(4)]) for key in ("input_ids", "labels"))
    for _ in range(STEPS):
        loss = F.cross_entropy(model(input_ids=ids, use_cache=False).logits.flatten(0, 1), labels.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_([weight for weight in model.parameters() if weight.grad is not None], 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class Losses(Callback):
    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_step(self, step: StepEnd) -> None:
        self.losses.append(step.loss)


def our_losses(folder: Path, backend: str, **sharding: Any) -> list[float]:
    sections = {
        "run": {"dir": str(folder / f"run{len(sharding)}")},
        "model": {"pretrained": str(folder)},
        "data": {"factory": "published_types:data"},
        "train": {"task": "causal_lm", "steps": STEPS, "global_batch": 4, "micro_batch": 4, "log_every": 1},
        "optim": {"schedule": "constant", **RATE},
        "sharding": sharding,
    }
    seen = Losses()
    train(make_config(**sections), device="cpu", backend=backend, num_devices=1, callbacks=[seen])
    return seen.losses


# ---------------------------------------------------------------------------------------------------- one child a type


def outcome(model_type: str, backend: str, native: dict[str, Any]) -> dict[str, Any]:
    """Run both loops in this process, and describe how they compare. `native`: its result, for another backend."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        try:
            save(model_type, folder)
            plain = native["plain"] if native else plain_losses(folder)  # xla takes no backward before its engine
            if not all(map(math.isfinite, plain)):
                raise ValueError(f"the losses aren't finite: {plain}")
        except Exception as error:
            return {"outcome": "transformers", "says": described(error)}
        advice = {key: native[key] for key in ("wrap_classes",) if key in native}
        if "draws" in native:
            draw_constants()
        try:
            try:
                ours = our_losses(folder, backend, **advice)
            except PortableFSDPError as error:
                if not (match := re.search(r"Set sharding\.wrap_classes to .*: (.+)\.$", str(error))):
                    raise
                advice = {"wrap_classes": match[1].split(" or ")}  # does it help?
                ours = our_losses(folder, backend, **advice)
            if not native and differ(plain, ours) > BOUND and differ(plain, plain_losses(folder)) > 0:
                draw_constants()
                plain, ours = plain_losses(folder), our_losses(folder, backend, plan={}, **advice)
                advice["draws"] = "constants"
        except PortableFSDPError as error:
            return {"outcome": "refused", "says": str(error).replace(name, "FOLDER"), "plain": plain}
        except MemoryError:
            return {"outcome": "transformers", "says": "MemoryError"}
        except Exception as error:
            return {"outcome": "traceback", "says": described(error), "plain": plain}
        apart = differ(plain, ours)
        is_equal = apart <= (BOUND if backend == "native" else BOUND_XLA)
        return {"outcome": "equal" if is_equal else "silent", "apart": apart, "plain": plain, "ours": ours, **advice}


def draw_constants() -> None:
    """Let a model draw the same numbers in both loops."""
    for name in ("exponential_", "uniform_", "bernoulli_", "normal_"):
        setattr(torch.Tensor, name, lambda self, *_, **__: self.fill_(1.0))
    torch.rand_like, randn = torch.ones_like, torch.randn
    torch.randn = lambda *at, **of: randn(*at, **of, generator=torch.Generator().manual_seed(0))


def differ(plain: list[float], ours: list[float]) -> float:
    return max(abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, plain, strict=True))


def described(error: Exception) -> str:
    at = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {str(error).strip()[:600]} ({Path(at.filename).name}:{at.lineno})"


def in_child(seconds: int, *arguments: Any) -> dict[str, Any]:
    """Run `outcome` in a separate process."""
    try:
        with Worker(seconds) as worker:
            return worker("published_types:outcome", *arguments)
    except WorkerFailedError as error:
        says = f"took more than {seconds} s" if error.ended.how == "late" else error.ended.last_lines
        return {"outcome": "no end", "says": says}


ON = ("native", "xla")
BAD = ("silent", "traceback", "no end")


def read() -> dict[str, dict[str, Any]]:
    return json.loads(RESULT.read_text()) if RESULT.is_file() else {}


def write(results: dict[str, dict[str, Any]]) -> None:
    RESULT.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
    table: list[list[str]] = []
    counts = {backend: Counter(row[backend]["outcome"] for row in results.values() if backend in row) for backend in ON}
    for name, row in sorted(results.items()):
        cells = [f"{row[on]['outcome']} ({row[on].get('apart', 0):.0e})" if on in row else "" for on in ON]
        cells = [cell.replace(" (0e+00)", "") for cell in cells]
        notes = [f"{on}: {row[on]['says']}" for on in ON if "says" in row.get(on, {})]
        notes += (
            [f"with sharding.wrap_classes={row['native']['wrap_classes']}"] if "wrap_classes" in row["native"] else []
        )
        notes += ["random draws replaced by constants in both loops"] if "draws" in row["native"] else []
        text = " ".join("; ".join(notes).replace("|", "/").split())
        table.append([f"`{name}`", *cells, text[:400]])
    equal = counts["native"]["equal"]
    lines = [
        "# Types of causal models beside a plain PyTorch loop",
        "",
        f"`python benchmarks/published_types.py`, {datetime.date.today()}, transformers {transformers_version}, torch "
        f"{torch.__version__.partition('+')[0]}, CPU. Three steps of a tiny model of each type, float32; in "
        f"parentheses the largest difference of a loss. Bounds: {BOUND:g} (native), {BOUND_XLA:g} (xla).",
        "",
        *(f"- {on}: {', '.join(f'{count} {kind}' for kind, count in counts[on].most_common())}" for on in ON),
        f"- xla has run for {sum(counts['xla'].values())} of the {equal} types that are equal on native",
        "- transformers: its own loop fails at this size, with the error in the last column; refused: our sentence",
        "",
    ]
    RESULT.with_suffix(".md").write_text("\n".join([*lines, *markdown(("type", *ON, "message"), table)]) + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("types", nargs="*")
    parser.add_argument("--xla", action="store_true")
    parser.add_argument("--seconds", type=int, default=90)
    parser.add_argument("--rest", action="store_true", help="only types without a result")
    chosen = parser.parse_args()
    backend = "xla" if chosen.xla else "native"
    for model_type in chosen.types or MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        row = read().get(model_type, {})
        is_done = chosen.rest and backend in row
        if is_done or (chosen.xla and row.get("native", {}).get("outcome") != "equal"):
            continue
        began = time.perf_counter()
        result = in_child(chosen.seconds, model_type, backend, row["native"] if chosen.xla else {})
        says = str(result.get("says", result.get("apart")))[:200].replace("\n", " | ")
        print(f"{model_type:25} {result['outcome']:13} {time.perf_counter() - began:5.1f} s  {says}", flush=True)
        results = read()  # another start may have written others
        results.setdefault(model_type, {})[backend] = result
        write(results)
    bad = [name for name, row in read().items() if row.get(backend, {}).get("outcome") in BAD]
    print(*bad)
    return bool(bad)


if __name__ == "__main__":
    sys.exit(main())
