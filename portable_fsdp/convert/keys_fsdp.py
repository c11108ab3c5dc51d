"""FSDP's own keys: fsdp_config of accelerate and of Trainer, xla_fsdp_settings, parallelism_config.

Read from accelerate 1.15 (commands/config/cluster.py, commands/launch.py, FullyShardedDataParallelPlugin), transformers
5.23 (training_args.py, `fsdp_config`) and torch_xla 2.9 (XlaFullyShardedDataParallel).
"""

from portable_fsdp.convert.rows import (
    NO,
    YES,
    Always,
    Amount,
    Choice,
    DType,
    Either,
    Launcher,
    Names,
    Number,
    Off,
    Refuse,
    Row,
    Set,
    Skip,
    YesNo,
)

FSDP, XLA, PARALLEL, MIXED = "fsdp_config", "xla_fsdp_settings", "parallelism_config", "mixed_precision_policy"

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2")
POLICIES = ("TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP")
PREFETCH = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
STATE_DICTS = ("FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT")

_OURS = "checkpoints are sharded, and open at any number of devices"
_ALWAYS_SO = Skip("always so here")
_NO_CODE = Refuse("its tool takes a Python object there, which a config file can't hold", "leave it out")

_STRATEGY = {word: Set({"~strategy": word}) for word in STRATEGIES}
_WORD_NOT_READ = (
    "accelerate reads no strategy here (its launcher always sets FSDP_SHARDING_STRATEGY, which goes first); "
    "taken at its word"
)

FSDP_ROWS = (
    Row(FSDP, "fsdp_version", Choice({"1": Set({"~version": 1}), "2": Set({"~version": 2})}), ("version",)),
    Row(FSDP, "fsdp_sharding_strategy", Choice(_STRATEGY, STRATEGIES), ("strategy",)),
    Row(
        FSDP,
        "fsdp_reshard_after_forward",
        Choice(
            {
                **{word: Set({"~reshard": True}) for word in YES if word != "1"},  # 1 is FULL_SHARD, the same
                **{word: Set({"~reshard": False}) for word in NO},
                **{word: Set({"~reshard_word": word}, _WORD_NOT_READ) for word in STRATEGIES},
            },
            STRATEGIES,
        ),
    ),
    Row(
        FSDP,
        "fsdp_offload_params",
        YesNo(Set({"memory.cpu_offload": True}), Set({"memory.cpu_offload": False})),
        ("cpu_offload", "offload"),
    ),
    Row(
        FSDP,
        "cpu_offload_pin_memory",  # axolotl's
        YesNo(
            Skip("offloaded parameters are pinned in host memory wherever the device is a GPU"),
            Refuse("offloaded parameters are pinned in host memory", "set it to true"),
        ),
    ),
    Row(
        FSDP,
        "fsdp_auto_wrap_policy",
        Choice({word: Set({"sharding.wrap": word}) for word in POLICIES}, POLICIES),
        ("wrap_policy",),
    ),
    Row(
        FSDP,
        "fsdp_transformer_layer_cls_to_wrap",
        Names("sharding.wrap_classes"),
        ("transformer_cls_names_to_wrap", "transformer_cls_to_wrap"),
    ),
    Row(
        FSDP,
        "fsdp_min_num_params",
        Number("~min_num_params", special={0: Skip("0: units are not made by size")}, least=1),
        ("sharding_min_num_params",),
    ),
    Row(
        FSDP,
        "fsdp_backward_prefetch",
        Choice({word: Set({"sharding.backward_prefetch": word}) for word in PREFETCH}, PREFETCH),
    ),
    Row(
        FSDP,
        "fsdp_backward_prefetch_policy",
        Choice({word: Set({"sharding.backward_prefetch": word}) for word in PREFETCH}, PREFETCH),
    ),
    Row(
        FSDP,
        "fsdp_forward_prefetch",
        YesNo(Set({"sharding.forward_prefetch": 1}), Set({"sharding.forward_prefetch": 0})),
    ),
    *(
        Row(FSDP, key, Choice({word: Skip(_OURS) for word in STATE_DICTS}, STATE_DICTS))
        for key in ("fsdp_state_dict_type", "final_state_dict_type")  # the second: axolotl's
    ),
    Row(FSDP, "fsdp_activation_checkpointing", YesNo(Set({"~recompute.fsdp": True}), Set({"~recompute.fsdp": False}))),
    Row(
        FSDP,
        "fsdp_activation_checkpointing_offload",
        Off(
            Refuse(
                "inputs of recomputed layers stay on the device",
                "set it to false; memory.cpu_offload moves parameters and optimizer state",
            )
        ),
    ),
    Row(FSDP, "fsdp_cpu_ram_efficient_loading", Either(Skip("each process reads its slices of the weights only"))),
    Row(FSDP, "fsdp_sync_module_states", Either(Skip("weights are the same on all processes by construction"))),
    Row(
        FSDP,
        "fsdp_use_orig_params",
        YesNo(_ALWAYS_SO, Skip("parameters keep their names and shapes here; nothing that trains depends on it")),
    ),
    Row(FSDP, "fsdp_limit_all_gathers", Either(Skip("the engine limits how many units are gathered at once"))),
    Row(
        FSDP,
        "fsdp_ignored_modules",
        Off(Refuse("every parameter is sharded", "leave it out; model.freeze stops parameters from training")),
    ),
    Row(
        FSDP,
        "fsdp_mixed_precision_policy",
        Choice(
            {
                "bf16": Set({"precision.compute": "bfloat16", "precision.reduce": "bfloat16"}),
                "fp32": Set({"precision.compute": "float32"}),
                "fp16": Refuse(
                    "float16 needs a scaled loss, which is not built", "set it to bf16", "precision.compute"
                ),
                "fp8": Refuse("float8 is not built", "set it to bf16", "precision.compute"),
            }
        ),
    ),
    *(Row(FSDP, key, Always(Skip(_OURS))) for key in ("fsdp_state_dict_config", "fsdp_optim_state_dict_config")),
    Row(FSDP, "fsdp_param_init_fn", Off(_NO_CODE)),
    # --- Trainer's own
    Row(FSDP, "xla", YesNo(Set({"~xla": True}), Set({"~xla": False}))),
    Row(
        FSDP,
        "xla_fsdp_v2",
        YesNo(
            Set({"~spmd": True}),
            Launcher("one process a chip: --backend=xla_fsdp1"),
        ),
    ),
    Row(
        FSDP,
        "xla_fsdp_grad_ckpt",
        YesNo(Set({"~recompute.xla": True}), Set({"~recompute.xla": False})),
    ),
    # --- dtypes of a policy written out
    Row(MIXED, "param_dtype", DType("precision.compute")),
    Row(MIXED, "reduce_dtype", DType("precision.reduce")),
    Row(MIXED, "output_dtype", DType("precision.output")),
    Row(MIXED, "buffer_dtype", DType("xla_fsdp1.buffer_dtype")),
    Row(MIXED, "cast_forward_inputs", YesNo(_ALWAYS_SO, Refuse("inputs are cast at use", "leave it out"))),
)

_TRUE = Skip("always so here")
_BARRIER = Skip("the engine sets the barriers itself")

XLA_ROWS = (
    Row(XLA, "reshard_after_forward", YesNo(Set({"~reshard": True}), Set({"~reshard": False}))),
    Row(
        XLA,
        "flatten_parameters",
        YesNo(Set({"xla_fsdp1.flatten_parameters": True}), Set({"xla_fsdp1.flatten_parameters": False})),
    ),
    Row(
        XLA,
        "shard_param_on_dim_0",
        YesNo(Set({"xla_fsdp1.shard_param_on_dim_0": True}), Set({"xla_fsdp1.shard_param_on_dim_0": False})),
    ),
    Row(
        XLA,
        "pin_layout_in_collective_ops",
        YesNo(
            Set({"xla_fsdp1.pin_layout_in_collective_ops": True}),
            Set({"xla_fsdp1.pin_layout_in_collective_ops": False}),
        ),
    ),
    Row(XLA, "compute_dtype", DType("precision.compute")),
    Row(XLA, "buffer_dtype", DType("xla_fsdp1.buffer_dtype")),
    Row(
        XLA,
        "fp32_reduce_scatter",
        YesNo(Set({"precision.reduce": "float32"}), Skip("gradients are summed as precision.reduce says")),
    ),
    *(
        Row(XLA, key, Either(_BARRIER))
        for key in ("optimization_barrier_in_forward", "optimization_barrier_in_backward")
    ),
    *(
        Row(XLA, key, Either(Skip("the engine decides when the root is resharded and when a program ends")))
        for key in ("disable_reshard_on_root", "sync_on_finalization", "mark_step_on_finalization")
    ),
    Row(XLA, "execute_sharding_on_init", Either(Skip("weights are made in shards, never whole"))),
    *(
        Row(XLA, key, Off(Refuse("collectives are one for each tensor", "leave it out"), ("0",)))
        for key in ("coalesce_all_gather_ops", "coalesce_reduce_scatter_ops", "reduce_scatter_bucket_size_mb")
    ),
    *(
        Row(XLA, key, Off(Refuse("the engine counts the devices itself", "leave it out", "sharding.replicas")))
        for key in ("sharding_groups", "sharding_rank", "sharding_world_size")
    ),
    *(Row(XLA, key, Off(_NO_CODE)) for key in ("auto_wrap_policy", "auto_wrapper_callable", "param_init_fn")),
    Row(XLA, "_shard_size_multiple", Choice({"128": _TRUE})),
    Row(XLA, "_use_xla_patched_linear", Either(Skip("the engine decides how a linear layer is written"))),
    *(
        Row(XLA, key, Off(Refuse("it is torch_xla's own debugging", "leave it out"), ("xla_fsdp",)))
        for key in (
            "_debug_dummy_forward_pass",
            "_debug_msg",
            "_debug_print",
            "_debug_dummy_all_gather_op",
            "_debug_dummy_all_reduce_op",
            "_debug_dummy_reduce_scatter_op",
            "_debug_dummy_optimization_barrier_op",
        )
    ),
)

_PARALLEL_REFUSED = (
    ("tp_size", "tensor parallelism"),
    ("cp_size", "context parallelism"),
    ("sp_size", "sequence parallelism"),
)
_GONE_WITH_SIZE = Skip("belongs to a size above 1, which is refused by its own key")

PARALLEL_ROWS = (
    Row(PARALLEL, "parallelism_config_dp_replicate_size", Number("~replicas", least=1)),
    Row(PARALLEL, "parallelism_config_dp_shard_size", Number("~shard_size", least=1)),
    *(
        Row(PARALLEL, f"parallelism_config_{key}", Off(Refuse(f"{what} is not built", "set it to 1"), ("1",)))
        for key, what in _PARALLEL_REFUSED
    ),
    *(
        Row(PARALLEL, f"parallelism_config_{key}", Always(_GONE_WITH_SIZE))
        for key in (
            "tp_handler",
            "cp_handler",
            "cp_backend",
            "cp_comm_strategy",
            "sp_handler",
            "sp_backend",
            "sp_attn_implementation",
        )
    ),
    Row(PARALLEL, "parallelism_config_sp_seq_length", Amount(_GONE_WITH_SIZE, 1)),
    Row(PARALLEL, "parallelism_config_sp_seq_length_is_variable", Either(_GONE_WITH_SIZE)),
    Row(PARALLEL, "device_mesh", Off(_NO_CODE)),
)
