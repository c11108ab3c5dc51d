"""Small models and their checkpoints in the formats of other tools, for the tests of imports and exports."""

import warnings
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from plain_backend import PlainBackend, checkpoints, named_tensors, with_random_state
from small_models import ARCHITECTURES
from torch.distributed.checkpoint.state_dict_saver import save as torch_dcp_save
from transformers import AutoConfig, AutoModelForCausalLM

from portable_fsdp.backends.contract import Partition
from portable_fsdp.checkpoint.store import Reader
from portable_fsdp.formats.base import ExportOptions
from portable_fsdp.formats.exporting import export_checkpoint

Tensors = dict[str, torch.Tensor]

MODELS = {name: ARCHITECTURES[name] for name in ("llama", "qwen3", "gpt2", "mamba2")}
"""The config of the last one holds an infinity, which JSON lacks."""
TIED = ARCHITECTURES["llama_tied"]
WIDE = {**MODELS["llama"], "hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
GGML = gguf.GGMLQuantizationType


def build(architecture: dict[str, Any], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**architecture))
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases must differ from their defaults
            parameter.copy_(torch.randn_like(parameter))
    return model


def trained(architecture: dict[str, Any], seed: int = 0) -> tuple[Any, torch.optim.Optimizer]:
    """A model and an AdamW with random content."""
    return with_random_state(build(architecture, seed), seed)


def save(folder: Path, model: Any, optimizer: torch.optim.Optimizer | None = None, step: int = 3, **run: Any) -> Path:
    """A checkpoint of a model of transformers. `run`: of `Checkpoints`."""
    arguments = {"model_config": model.config.to_dict(), **run}
    state = optimizer or torch.optim.SGD(model.parameters())
    return checkpoints(folder, PlainBackend(devices=2), **arguments).save(step, model, state, (0, 0))


def export(checkpoint: Path, kind: str, target: Path, **options: Any) -> None:
    export_checkpoint(checkpoint, kind, target, ExportOptions(**options))


def tensors_in(path: Path) -> Tensors:
    """Verify a checkpoint and return all its tensors."""
    with Reader(path) as reader:
        reader.verify(Partition(0, 1))
        return {key: reader.read_whole(key) for key in reader.manifest.tensors}


def weights(model: Any) -> Tensors:
    return named_tensors(model, torch.optim.SGD(model.parameters()))


def assert_same(actual: Tensors, expected: Tensors) -> None:
    assert actual.keys() == expected.keys()
    for key, tensor in expected.items():
        assert actual[key].dtype == tensor.dtype, key
        assert torch.equal(actual[key], tensor), key


def dcp_save(state: Any, folder: Path) -> None:
    with warnings.catch_warnings():  # torch warns that it saves in a single process, and reads a TypedStorage
        warnings.simplefilter("ignore")
        torch_dcp_save(state, checkpoint_id=folder, no_dist=True)


def write_gguf(path: Path, model: Any, quantized: Any = GGML.F32, architecture: str | None = None) -> None:
    """Write as convert_hf_to_gguf.py does: q and k of llama permuted, matrices quantised, norms in float32."""
    config = model.config
    is_llama = config.model_type == "llama"
    writer = gguf.GGUFWriter(path, architecture or config.model_type)
    writer.add_name("test")
    for add, value in (
        (writer.add_context_length, config.max_position_embeddings),
        (writer.add_embedding_length, config.hidden_size),
        (writer.add_block_count, config.num_hidden_layers),
        (writer.add_feed_forward_length, config.intermediate_size),
        (writer.add_head_count, config.num_attention_heads),
        (writer.add_head_count_kv, config.num_key_value_heads),
        (writer.add_layer_norm_rms_eps, config.rms_norm_eps),
        (writer.add_vocab_size, config.vocab_size),
        (writer.add_key_length, config.head_dim),
    ):
        add(value)
    kind_of_names = gguf.MODEL_ARCH.LLAMA if is_llama else gguf.MODEL_ARCH.QWEN3
    names = gguf.get_tensor_name_map(kind_of_names, config.num_hidden_layers)
    for fqn, tensor in weights(model).items():
        array = tensor.numpy()
        heads = {"q": config.num_attention_heads, "k": config.num_key_value_heads}
        if is_llama and fqn.endswith(("q_proj.weight", "k_proj.weight")):
            count = heads[fqn.split(".")[-2][0]]
            array = array.reshape(count, 2, -1, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        kind = quantized if array.ndim > 1 else GGML.F32
        data = gguf.quantize(np.ascontiguousarray(array), kind)
        writer.add_tensor(str(names.get_name(fqn, (".weight", ".bias"))), data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
