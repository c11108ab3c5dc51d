"""The sections of accelerate's file for other engines, DeepSpeed and Megatron-LM: what maps to FSDP, what can't.

Read from accelerate 1.15: commands/config/cluster.py, commands/launch.py.
"""

from portable_fsdp.convert.keys_accelerate import ACCUMULATION, CLIPPING
from portable_fsdp.convert.rows import Always, Choice, Either, Launcher, Off, Refuse, Row, Set, Skip, YesNo

DEEPSPEED, MEGATRON = "deepspeed_config", "megatron_lm_config"

_NVME = Refuse("nothing is offloaded to disks", "set the device to cpu, or none")
_OPTIMIZER_ONLY = Set(
    {"~strategy": "SHARD_GRAD_OP"},
    "there only optimizer state is sharded, for which FSDP has no strategy: the nearest one, with the same losses and "
    "less memory, shards gradients too",
)
"""DeepSpeed's stage 1 and Megatron's distributed optimizer are one thing."""
_HOSTS = Launcher("DeepSpeed's own launcher; ours are torchrun and launch/")

DEEPSPEED_ROWS = (
    Row(
        DEEPSPEED,
        "zero_stage",
        Choice(
            {
                "0": Set({"~strategy": "NO_SHARD"}),
                "1": _OPTIMIZER_ONLY,
                "2": Set({"~strategy": "SHARD_GRAD_OP"}),
                "3": Set({"~strategy": "FULL_SHARD"}),
            }
        ),
    ),
    *(
        Row(
            DEEPSPEED,
            f"offload_{what}_device",
            Choice({"cpu": Set({f"~offload.{what}": True}), "none": Set({f"~offload.{what}": False}), "nvme": _NVME}),
        )
        for what in ("optimizer", "param")
    ),
    Row(DEEPSPEED, "offload_optimizer_nvme_path", Off(_NVME)),
    Row(DEEPSPEED, "offload_param_nvme_path", Off(_NVME)),
    Row(DEEPSPEED, "gradient_accumulation_steps", ACCUMULATION),
    Row(DEEPSPEED, "gradient_clipping", CLIPPING),
    Row(
        DEEPSPEED,
        "zero3_save_16bit_model",
        YesNo(
            Set({"checkpoint.export": True}, "a Hugging Face folder at the end"),
            Skip("checkpoints are written in any case"),
        ),
    ),
    Row(DEEPSPEED, "zero3_init_flag", Either(Skip("weights are always made in shards"))),
    Row(
        DEEPSPEED,
        "deepspeed_config_file",
        Off(Refuse("DeepSpeed's own JSON is not read", "write its zero_stage and offload keys into deepspeed_config")),
    ),
    Row(
        DEEPSPEED,
        "deepspeed_moe_layer_cls_names",
        Off(Refuse("experts are not leaves of their own", "leave it out; model.experts says how they run")),
        ("moe_layer_cls_names",),
    ),
    *(
        Row(DEEPSPEED, key, Always(_HOSTS))
        for key in (
            "deepspeed_multinode_launcher",
            "deepspeed_hostfile",
            "deepspeed_exclusion_filter",
            "deepspeed_inclusion_filter",
        )
    ),
)

_TENSOR = Refuse("tensor and pipeline parallelism are not built", "set it to 1, and shard by FSDP")
_RECOMPUTE = Refuse("Megatron recomputes a part of each layer", "leave it out", "memory.gradient_checkpointing")
_MODELS_OWN = Refuse("Megatron's own model is not built", "leave it out: the model's own config says it")

MEGATRON_ROWS = (
    *(
        Row(MEGATRON, f"megatron_lm_{key}", Off(_TENSOR, ("1",)))
        for key in (
            "tp_degree",
            "pp_degree",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "sequence_parallelism",
            "num_micro_batches",
            "decoder_last_pipeline_num_layers",
        )
    ),
    Row(MEGATRON, "megatron_lm_gradient_clipping", CLIPPING),
    Row(
        MEGATRON,
        "megatron_lm_recompute_activations",
        YesNo(
            _RECOMPUTE,
            Set({"~recompute.megatron": False}),
        ),
    ),
    Row(
        MEGATRON,
        "megatron_lm_recompute_granularity",
        Choice({"full": Set({"~recompute.megatron": True}), "selective": _RECOMPUTE}),
    ),
    *(Row(MEGATRON, f"megatron_lm_recompute_{key}", Off(_RECOMPUTE)) for key in ("method", "num_layers")),
    Row(
        MEGATRON,
        "megatron_lm_use_distributed_optimizer",
        YesNo(_OPTIMIZER_ONLY, Skip("off")),
    ),
    Row(
        MEGATRON,
        "megatron_lm_use_custom_fsdp",
        YesNo(Set({"~strategy": "FULL_SHARD"}, "Megatron's FSDP shards parameters, too"), Skip("off")),
    ),
    Row(
        MEGATRON,
        "megatron_lm_optimizer_cpu_offload",
        YesNo(Set({"~offload.optimizer": True}), Set({"~offload.optimizer": False})),
    ),
    Row(MEGATRON, "megatron_lm_overlap_cpu_optimizer_d2h_h2d", Either(Skip("the engine overlaps what it can"))),
    Row(
        MEGATRON,
        "megatron_lm_use_precision_aware_optimizer",
        Off(Refuse("optimizer state is in the dtype of the weights", "leave it out")),
    ),
    *(
        Row(MEGATRON, f"megatron_lm_{key}", Off(Refuse("a checkpoint holds the optimizer", "leave it out")))
        for key in ("no_load_optim", "no_save_optim")
    ),
    *(
        Row(MEGATRON, f"megatron_lm_{key}", Off(_MODELS_OWN))
        for key in (
            "eod_mask_loss",
            "attention_backend",
            "attention_dropout",
            "hidden_dropout",
            "attention_softmax_in_fp32",
            "use_rotary_position_embeddings",
        )
    ),
    Row(MEGATRON, "megatron_lm_calculate_per_token_loss", Either(Skip("the loss is always per token of the batch"))),
)
