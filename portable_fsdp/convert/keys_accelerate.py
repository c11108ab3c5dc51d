"""What `accelerate config` writes outside fsdp_config, and what its users' scripts take.

Read from accelerate 1.15: commands/config/config_args.py and cluster.py, commands/launch.py.
"""

from portable_fsdp.convert.rows import (
    Always,
    Amount,
    Choice,
    Either,
    Launcher,
    Number,
    Off,
    Refuse,
    Row,
    Set,
    Skip,
    Text,
    YesNo,
)

ACCELERATE, DYNAMO, FP8, MPIRUN = "accelerate", "dynamo_config", "fp8_config", "mpirun_config"
IPEX = "ipex_config"  # to 1.0
SAGEMAKER = "SageMaker"

_ADDRESS = Launcher("how processes find each other: torchrun's --rdzv-endpoint, or --master-addr and --master-port")
_POD = Launcher("which TPU VM, and what runs on it: launch/tpu_vm.sh")
_TORCHRUN = Launcher("how torchrun is started")
_DEVICE = Launcher("which device: --device")
CPU_OR_NOT = YesNo(Launcher("which device: --device=cpu", "use_cpu"), _DEVICE)

BF16 = YesNo(
    Set({"~mixed": "bfloat16"}),
    Skip("off; another key may say the dtype"),
    auto=Set({"~mixed": "bfloat16"}, "auto: every device here computes in bfloat16"),
)

_REPLICATED = (
    "MULTI_CPU",
    "MULTI_GPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_NEURON",
)

_FILLED_IN = "DeepSpeed's auto is filled in by Trainer or by the script"
ACCUMULATION = Number(
    "~accumulate",
    special={0: Skip("0: as 1")},
    least=1,
    auto=Refuse(_FILLED_IN, "set it to a number", "train.global_batch"),
)
CLIPPING = Number(
    "train.max_grad_norm",
    False,
    {0: Set({"train.max_grad_norm": None})},
    auto=Refuse(_FILLED_IN, "set it to a number, 0 for no clipping", "train.max_grad_norm"),
)

ACCELERATE_ROWS = (
    Row(
        ACCELERATE,
        "compute_environment",
        Choice(
            {
                "LOCAL_MACHINE": Launcher("where it runs"),
                "AMAZON_SAGEMAKER": Refuse("no SageMaker job is started from here", "set it to LOCAL_MACHINE"),
            },
            ("LOCAL_MACHINE", "AMAZON_SAGEMAKER"),
            0,
        ),
    ),
    Row(
        ACCELERATE,
        "distributed_type",
        Choice(
            {
                "FSDP": Set({"~distributed": "FSDP"}),
                **{word: Set({"~distributed": word}) for word in _REPLICATED},
                "XLA": Set({"~distributed": "XLA"}),
                "TPU": Set({"~distributed": "XLA"}),
                "DEEPSPEED": Set({"~distributed": "DEEPSPEED"}),
                "MEGATRON_LM": Set({"~distributed": "MEGATRON_LM"}),
                "NO": Set({"~distributed": "NO"}),
                "false": Set({"~distributed": "NO"}, "an unquoted NO, which YAML reads as false"),
                "TP": Refuse("tensor parallelism is not built", "set it to FSDP"),
                "DATA_PARALLEL": Refuse("SageMaker's own engines are not built", "set it to FSDP"),
                "MODEL_PARALLEL": Refuse("SageMaker's own engines are not built", "set it to FSDP"),
            }
        ),
    ),
    Row(
        ACCELERATE,
        "mixed_precision",
        Choice(
            {
                "no": Set({"~mixed": "float32"}),
                "false": Set({"~mixed": "float32"}, "an unquoted no, which YAML reads as false"),
                "fp32": Set({"~mixed": "float32"}),
                "bf16": Set({"~mixed": "bfloat16"}),
                "fp16": Refuse(
                    "float16 needs a scaled loss, which is not built", "set it to bf16", "precision.compute"
                ),
                "fp8": Refuse("float8 is not built", "set it to bf16", "precision.compute"),
            }
        ),
    ),
    Row(
        ACCELERATE,
        "fp16",
        YesNo(
            Refuse("float16 needs a scaled loss, which is not built", "set bf16", "precision.compute"),
            Skip("off, as here"),
        ),
    ),
    Row(ACCELERATE, "bf16", BF16),
    Row(
        ACCELERATE,
        "downcast_bf16",
        Off(
            Refuse(
                "XLA_DOWNCAST_BF16 would hold weights and optimizer state in bfloat16 under the name of float32",
                "set it to no, and mixed_precision: bf16",
                "precision.master",
            )
        ),
        ("tpu_downcast_bf16",),
    ),
    Row(
        ACCELERATE,
        "num_processes",
        Amount(Launcher("processes, one for each device", "num_processes"), 1, also=("auto",)),
    ),
    Row(ACCELERATE, "num_machines", Amount(Launcher("hosts", "num_machines"), 1)),
    Row(ACCELERATE, "machine_rank", Amount(Launcher("which host this is", "machine_rank"))),
    *(
        Row(ACCELERATE, key, Always(_ADDRESS))
        for key in (
            "main_process_ip",
            "rdzv_backend",
            "rdzv_conf",
            "rdzv_endpoint",
            "deepspeed_hostfile",
        )
    ),
    Row(ACCELERATE, "main_process_port", Amount(_ADDRESS, 0, 65535)),
    Row(ACCELERATE, "same_network", Either(_ADDRESS)),
    Row(ACCELERATE, "gpu_ids", Always(Launcher("which GPUs: CUDA_VISIBLE_DEVICES"))),
    Row(ACCELERATE, "use_cpu", CPU_OR_NOT, ("cpu",)),
    Row(ACCELERATE, "use_mps", Off(Refuse("there is no engine for Apple's GPUs", "use --device=cpu"))),
    Row(ACCELERATE, "debug", Either(Skip("accelerate's own debugging of its collectives"))),
    Row(ACCELERATE, "main_training_function", Always(Launcher("the program: portable_fsdp.launch"))),
    Row(ACCELERATE, "enable_cpu_affinity", Either(Launcher("which cores a process may use"))),
    Row(ACCELERATE, "num_cpu_threads_per_process", Amount(Launcher("OMP_NUM_THREADS"), 1)),
    *(
        Row(ACCELERATE, key, Always(_POD))
        for key in (
            "tpu_name",
            "tpu_zone",
            "tpu_vm",
            "tpu_env",
            "command_file",
            "commands",
            "tpu_command_file",
            "tpu_commands",
        )
    ),
    *(Row(ACCELERATE, key, Either(_POD)) for key in ("tpu_use_cluster", "tpu_use_sudo")),
    *(Row(ACCELERATE, key, Always(_TORCHRUN)) for key in ("log_dir", "tee", "role")),
    *(Row(ACCELERATE, key, Either(_TORCHRUN)) for key in ("module", "no_python", "quiet")),
    Row(ACCELERATE, "max_restarts", Amount(_TORCHRUN)),
    Row(ACCELERATE, "monitor_interval", Amount(_TORCHRUN, whole=False)),
    *(
        Row(ACCELERATE, key, Either(Skip("says which section of the file counts; distributed_type says it too")))
        for key in ("use_fsdp", "use_deepspeed", "use_megatron_lm", "use_parallelism_config", "multi_gpu", "tpu")
    ),
    Row(ACCELERATE, "gradient_accumulation_steps", ACCUMULATION),
    Row(ACCELERATE, "gradient_clipping", CLIPPING),
    Row(MPIRUN, "mpirun_hostfile", Always(Launcher("mpirun's hosts"))),
    Row(MPIRUN, "mpirun_ccl", Amount(Launcher("threads of Intel's library for CPUs"))),
    Row(IPEX, "ipex", Off(Refuse("Intel's extension is not used", "set it to false"))),
    Row(IPEX, "use_xpu", Off(Refuse("there is no engine for Intel's GPUs", "set it to false"))),
    *(
        Row(SAGEMAKER, key, Off(Refuse("no SageMaker job is started from here", "leave it out")))
        for key in (
            "ec2_instance_type",
            "iam_role_name",
            "image_uri",
            "profile",
            "region",
            "base_job_name",
            "pytorch_version",
            "transformers_version",
            "py_version",
            "sagemaker_inputs_file",
            "sagemaker_metrics_file",
            "additional_args",
        )
    ),
)

COMPILERS = {
    "NO": Set({"compile.enabled": False}),
    "false": Set({"compile.enabled": False}, "an unquoted NO, which YAML reads as false"),
    "INDUCTOR": Set({"compile.enabled": True, "compile.backend": "inductor"}),
    "AOT_EAGER": Set({"compile.enabled": True, "compile.backend": "aot_eager"}),
    "EAGER": Set({"compile.enabled": True, "compile.backend": "eager"}),
    **{
        word: Refuse(
            "this backend of torch.compile is not tried here",
            "set it to INDUCTOR",
            "compile.enabled",
        )
        for word in (
            "AOT_TS_NVFUSER",
            "NVPRIMS_NVFUSER",
            "CUDAGRAPHS",
            "OFI",
            "FX2TRT",
            "ONNXRT",
            "TENSORRT",
            "AOT_TORCHXLA_TRACE_ONCE",
            "TORCHXLA_TRACE_ONCE",
            "IPEX",
            "TVM",
            "HPU_BACKEND",
            "NEURON",
        )
    },
}
_LAYERS = Skip("each layer is compiled by itself, with static shapes")

DYNAMO_ROWS = (
    *(Row(place, "dynamo_backend", Choice(COMPILERS)) for place in (ACCELERATE, DYNAMO)),  # at the top before 0.20
    Row(
        DYNAMO,
        "dynamo_mode",
        Off(Refuse("torch.compile's modes are not offered", "set it to default"), ("default",)),
    ),
    Row(DYNAMO, "dynamo_use_fullgraph", Either(_LAYERS)),
    Row(
        DYNAMO,
        "dynamo_use_dynamic",
        Off(Refuse("every batch has one shape, compiled as such", "set it to false")),
    ),
    Row(DYNAMO, "dynamo_use_regional_compilation", Either(_LAYERS)),
)

FP8_ROWS = (
    *(
        Row(FP8, key, Off(Refuse("float8 is not built", "leave fp8_config out"), ("default",)))
        for key in (
            "backend",
            "use_autocast_during_eval",
            "margin",
            "interval",
            "fp8_format",
            "amax_history_length",
            "amax_history_len",
            "amax_compute_algorithm",
            "amax_compute_algo",
            "override_linear_precision",
            "optimization_level",
            "opt_level",
            "enable_fsdp_float8_all_gather",
            "pad_inner_dim",
            "use_during_eval",
            "use_mxfp8_block_scaling",
        )
    ),
)

SCRIPT = "script arguments"

SCRIPT_ROWS = (
    Row(SCRIPT, "model_name_or_path", Text("model.pretrained"), ("model_name", "base_model")),
    Row(SCRIPT, "tokenizer_name", Text("data.tokenizer"), ("tokenizer_name_or_path",)),
    Row(SCRIPT, "train_file", Text("~train_file")),
    Row(SCRIPT, "block_size", Number("data.seq_len"), ("max_seq_length", "max_length", "sequence_len")),
    *(
        Row(
            SCRIPT,
            key,
            Off(Refuse("data are named by our own keys", "leave it out; data.source, data.path, data.eval_split")),
        )
        for key in ("dataset_name", "dataset_config_name", "validation_file", "dataset_text_field")
    ),
    Row(
        SCRIPT,
        "torch_dtype",
        Choice(
            {
                "auto": Skip("weights rest in precision.master"),
                "float32": Set({"precision.master": "float32"}),
                "bfloat16": Set({"~weights": "bfloat16"}, "weights rest in precision.master"),
                "float16": Refuse(
                    "weights rest in precision.master, and float16 of precision.compute needs a scaled loss, which is "
                    "not built",
                    "set it to bfloat16",
                    "precision.compute",
                ),
            }
        ),
        ("dtype",),
    ),
    Row(
        SCRIPT,
        "attn_implementation",
        Choice(
            {word: Set({"model.attention": word}) for word in ("sdpa", "eager")},
            other=Refuse(
                "attention is chosen by model.attention, which has no such word",
                "set it to sdpa or eager",
                "model.attention",
            ),
        ),
    ),
)
