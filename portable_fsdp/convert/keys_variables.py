"""The environment that `accelerate launch` sets, or that accelerate reads: the key of its file that each is for.

Read from accelerate 0.20 to 1.15: utils/launch.py, and what else asks os.environ.
"""

from portable_fsdp.convert.keys_accelerate import ACCELERATE, ACCELERATE_ROWS, DYNAMO, DYNAMO_ROWS, FP8, FP8_ROWS
from portable_fsdp.convert.keys_engines import DEEPSPEED, DEEPSPEED_ROWS, MEGATRON, MEGATRON_ROWS
from portable_fsdp.convert.keys_fsdp import FSDP, FSDP_ROWS, PARALLEL, PARALLEL_ROWS
from portable_fsdp.convert.rows import Always, Either, Launcher, Off, Refuse, Row, Set, Skip, YesNo

ENVIRONMENT = "environment"
"""The place of variables."""


VARIABLES: dict[str, tuple[str, str]] = {
    "ACCELERATE_MIXED_PRECISION": (ACCELERATE, "mixed_precision"),
    "ACCELERATE_DOWNCAST_BF16": (ACCELERATE, "downcast_bf16"),
    "ACCELERATE_USE_CPU": (ACCELERATE, "use_cpu"),
    "ACCELERATE_CPU_AFFINITY": (ACCELERATE, "enable_cpu_affinity"),
    "ACCELERATE_DEBUG_MODE": (ACCELERATE, "debug"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (ACCELERATE, "gradient_accumulation_steps"),
    "ACCELERATE_GRADIENT_CLIPPING": (ACCELERATE, "gradient_clipping"),
    "FSDP_VERSION": (FSDP, "fsdp_version"),
    "FSDP_SHARDING_STRATEGY": (FSDP, "fsdp_sharding_strategy"),
    "FSDP_RESHARD_AFTER_FORWARD": (FSDP, "fsdp_reshard_after_forward"),
    "FSDP_OFFLOAD_PARAMS": (FSDP, "fsdp_offload_params"),
    "FSDP_AUTO_WRAP_POLICY": (FSDP, "fsdp_auto_wrap_policy"),
    "FSDP_MIN_NUM_PARAMS": (FSDP, "fsdp_min_num_params"),
    "FSDP_BACKWARD_PREFETCH": (FSDP, "fsdp_backward_prefetch"),
    "FSDP_FORWARD_PREFETCH": (FSDP, "fsdp_forward_prefetch"),
    "FSDP_STATE_DICT_TYPE": (FSDP, "fsdp_state_dict_type"),
    "FSDP_USE_ORIG_PARAMS": (FSDP, "fsdp_use_orig_params"),
    "FSDP_SYNC_MODULE_STATES": (FSDP, "fsdp_sync_module_states"),
    "FSDP_IGNORED_MODULES": (FSDP, "fsdp_ignored_modules"),
    "FSDP_CPU_RAM_EFFICIENT_LOADING": (FSDP, "fsdp_cpu_ram_efficient_loading"),
    "FSDP_ACTIVATION_CHECKPOINTING": (FSDP, "fsdp_activation_checkpointing"),
    "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": (FSDP, "fsdp_activation_checkpointing_offload"),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": (FSDP, "fsdp_transformer_layer_cls_to_wrap"),
    "PARALLELISM_CONFIG_DP_REPLICATE_SIZE": (PARALLEL, "parallelism_config_dp_replicate_size"),
    "PARALLELISM_CONFIG_DP_SHARD_SIZE": (PARALLEL, "parallelism_config_dp_shard_size"),
    "PARALLELISM_CONFIG_TP_SIZE": (PARALLEL, "parallelism_config_tp_size"),
    "PARALLELISM_CONFIG_CP_SIZE": (PARALLEL, "parallelism_config_cp_size"),
    "PARALLELISM_CONFIG_CP_BACKEND": (PARALLEL, "parallelism_config_cp_backend"),
    "PARALLELISM_CONFIG_CP_COMM_STRATEGY": (PARALLEL, "parallelism_config_cp_comm_strategy"),
    "PARALLELISM_CONFIG_SP_SIZE": (PARALLEL, "parallelism_config_sp_size"),
    "PARALLELISM_CONFIG_SP_BACKEND": (PARALLEL, "parallelism_config_sp_backend"),
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH": (PARALLEL, "parallelism_config_sp_seq_length"),
    "PARALLELISM_CONFIG_SP_SEQ_LENGTH_IS_VARIABLE": (PARALLEL, "parallelism_config_sp_seq_length_is_variable"),
    "PARALLELISM_CONFIG_SP_ATTN_IMPLEMENTATION": (PARALLEL, "parallelism_config_sp_attn_implementation"),
    "ACCELERATE_DYNAMO_BACKEND": (DYNAMO, "dynamo_backend"),
    "ACCELERATE_DYNAMO_MODE": (DYNAMO, "dynamo_mode"),
    "ACCELERATE_DYNAMO_USE_FULLGRAPH": (DYNAMO, "dynamo_use_fullgraph"),
    "ACCELERATE_DYNAMO_USE_DYNAMIC": (DYNAMO, "dynamo_use_dynamic"),
    "ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION": (DYNAMO, "dynamo_use_regional_compilation"),
    "ACCELERATE_FP8_BACKEND": (FP8, "backend"),
    "ACCELERATE_FP8_USE_AUTOCAST_DURING_EVAL": (FP8, "use_autocast_during_eval"),
    "ACCELERATE_FP8_MARGIN": (FP8, "margin"),
    "ACCELERATE_FP8_INTERVAL": (FP8, "interval"),
    "ACCELERATE_FP8_AMAX_HISTORY_LEN": (FP8, "amax_history_len"),
    "ACCELERATE_FP8_AMAX_COMPUTE_ALGO": (FP8, "amax_compute_algo"),
    "ACCELERATE_FP8_OVERRIDE_LINEAR_PRECISION": (FP8, "override_linear_precision"),
    "ACCELERATE_FP8_OPT_LEVEL": (FP8, "opt_level"),
    "ACCELERATE_FP8_ENABLE_FSDP_FLOAT8_ALL_GATHER": (FP8, "enable_fsdp_float8_all_gather"),
    "ACCELERATE_FP8_PAD_INNER_DIM": (FP8, "pad_inner_dim"),
    "ACCELERATE_FP8_USE_MXFP8_BLOCK_SCALING": (FP8, "use_mxfp8_block_scaling"),
    "ACCELERATE_FP8_FORMAT": (FP8, "fp8_format"),
    "ACCELERATE_FP8_OVERRIDE_FPROP": (FP8, "override_linear_precision"),
    "ACCELERATE_FP8_OVERRIDE_DGRAD": (FP8, "override_linear_precision"),
    "ACCELERATE_FP8_OVERRIDE_WGRAD": (FP8, "override_linear_precision"),
    "ACCELERATE_DEEPSPEED_ZERO_STAGE": (DEEPSPEED, "zero_stage"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": (DEEPSPEED, "offload_optimizer_device"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": (DEEPSPEED, "offload_param_device"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_NVME_PATH": (DEEPSPEED, "offload_optimizer_nvme_path"),
    "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": (DEEPSPEED, "offload_param_nvme_path"),
    "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": (DEEPSPEED, "zero3_save_16bit_model"),
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": (DEEPSPEED, "zero3_init_flag"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": (DEEPSPEED, "deepspeed_config_file"),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": (DEEPSPEED, "deepspeed_moe_layer_cls_names"),
    "MEGATRON_LM_TP_DEGREE": (MEGATRON, "megatron_lm_tp_degree"),
    "MEGATRON_LM_PP_DEGREE": (MEGATRON, "megatron_lm_pp_degree"),
    "MEGATRON_LM_CONTEXT_PARALLEL_SIZE": (MEGATRON, "megatron_lm_context_parallel_size"),
    "MEGATRON_LM_EXPERT_MODEL_PARALLEL_SIZE": (MEGATRON, "megatron_lm_expert_model_parallel_size"),
    "MEGATRON_LM_EXPERT_TENSOR_PARALLEL_SIZE": (MEGATRON, "megatron_lm_expert_tensor_parallel_size"),
    "MEGATRON_LM_SEQUENCE_PARALLELISM": (MEGATRON, "megatron_lm_sequence_parallelism"),
    "MEGATRON_LM_NUM_MICRO_BATCHES": (MEGATRON, "megatron_lm_num_micro_batches"),
    "MEGATRON_LM_DECODER_LAST_PIPELINE_NUM_LAYERS": (MEGATRON, "megatron_lm_decoder_last_pipeline_num_layers"),
    "MEGATRON_LM_GRADIENT_CLIPPING": (MEGATRON, "megatron_lm_gradient_clipping"),
    "MEGATRON_LM_RECOMPUTE_ACTIVATIONS": (MEGATRON, "megatron_lm_recompute_activations"),
    "MEGATRON_LM_RECOMPUTE_GRANULARITY": (MEGATRON, "megatron_lm_recompute_granularity"),
    "MEGATRON_LM_RECOMPUTE_METHOD": (MEGATRON, "megatron_lm_recompute_method"),
    "MEGATRON_LM_RECOMPUTE_NUM_LAYERS": (MEGATRON, "megatron_lm_recompute_num_layers"),
    "MEGATRON_LM_USE_DISTRIBUTED_OPTIMIZER": (MEGATRON, "megatron_lm_use_distributed_optimizer"),
    "MEGATRON_LM_USE_CUSTOM_FSDP": (MEGATRON, "megatron_lm_use_custom_fsdp"),
    "MEGATRON_LM_OPTIMIZER_CPU_OFFLOAD": (MEGATRON, "megatron_lm_optimizer_cpu_offload"),
    "MEGATRON_LM_OVERLAP_CPU_OPTIMIZER_D2H_H2D": (MEGATRON, "megatron_lm_overlap_cpu_optimizer_d2h_h2d"),
    "MEGATRON_LM_USE_PRECISION_AWARE_OPTIMIZER": (MEGATRON, "megatron_lm_use_precision_aware_optimizer"),
    "MEGATRON_LM_NO_LOAD_OPTIM": (MEGATRON, "megatron_lm_no_load_optim"),
    "MEGATRON_LM_NO_SAVE_OPTIM": (MEGATRON, "megatron_lm_no_save_optim"),
    "MEGATRON_LM_EOD_MASK_LOSS": (MEGATRON, "megatron_lm_eod_mask_loss"),
    "MEGATRON_LM_ATTENTION_BACKEND": (MEGATRON, "megatron_lm_attention_backend"),
    "MEGATRON_LM_ATTENTION_DROPOUT": (MEGATRON, "megatron_lm_attention_dropout"),
    "MEGATRON_LM_HIDDEN_DROPOUT": (MEGATRON, "megatron_lm_hidden_dropout"),
    "MEGATRON_LM_ATTENTION_SOFTMAX_IN_FP32": (MEGATRON, "megatron_lm_attention_softmax_in_fp32"),
    "MEGATRON_LM_USE_ROTARY_POSITION_EMBEDDINGS": (MEGATRON, "megatron_lm_use_rotary_position_embeddings"),
    "MEGATRON_LM_CALCULATE_PER_TOKEN_LOSS": (MEGATRON, "megatron_lm_calculate_per_token_loss"),
    "MEGATRON_LM_RECOMPUTE_ACTIVATION": (MEGATRON, "megatron_lm_recompute_activations"),  # 0.20's plugin reads this
}
"""Variable -> the place and key whose row answers for it."""

_ENGINE = "ACCELERATE_USE_"

OWN_ROWS = (
    Row(ENVIRONMENT, f"{_ENGINE}FSDP", YesNo(Set({"~distributed": "FSDP"}), Skip("off"))),
    Row(ENVIRONMENT, f"{_ENGINE}DEEPSPEED", YesNo(Set({"~distributed": "DEEPSPEED"}), Skip("off"))),
    Row(ENVIRONMENT, f"{_ENGINE}MEGATRON_LM", YesNo(Set({"~distributed": "MEGATRON_LM"}), Skip("off"))),
    Row(ENVIRONMENT, f"{_ENGINE}PARALLELISM_CONFIG", Either(Skip("says that PARALLELISM_CONFIG_* count"))),
    Row(ENVIRONMENT, f"{_ENGINE}IPEX", Off(Refuse("Intel's extension is not used", "set ipex: false"))),
    Row(ENVIRONMENT, f"{_ENGINE}XPU", Off(Refuse("there is no engine for Intel's GPUs", "set use_xpu: false"))),
    Row(
        ENVIRONMENT,
        f"{_ENGINE}SAGEMAKER",
        Off(Refuse("no SageMaker job is started from here", "unset it")),
    ),
    Row(
        ENVIRONMENT,
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE",
        Off(Refuse("SageMaker's own engines are not built", "unset it")),
    ),
    Row(ENVIRONMENT, "ACCELERATE_TORCH_DEVICE", Always(Launcher("which device: --device", "device"))),
    Row(ENVIRONMENT, "ACCELERATE_IN_TPU_POD", Either(Launcher("which TPU VM: launch/tpu_vm.sh"))),
    Row(ENVIRONMENT, "ACCELERATE_CONFIG_DS_FIELDS", Always(Skip("names what the file says of DeepSpeed"))),
    Row(ENVIRONMENT, "ACCELERATE_ALLOW_CP_STANDALONE", Either(Skip("context parallelism is refused by its own size"))),
    *(
        Row(ENVIRONMENT, f"ACCELERATE_{name}", Always(Skip(f"accelerate's own {what}, which no run of ours asks")))
        for name, what in (("LOG_LEVEL", "log"), ("DEBUG_RDV_FILE", "tests"))
    ),
    *(
        Row(ENVIRONMENT, f"ACCELERATE_{name}", Either(Skip(f"accelerate's own {what}, which no run of ours asks")))
        for name, what in (
            ("ENABLE_RICH", "colours"),
            ("DISABLE_RICH", "colours"),
            ("BYPASS_DEVICE_MAP", "check of device maps"),
            ("INIT_INCLUDE_BUFFERS", "empty weights"),
        )
    ),
)

_BY_KEY = {
    (row.place, row.key): row
    for row in (*ACCELERATE_ROWS, *FSDP_ROWS, *PARALLEL_ROWS, *DYNAMO_ROWS, *FP8_ROWS, *DEEPSPEED_ROWS, *MEGATRON_ROWS)
}
VARIABLE_ROWS = (
    *(Row(ENVIRONMENT, name, _BY_KEY[VARIABLES[name]].takes) for name in VARIABLES),
    *OWN_ROWS,
)
