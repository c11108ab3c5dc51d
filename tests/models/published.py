"""Published models: what their config.json holds, their number of parameters, and their rotary frequencies.

Written by hand, with the keys that the files have (those of older transformers, and those that no class reads).
"""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Published:
    """`rotary`: (base, rotated dimensions) of each `inv_freq` of the model, before scaling; () where there is none."""

    parameters: int  # a tied weight once
    rotary: tuple[tuple[float, int], ...]
    config: dict[str, Any]


def _file(model_type: str, name: str, dtype: str = "bfloat16", version: str = "4.40.0", **keys: Any) -> dict[str, Any]:
    """With what every file has."""
    return {
        "architectures": [name],
        "model_type": model_type,
        "torch_dtype": dtype,
        "transformers_version": version,
        "use_cache": True,
        **keys,
    }


def _sizes(vocab: int, hidden: int, inner: int, layers: int, heads: int, kv: int | None = None) -> dict[str, Any]:
    sizes = {"vocab_size": vocab, "hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": layers}
    return sizes | {"num_attention_heads": heads} | ({} if kv is None else {"num_key_value_heads": kv})


_LLAMA_LIKE: dict[str, Any] = {"hidden_act": "silu", "initializer_range": 0.02, "attention_dropout": 0.0}
_QWEN: dict[str, Any] = _LLAMA_LIKE | {"use_sliding_window": False, "rms_norm_eps": 1e-6}
_LLAMA_31_SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0} | {
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}

PUBLISHED: dict[str, Published] = {
    "llama 3.1 8b": Published(
        8_030_261_248,
        ((500_000.0, 128),),
        _file("llama", "LlamaForCausalLM", **_sizes(128256, 4096, 14336, 32, 32, 8), **_LLAMA_LIKE)
        | {"attention_bias": False, "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5}
        | {"bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "max_position_embeddings": 131072}
        | {"rope_scaling": _LLAMA_31_SCALING, "rope_theta": 500000.0, "tie_word_embeddings": False},
    ),
    "tinyllama 1.1b": Published(
        1_100_048_384,
        ((10_000.0, 64),),
        _file("llama", "LlamaForCausalLM", "float32", **_sizes(32000, 2048, 5632, 22, 32, 4), **_LLAMA_LIKE)
        | {"pretraining_tp": 1, "rms_norm_eps": 1e-5, "rope_scaling": None, "tie_word_embeddings": False}
        | {"max_position_embeddings": 2048},
    ),
    "smollm2 135m": Published(
        134_515_008,
        ((100_000.0, 64),),
        _file("llama", "LlamaForCausalLM", **_sizes(49152, 576, 1536, 30, 9, 3), **_LLAMA_LIKE)
        | {"attention_bias": False, "is_llama_config": True, "rope_interleaved": False, "rope_scaling": None}
        | {"max_position_embeddings": 8192, "mlp_bias": False, "pretraining_tp": 1, "rms_norm_eps": 1e-5}
        | {"rope_theta": 100000, "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0},
    ),
    "qwen 2.5 0.5b": Published(
        494_032_768,
        ((1_000_000.0, 64),),
        _file("qwen2", "Qwen2ForCausalLM", **_sizes(151936, 896, 4864, 24, 14, 2), **_QWEN)
        | {"bos_token_id": 151643, "eos_token_id": 151643, "max_position_embeddings": 32768, "max_window_layers": 24}
        | {"rope_theta": 1000000.0, "sliding_window": 32768, "tie_word_embeddings": True, "use_mrope": False},
    ),
    "qwen 2.5 7b": Published(
        7_615_616_512,
        ((1_000_000.0, 128),),
        _file("qwen2", "Qwen2ForCausalLM", **_sizes(152064, 3584, 18944, 28, 28, 4), **_QWEN)
        | {"max_position_embeddings": 131072, "max_window_layers": 28, "rope_theta": 1000000.0}
        | {"sliding_window": 131072, "tie_word_embeddings": False, "use_mrope": False},
    ),
    "qwen 3 0.6b": Published(
        596_049_920,
        ((1_000_000.0, 128),),
        _file("qwen3", "Qwen3ForCausalLM", **_sizes(151936, 1024, 3072, 28, 16, 8), **_QWEN)
        | {"attention_bias": False, "head_dim": 128, "max_position_embeddings": 40960, "max_window_layers": 28}
        | {"rope_scaling": None, "rope_theta": 1000000, "sliding_window": None, "tie_word_embeddings": True},
    ),
    "qwen 3 30b a3b": Published(
        30_532_122_624,
        ((1_000_000.0, 128),),
        _file("qwen3_moe", "Qwen3MoeForCausalLM", **_sizes(151936, 2048, 6144, 48, 32, 4), **_QWEN)
        | {"attention_bias": False, "decoder_sparse_step": 1, "head_dim": 128, "max_position_embeddings": 40960}
        | {"max_window_layers": 48, "mlp_only_layers": [], "moe_intermediate_size": 768, "norm_topk_prob": True}
        | {"num_experts": 128, "num_experts_per_tok": 8, "output_router_logits": False, "rope_scaling": None}
        | {"rope_theta": 1000000.0, "router_aux_loss_coef": 0.001, "sliding_window": None},
    ),
    "qwen 1.5 moe a2.7b": Published(
        14_315_784_192,
        ((1_000_000.0, 128),),
        _file("qwen2_moe", "Qwen2MoeForCausalLM", **_sizes(151936, 2048, 5632, 24, 16, 16), **_QWEN)
        | {"decoder_sparse_step": 1, "max_position_embeddings": 8192, "max_window_layers": 21, "num_experts": 60}
        | {"moe_intermediate_size": 1408, "norm_topk_prob": False, "num_experts_per_tok": 4, "rope_theta": 1000000.0}
        | {"output_router_logits": False, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 5632}
        | {"sliding_window": 32768, "tie_word_embeddings": False},
    ),
    "mistral 7b v0.1": Published(
        7_241_732_096,
        ((10_000.0, 128),),
        _file("mistral", "MistralForCausalLM", **_sizes(32000, 4096, 14336, 32, 32, 8))
        | {"hidden_act": "silu", "initializer_range": 0.02, "max_position_embeddings": 32768, "rms_norm_eps": 1e-5}
        | {"rope_theta": 10000.0, "sliding_window": 4096, "tie_word_embeddings": False},
    ),
    "mixtral 8x7b": Published(
        46_702_792_704,
        ((1_000_000.0, 128),),
        _file("mixtral", "MixtralForCausalLM", **_sizes(32000, 4096, 14336, 32, 32, 8), **_LLAMA_LIKE)
        | {"max_position_embeddings": 32768, "num_experts_per_tok": 2, "num_local_experts": 8, "sliding_window": None}
        | {"output_router_logits": False, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0}
        | {"router_aux_loss_coef": 0.02, "tie_word_embeddings": False},
    ),
    "pythia 160m": Published(
        162_322_944,
        ((10_000.0, 16),),
        _file("gpt_neox", "GPTNeoXForCausalLM", "float16", "4.24.0", **_sizes(50304, 768, 3072, 12, 12))
        | {"hidden_act": "gelu", "initializer_range": 0.02, "layer_norm_eps": 1e-5, "max_position_embeddings": 2048}
        | {"rotary_emb_base": 10000, "rotary_pct": 0.25, "tie_word_embeddings": False, "use_parallel_residual": True},
    ),
    "gpt-neox 20b": Published(
        20_554_567_680,
        ((10_000.0, 24),),
        _file("gpt_neox", "GPTNeoXForCausalLM", "float16", "4.24.0", **_sizes(50432, 6144, 24576, 44, 64))
        | {"attention_probs_dropout_prob": 0, "hidden_act": "gelu_fast", "hidden_dropout_prob": 0}
        | {"layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "rotary_emb_base": 10000, "rotary_pct": 0.25},
    ),
    "phi 2": Published(
        2_779_683_840,
        ((10_000.0, 32),),
        _file("phi", "PhiForCausalLM", "float16", "4.37.0", **_sizes(51200, 2560, 10240, 32, 32, 32))
        | {"_name_or_path": "microsoft/phi-2", "attention_dropout": 0.0, "embd_pdrop": 0.0, "hidden_act": "gelu_new"}
        | {"layer_norm_eps": 1e-5, "max_position_embeddings": 2048, "partial_rotary_factor": 0.4}
        | {"qk_layernorm": False, "resid_pdrop": 0.1, "rope_scaling": None, "rope_theta": 10000.0},
    ),
    "phi 3 mini 4k": Published(
        3_821_079_552,
        ((10_000.0, 96),),
        _file("phi3", "Phi3ForCausalLM", **_sizes(32064, 3072, 8192, 32, 32, 32), **_LLAMA_LIKE)
        | {"_name_or_path": "Phi-3-mini-4k-instruct", "attention_bias": False, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        | {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}, "max_position_embeddings": 4096}
        | {"original_max_position_embeddings": 4096, "rms_norm_eps": 1e-5, "rope_scaling": None}
        | {"rope_theta": 10000.0, "sliding_window": 2047, "tie_word_embeddings": False},
    ),
    "phi 4": Published(
        14_659_507_200,
        ((250_000.0, 128),),
        _file("phi3", "Phi3ForCausalLM", **_sizes(100352, 5120, 17920, 40, 40, 10), **_LLAMA_LIKE)
        | {"attention_bias": False, "embd_pdrop": 0.0, "max_position_embeddings": 16384, "resid_pdrop": 0.0}
        | {"original_max_position_embeddings": 16384, "rms_norm_eps": 1e-5, "rope_scaling": None}
        | {"rope_theta": 250000, "sliding_window": None, "tie_word_embeddings": False},
    ),
    "phi 4 mini": Published(
        3_836_021_760,
        ((10_000.0, 96),),
        _file("phi3", "Phi3ForCausalLM", **_sizes(200064, 3072, 8192, 32, 24, 8), **_LLAMA_LIKE)
        | {"attention_bias": False, "full_attn_mod": 1, "interpolate_factor": 1, "lm_head_bias": False}
        | {"max_position_embeddings": 131072, "mlp_bias": False, "original_max_position_embeddings": 4096}
        | {"partial_rotary_factor": 0.75, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 262144}
        | {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.5] * 48}}
        | {"pad_token_id": 199999, "bos_token_id": 199999, "eos_token_id": 199999, "tie_word_embeddings": True},
    ),
    "stablelm 3b 4e1t": Published(
        2_795_443_200,
        ((10_000.0, 20),),
        _file("stablelm", "StableLmForCausalLM", **_sizes(50304, 2560, 6912, 32, 32, 32))
        | {"hidden_act": "silu", "layer_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10000}
        | {"partial_rotary_factor": 0.25, "tie_word_embeddings": False, "use_qkv_bias": False},
    ),
    "stablelm 2 1.6b": Published(
        1_644_515_328,
        ((10_000.0, 16),),
        _file("stablelm", "StableLmForCausalLM", "float16", **_sizes(100352, 2048, 5632, 24, 32, 32))
        | {"hidden_act": "silu", "layer_norm_eps": 1e-5, "max_position_embeddings": 4096, "rope_theta": 10000}
        | {"partial_rotary_factor": 0.25, "tie_word_embeddings": False, "use_qkv_bias": True},
    ),
    "gemma 2b": Published(
        2_506_172_416,
        ((10_000.0, 256),),
        _file("gemma", "GemmaForCausalLM", **_sizes(256000, 2048, 16384, 18, 8, 1))
        | {"attention_bias": False, "attention_dropout": 0.0, "head_dim": 256, "hidden_act": "gelu"}
        | {"hidden_activation": None, "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_scaling": None}
        | {"rope_theta": 10000.0},
    ),
    "gemma 2 2b": Published(
        2_614_341_888,
        ((10_000.0, 256),),
        _file("gemma2", "Gemma2ForCausalLM", "float32", "4.42.4", **_sizes(256000, 2304, 9216, 26, 8, 4))
        | {"attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": 50.0, "head_dim": 256}
        | {"cache_implementation": "hybrid", "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh"}
        | {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 8192, "query_pre_attn_scalar": 256}
        | {"rms_norm_eps": 1e-6, "rope_theta": 10000.0, "sliding_window": 4096},
    ),
    "gemma 3 1b": Published(
        999_885_952,
        ((1_000_000.0, 256), (10_000.0, 256)),
        _file("gemma3_text", "Gemma3ForCausalLM", version="4.50.0.dev0", **_sizes(262144, 1152, 6912, 26, 4, 1))
        | {"attention_bias": False, "attention_dropout": 0.0, "attn_logit_softcapping": None, "head_dim": 256}
        | {"cache_implementation": "hybrid", "eos_token_id": [1, 106], "final_logit_softcapping": None}
        | {"hidden_activation": "gelu_pytorch_tanh", "max_position_embeddings": 32768, "query_pre_attn_scalar": 256}
        | {"rms_norm_eps": 1e-6, "rope_local_base_freq": 10000, "rope_scaling": None, "rope_theta": 1000000}
        | {"sliding_window": 512, "sliding_window_pattern": 6},
    ),
    "olmo 2 7b": Published(
        7_298_617_344,
        ((500_000.0, 128),),
        _file("olmo2", "Olmo2ForCausalLM", "float32", "4.47.0.dev0", **_sizes(100352, 4096, 11008, 32, 32, 32))
        | {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "max_position_embeddings": 4096}
        | {"pad_token_id": 100277, "eos_token_id": 100257, "rms_norm_eps": 1e-6, "rope_scaling": None}
        | {"rope_theta": 500000, "tie_word_embeddings": False},
    ),
    "olmoe 1b 7b": Published(
        6_919_161_856,
        ((10_000.0, 128),),
        _file("olmoe", "OlmoeForCausalLM", **_sizes(50304, 2048, 1024, 16, 16, 16), **_LLAMA_LIKE)
        | {"attention_bias": False, "clip_qkv": None, "max_position_embeddings": 4096, "norm_topk_prob": False}
        | {"num_experts": 64, "num_experts_per_tok": 8, "output_router_logits": False, "rms_norm_eps": 1e-5}
        | {"rope_scaling": None, "rope_theta": 10000.0, "router_aux_loss_coef": 0.01, "tie_word_embeddings": False},
    ),
    "falcon 7b": Published(
        6_921_720_704,
        ((10_000.0, 64),),
        _file("falcon", "FalconForCausalLM", version="4.27.4", vocab_size=65024, hidden_size=4544)
        | {"alibi": False, "apply_residual_connection_post_layernorm": False, "attention_dropout": 0.0, "bias": False}
        | {"bos_token_id": 11, "eos_token_id": 11, "hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5}
        | {"multi_query": True, "new_decoder_architecture": False, "num_attention_heads": 71, "parallel_attn": True}
        | {"num_hidden_layers": 32},
    ),
    "gpt-2": Published(
        124_439_808,
        (),
        {"activation_function": "gelu_new", "architectures": ["GPT2LMHeadModel"], "attn_pdrop": 0.1, "embd_pdrop": 0.1}
        | {"bos_token_id": 50256, "eos_token_id": 50256, "initializer_range": 0.02, "layer_norm_epsilon": 1e-5}
        | {"model_type": "gpt2", "n_ctx": 1024, "n_embd": 768, "n_head": 12, "n_layer": 12, "n_positions": 1024}
        | {"resid_pdrop": 0.1, "summary_activation": None, "summary_first_dropout": 0.1, "summary_type": "cls_index"}
        | {"task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}}, "vocab_size": 50257},
    ),
    "gpt-j 6b": Published(
        6_050_882_784,
        (),
        {"activation_function": "gelu_new", "architectures": ["GPTJForCausalLM"], "gradient_checkpointing": False}
        | {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0, "model_type": "gptj", "n_embd": 4096}
        | {"n_head": 16, "n_inner": None, "n_layer": 28, "n_positions": 2048, "rotary": True, "rotary_dim": 64}
        | {"scale_attn_weights": True, "tokenizer_class": "GPT2Tokenizer", "vocab_size": 50400}
        | {"tie_word_embeddings": False, "transformers_version": "4.18.0.dev0"},
    ),
    "gpt-neo 125m": Published(
        125_198_592,
        (),
        {"activation_function": "gelu_new", "architectures": ["GPTNeoForCausalLM"], "attention_dropout": 0}
        | {"attention_layers": ["global", "local"] * 6, "attention_types": [[["global", "local"], 6]]}
        | {"embed_dropout": 0, "gradient_checkpointing": False, "hidden_size": 768, "intermediate_size": None}
        | {"layer_norm_epsilon": 1e-5, "max_position_embeddings": 2048, "model_type": "gpt_neo", "num_heads": 12}
        | {"num_layers": 12, "resid_dropout": 0, "vocab_size": 50257, "window_size": 256},
    ),
    "opt 125m": Published(
        125_239_296,
        (),
        _file("opt", "OPTForCausalLM", "float16", "4.21.0.dev0", vocab_size=50272, hidden_size=768, ffn_dim=3072)
        | {"_remove_final_layer_norm": False, "activation_dropout": 0.0, "activation_function": "relu"}
        | {"attention_dropout": 0.0, "do_layer_norm_before": True, "dropout": 0.1, "init_std": 0.02, "layerdrop": 0.0}
        | {"max_position_embeddings": 2048, "num_attention_heads": 12, "num_hidden_layers": 12, "prefix": "</s>"}
        | {"word_embed_proj_dim": 768},
    ),
    "bloom 560m": Published(
        559_214_592,
        (),
        {"architectures": ["BloomForCausalLM"], "apply_residual_connection_post_layernorm": False}
        | {"attention_dropout": 0.0, "attention_softmax_in_fp32": True, "bias_dropout_fusion": True}
        | {"hidden_dropout": 0.0, "layer_norm_epsilon": 1e-5, "masked_softmax_fusion": True, "model_type": "bloom"}
        | {"n_embed": 1024, "n_inner": None, "n_layer": 24, "num_attention_heads": 16, "offset_alibi": 100}
        | {"pretraining_tp": 1, "skip_bias_add": True, "skip_bias_add_qkv": False, "slow_but_exact": False}
        | {"transformers_version": "4.20.0", "unk_token_id": 0, "use_cache": True, "vocab_size": 250880},
    ),
    "mpt 7b": Published(
        6_649_286_656,
        (),
        _file("mpt", "MPTForCausalLM", version="4.28.1", d_model=4096, n_heads=32, n_layers=32, vocab_size=50432)
        | {"attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "attn_pdrop": 0}}
        | {"auto_map": {"AutoConfig": "configuration_mpt.MPTConfig"}, "emb_pdrop": 0, "expansion_ratio": 4}
        | {"init_device": "cpu", "learned_pos_emb": True, "logit_scale": None, "max_seq_len": 2048, "no_bias": True}
        | {"norm_type": "low_precision_layernorm", "resid_pdrop": 0, "tokenizer_name": "EleutherAI/gpt-neox-20b"}
        | {"embedding_fraction": 1.0, "verbose": 0},
    ),
    "starcoder2 3b": Published(
        3_030_371_328,
        ((999999.4420358813, 128),),
        _file("starcoder2", "Starcoder2ForCausalLM", **_sizes(49152, 3072, 12288, 30, 24, 2))
        | {"activation_function": "gelu", "attention_dropout": 0.1, "attention_softmax_in_fp32": True}
        | {"embedding_dropout": 0.1, "hidden_act": "gelu_pytorch_tanh", "layer_norm_epsilon": 1e-5}
        | {"max_position_embeddings": 16384, "mlp_type": "default", "norm_epsilon": 1e-5, "norm_type": "layer_norm"}
        | {"residual_dropout": 0.1, "rope_theta": 999999.4420358813, "scale_attention_softmax_in_fp32": True}
        | {"scale_attn_weights": True, "sliding_window": 4096, "use_bias": True},
    ),
    "yi 6b": Published(
        6_061_035_520,
        ((5_000_000.0, 128),),
        _file("llama", "LlamaForCausalLM", **_sizes(64000, 4096, 11008, 32, 32, 4))
        | {"hidden_act": "silu", "max_position_embeddings": 4096, "pad_token_id": 0, "pretraining_tp": 1}
        | {"rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 5000000.0, "tie_word_embeddings": False},
    ),
    "command r": Published(
        34_980_831_232,
        ((8_000_000.0, 128),),
        _file("cohere", "CohereForCausalLM", "float16", "4.38.2", **_sizes(256000, 8192, 22528, 40, 64, 64))
        | {"attention_bias": False, "attention_dropout": 0.0, "hidden_act": "silu", "layer_norm_eps": 1e-5}
        | {"bos_token_id": 5, "eos_token_id": 255001, "logit_scale": 0.0625, "max_position_embeddings": 8192}
        | {"model_max_length": 131072, "pad_token_id": 0, "pretraining_tp": 1, "rope_theta": 8000000.0},
    ),
    "deepseek v2 lite": Published(
        15_706_484_224,
        ((10_000.0, 64),),
        _file("deepseek_v2", "DeepseekV2ForCausalLM", **_sizes(102400, 2048, 10944, 27, 16, 16), **_LLAMA_LIKE)
        | {"attention_bias": False, "aux_loss_alpha": 0.001, "first_k_dense_replace": 1, "kv_lora_rank": 512}
        | {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV2Config"}, "max_position_embeddings": 163840}
        | {"moe_intermediate_size": 1408, "moe_layer_freq": 1, "n_group": 1, "n_routed_experts": 64}
        | {"n_shared_experts": 2, "norm_topk_prob": False, "num_experts_per_tok": 6, "pretraining_tp": 1}
        | {"q_lora_rank": None, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "rms_norm_eps": 1e-6}
        | {"rope_scaling": None, "rope_theta": 10000, "routed_scaling_factor": 1.0, "scoring_func": "softmax"}
        | {"seq_aux": True, "tie_word_embeddings": False, "topk_group": 1, "topk_method": "greedy", "v_head_dim": 128},
    ),
    "mamba 130m": Published(
        129_135_360,
        (),
        _file("mamba", "MambaForCausalLM", "float32", "4.39.0.dev0", vocab_size=50280, hidden_size=768)
        | {"conv_kernel": 4, "d_inner": 1536, "d_model": 768, "expand": 2, "fused_add_norm": True, "n_layer": 24}
        | {"hidden_act": "silu", "initializer_range": 0.1, "intermediate_size": 1536, "layer_norm_epsilon": 1e-5}
        | {"num_hidden_layers": 24, "pad_vocab_size_multiple": 8, "rescale_prenorm_residual": False, "rms_norm": True}
        | {"residual_in_fp32": True, "ssm_cfg": {}, "state_size": 16, "time_step_floor": 0.0001, "time_step_rank": 48}
        | {"time_step_init_scheme": "random", "time_step_max": 0.1, "time_step_min": 0.001, "time_step_scale": 1.0}
        | {"use_bias": False, "use_conv_bias": True},
    ),
}
