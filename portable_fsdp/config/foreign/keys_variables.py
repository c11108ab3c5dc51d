"""The environment that `accelerate launch` sets, or that accelerate reads: the key of its file that each is for.

Read from accelerate 0.20 to 1.15: utils/launch.py, and what else asks os.environ.
"""

from portable_fsdp.config.foreign.keys_accelerate import ACCELERATE, ACCELERATE_ROWS, DYNAMO, DYNAMO_ROWS, FP8, FP8_ROWS
from portable_fsdp.config.foreign.keys_engines import DEEPSPEED, DEEPSPEED_ROWS, MEGATRON, MEGATRON_ROWS
from portable_fsdp.config.foreign.keys_fsdp import FSDP, FSDP_ROWS, PARALLEL, PARALLEL_ROWS
from portable_fsdp.config.foreign.rows import Always, Launcher, Off, Refuse, Row, Set, Skip, YesNo

ENVIRONMENT = "environment"
"""The place of variables."""


def _keys(place: str, variables: str, keys: str, names: str) -> dict[str, tuple[str, str]]:
    return {f"{variables}{name}": (place, f"{keys}{name.lower()}") for name in names.split()}


VARIABLES: dict[str, tuple[str, str]] = {
    "ACCELERATE_MIXED_PRECISION": (ACCELERATE, "mixed_precision"),
    "ACCELERATE_DOWNCAST_BF16": (ACCELERATE, "downcast_bf16"),
    "ACCELERATE_USE_CPU": (ACCELERATE, "use_cpu"),
    "ACCELERATE_CPU_AFFINITY": (ACCELERATE, "enable_cpu_affinity"),
    "ACCELERATE_DEBUG_MODE": (ACCELERATE, "debug"),
    "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": (ACCELERATE, "gradient_accumulation_steps"),
    "ACCELERATE_GRADIENT_CLIPPING": (ACCELERATE, "gradient_clipping"),
    **_keys(
        FSDP,
        "FSDP_",
        "fsdp_",
        "VERSION SHARDING_STRATEGY RESHARD_AFTER_FORWARD OFFLOAD_PARAMS AUTO_WRAP_POLICY MIN_NUM_PARAMS "
        "BACKWARD_PREFETCH FORWARD_PREFETCH STATE_DICT_TYPE USE_ORIG_PARAMS SYNC_MODULE_STATES IGNORED_MODULES "
        "CPU_RAM_EFFICIENT_LOADING ACTIVATION_CHECKPOINTING ACTIVATION_CHECKPOINTING_OFFLOAD",
    ),
    "FSDP_TRANSFORMER_CLS_TO_WRAP": (FSDP, "fsdp_transformer_layer_cls_to_wrap"),
    **_keys(
        PARALLEL,
        "PARALLELISM_CONFIG_",
        "parallelism_config_",
        "DP_REPLICATE_SIZE DP_SHARD_SIZE TP_SIZE CP_SIZE CP_BACKEND CP_COMM_STRATEGY SP_SIZE SP_BACKEND SP_SEQ_LENGTH "
        "SP_SEQ_LENGTH_IS_VARIABLE SP_ATTN_IMPLEMENTATION",
    ),
    **_keys(
        DYNAMO,
        "ACCELERATE_DYNAMO_",
        "dynamo_",
        "BACKEND MODE USE_FULLGRAPH USE_DYNAMIC USE_REGIONAL_COMPILATION",
    ),
    **_keys(
        FP8,
        "ACCELERATE_FP8_",
        "",
        "BACKEND USE_AUTOCAST_DURING_EVAL MARGIN INTERVAL AMAX_HISTORY_LEN AMAX_COMPUTE_ALGO "
        "OVERRIDE_LINEAR_PRECISION OPT_LEVEL ENABLE_FSDP_FLOAT8_ALL_GATHER PAD_INNER_DIM USE_MXFP8_BLOCK_SCALING",
    ),
    "ACCELERATE_FP8_FORMAT": (FP8, "fp8_format"),
    **{f"ACCELERATE_FP8_OVERRIDE_{what}": (FP8, "override_linear_precision") for what in ("FPROP", "DGRAD", "WGRAD")},
    **_keys(
        DEEPSPEED,
        "ACCELERATE_DEEPSPEED_",
        "",
        "ZERO_STAGE OFFLOAD_OPTIMIZER_DEVICE OFFLOAD_PARAM_DEVICE OFFLOAD_OPTIMIZER_NVME_PATH "
        "OFFLOAD_PARAM_NVME_PATH ZERO3_SAVE_16BIT_MODEL",
    ),
    "ACCELERATE_DEEPSPEED_ZERO3_INIT": (DEEPSPEED, "zero3_init_flag"),
    "ACCELERATE_DEEPSPEED_CONFIG_FILE": (DEEPSPEED, "deepspeed_config_file"),
    "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": (DEEPSPEED, "deepspeed_moe_layer_cls_names"),
    **{f"MEGATRON_LM_{row.key.removeprefix('megatron_lm_').upper()}": (MEGATRON, row.key) for row in MEGATRON_ROWS},
    "MEGATRON_LM_RECOMPUTE_ACTIVATION": (MEGATRON, "megatron_lm_recompute_activations"),  # 0.20's plugin reads this
}
"""Variable -> the place and key whose row answers for it."""

_ENGINE = "ACCELERATE_USE_"
_QUIET = "accelerate's own {}, which no run of ours asks"

OWN_ROWS = (
    Row(ENVIRONMENT, f"{_ENGINE}FSDP", YesNo(Set({"~distributed": "FSDP"}), Skip("off"))),
    Row(ENVIRONMENT, f"{_ENGINE}DEEPSPEED", YesNo(Set({"~distributed": "DEEPSPEED"}), Skip("off"))),
    Row(ENVIRONMENT, f"{_ENGINE}MEGATRON_LM", YesNo(Set({"~distributed": "MEGATRON_LM"}), Skip("off"))),
    Row(ENVIRONMENT, f"{_ENGINE}PARALLELISM_CONFIG", Always(Skip("says that PARALLELISM_CONFIG_* count"))),
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
    Row(ENVIRONMENT, "ACCELERATE_IN_TPU_POD", Always(Launcher("which TPU VM: launch/tpu_vm.sh"))),
    Row(ENVIRONMENT, "ACCELERATE_CONFIG_DS_FIELDS", Always(Skip("names what the file says of DeepSpeed"))),
    Row(ENVIRONMENT, "ACCELERATE_ALLOW_CP_STANDALONE", Always(Skip("context parallelism is refused by its own size"))),
    *(
        Row(ENVIRONMENT, f"ACCELERATE_{name}", Always(Skip(_QUIET.format(what))))
        for name, what in {
            "LOG_LEVEL": "log",
            "ENABLE_RICH": "colours",
            "DISABLE_RICH": "colours",
            "DEBUG_RDV_FILE": "tests",
            "BYPASS_DEVICE_MAP": "check of device maps",
            "INIT_INCLUDE_BUFFERS": "empty weights",
        }.items()
    ),
)

_BY_KEY = {
    (row.place, row.key): row
    for row in (*ACCELERATE_ROWS, *FSDP_ROWS, *PARALLEL_ROWS, *DYNAMO_ROWS, *FP8_ROWS, *DEEPSPEED_ROWS, *MEGATRON_ROWS)
}
VARIABLE_ROWS = (
    *(Row(ENVIRONMENT, name, _BY_KEY[key].takes, dead=_BY_KEY[key].dead) for name, key in VARIABLES.items()),
    *OWN_ROWS,
)
