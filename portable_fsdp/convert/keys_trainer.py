"""TrainingArguments of transformers 5.23 (training_args.py), and the keys that older versions wrote."""

from portable_fsdp.convert.keys_accelerate import BF16, COMPILERS, CPU_OR_NOT
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
    Words,
    YesNo,
)

TRAINER = "TrainingArguments"

_OF_EVALUATION = Skip("an evaluation is the mean loss over all rows, in batches as those of training")
_LOSS_ALONE = Refuse("an evaluation measures the loss alone", "leave it out")
_AS_TRAINING = Refuse("evaluations compute as training does", "leave it out, and set bf16", "precision.compute")
_HUB = Refuse("nothing is uploaded", "leave it out; checkpoint.export writes a Hugging Face folder")
_FLOAT16 = Refuse("float16 needs a scaled loss, which is not built", "set bf16", "precision.compute")
_OBSERVE = Refuse("runs write metrics.jsonl and the console, and no other tracker", "set report_to: none")
_LOADER = Skip("batches are a function of seed and step; no worker processes load them")
_DDP = Skip("gradients are summed by FSDP, which has no such setting")
_LOGGING = Skip("how Trainer itself logs")
_DATASET = Skip("belongs to data sets of several columns; rows are tokens here")
_ITSELF = Skip("how Trainer itself runs and saves")
_PROCESSES = Launcher("how processes find each other, and for how long they wait")
_SHAPES = Refuse("rows are packed to data.seq_len tokens in random order", "leave it out")

ADAMW = ("adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_torch_xla", "adamw")
_SCHEDULES = {
    # Trainer's end at 0; optim.min_lr_ratio is above it (XLA would compile anew for a learning rate of 0).
    "linear": Set({"optim.schedule": "linear", "optim.min_lr_ratio": 1e-6}),
    "cosine": Set({"optim.schedule": "cosine", "optim.min_lr_ratio": 1e-6}),
    "constant": Set({"optim.schedule": "constant", "~constant": True}),
    "constant_with_warmup": Set({"optim.schedule": "constant"}),
    "warmup_stable_decay": Set({"optim.schedule": "wsd"}, "its decay: optim.decay_ratio"),
    "cosine_with_min_lr": Set({"optim.schedule": "cosine"}, "its floor: optim.min_lr_ratio"),
    **{
        word: Refuse("no such schedule", "set it to linear, cosine, constant or warmup_stable_decay", "optim.schedule")
        for word in (
            "cosine_with_restarts",
            "polynomial",
            "inverse_sqrt",
            "reduce_lr_on_plateau",
            "cosine_warmup_with_min_lr",
            "greedy",
        )
    },
}
_STRATEGY_WORDS = {
    "full_shard": Set({"~strategy": "FULL_SHARD"}),
    "shard_grad_op": Set({"~strategy": "SHARD_GRAD_OP"}),
    "no_shard": Set({"~strategy": "NO_SHARD"}),
    "hybrid_shard": Set({"~strategy": "HYBRID_SHARD"}),
    "hybrid_shard_zero2": Set({"~strategy": "HYBRID_SHARD_ZERO2"}),
    "offload": Set({"memory.cpu_offload": True}),
    "auto_wrap": Set({"~auto_wrap": True}),
}

TRAINER_ROWS = (
    # --- what our config knows
    Row(TRAINER, "output_dir", Text("run.dir")),
    Row(TRAINER, "run_name", Text("run.name")),
    Row(TRAINER, "seed", Number("run.seed")),
    Row(TRAINER, "max_steps", Number("train.steps", special={-1: Skip("-1: num_train_epochs counts")})),
    Row(TRAINER, "num_train_epochs", Number("train.epochs", False), ("num_epochs",)),
    Row(TRAINER, "per_device_train_batch_size", Number("train.micro_batch"), ("micro_batch_size",)),
    Row(TRAINER, "gradient_accumulation_steps", Number("~accumulate", least=1)),
    Row(TRAINER, "learning_rate", Number("optim.lr", False), ("lr",)),
    Row(TRAINER, "lr_scheduler_type", Choice(_SCHEDULES), ("lr_scheduler",)),
    Row(
        TRAINER,
        "lr_scheduler_kwargs",
        Off(Refuse("a schedule's own arguments are not read", "leave it out", "optim.min_lr_ratio")),
    ),
    Row(TRAINER, "warmup_steps", Number("~warmup", False)),
    Row(TRAINER, "warmup_ratio", Number("~warmup_ratio", False, {0: Skip("no warmup")})),
    Row(TRAINER, "weight_decay", Number("optim.weight_decay", False)),
    Row(TRAINER, "adam_beta1", Number("~beta1", False)),
    Row(TRAINER, "adam_beta2", Number("~beta2", False)),
    Row(TRAINER, "adam_epsilon", Number("optim.eps", False)),
    Row(
        TRAINER,
        "max_grad_norm",
        Number("train.max_grad_norm", False, {0: Set({"train.max_grad_norm": None})}),
    ),
    Row(
        TRAINER,
        "optim",
        Choice(
            {
                **{word: Set({"optim.name": "adamw"}) for word in ADAMW},
                "sgd": Set({"optim.name": "sgd"}),
            },
            other=Refuse("AdamW and SGD are the optimizers built", "set it to adamw_torch or sgd", "optim.name"),
        ),
    ),
    Row(TRAINER, "bf16", BF16),
    Row(TRAINER, "fp16", YesNo(_FLOAT16, Skip("off, as here"))),
    Row(TRAINER, "tf32", YesNo(Set({"precision.matmul": "high"}), Set({"precision.matmul": "highest"}))),
    Row(
        TRAINER,
        "gradient_checkpointing",
        YesNo(Set({"~recompute.trainer": True}), Set({"~recompute.trainer": False})),
        ("activation_checkpointing",),
    ),
    Row(
        TRAINER,
        "gradient_checkpointing_kwargs",
        Always(Skip("recomputation is never reentrant, and keeps the state of random numbers")),
        ("activation_checkpointing_kwargs",),
    ),
    Row(TRAINER, "logging_steps", Number("train.log_every")),
    Row(
        TRAINER,
        "logging_strategy",
        Choice(
            {
                "steps": Skip("steps, as here"),
                "no": Refuse("the console line can't be turned off", "set it to steps, and raise logging_steps"),
                "epoch": Refuse("lines are written by steps", "set it to steps"),
            }
        ),
    ),
    Row(TRAINER, "save_steps", Number("checkpoint.every")),
    Row(
        TRAINER,
        "save_strategy",
        Choice(
            {
                "steps": Skip("steps, as here"),
                "no": Set({"~no_saves": True}, "the last step is saved all the same"),
                "epoch": Refuse(
                    "checkpoints are saved by steps", "set it to steps, and save_steps", "checkpoint.every"
                ),
                "best": Set(
                    {"~no_saves": True, "~best": True}, "the best by its evaluation is saved, and the last step"
                ),
            }
        ),
    ),
    Row(TRAINER, "save_total_limit", Number("checkpoint.keep", special={0: Skip("0: no limit")})),
    Row(TRAINER, "torch_compile", YesNo(Set({"compile.enabled": True}), Set({"compile.enabled": False}))),
    Row(TRAINER, "torch_compile_backend", Choice(COMPILERS)),
    Row(
        TRAINER,
        "torch_compile_mode",
        Off(Refuse("torch.compile's modes are not offered", "leave it out"), ("default",)),
    ),
    Row(
        TRAINER,
        "resume_from_checkpoint",
        YesNo(
            Set({"checkpoint.resume": "auto"}),
            Set({"checkpoint.resume": "none"}),
            other=Refuse(
                "a Trainer's folder is no checkpoint of ours",
                "leave it out, and name that folder by model.pretrained (its weights alone), or bring it over by "
                "python -m portable_fsdp.checkpoint import",
                "checkpoint.resume",
            ),
        ),
    ),
    Row(
        TRAINER,
        "fsdp",
        Words(_STRATEGY_WORDS, Set({"~fsdp": True}), Set({"~fsdp": False})),
    ),
    Row(TRAINER, "save_only_model", Off(Refuse("a checkpoint holds the optimizer", "leave it out"))),
    Row(
        TRAINER,
        "eval_strategy",
        Choice(
            {
                "steps": Set({"~evaluates": True}, "the rows are data.eval_split's"),
                "no": Skip("none, as here"),
                "epoch": Refuse("evaluations come by steps", "set it to steps, and eval_steps", "train.eval_every"),
            }
        ),
        ("evaluation_strategy",),
    ),
    Row(TRAINER, "eval_steps", Number("~eval_steps", False, least=0)),
    Row(TRAINER, "eval_delay", Number("~eval_delay", False, {0: Skip("no delay, as here")}, least=0)),
    Row(
        TRAINER,
        "eval_on_start",
        YesNo(Set({"train.eval_on_start": True}), Set({"train.eval_on_start": False})),
    ),
    Row(TRAINER, "do_eval", YesNo(Set({"~do_eval": True}), Skip("eval_strategy asks for evaluations"))),
    Row(
        TRAINER,
        "load_best_model_at_end",
        YesNo(
            Set({"~best": True}, "the best by its evaluation is what checkpoint.export writes"),
            Skip("the best by its evaluation, where there are any, is what checkpoint.export writes"),
        ),
    ),
    Row(
        TRAINER,
        "metric_for_best_model",
        Choice(
            {"loss": Skip("as here"), "eval_loss": Skip("as here")},
            other=Refuse("the best is the one of the lowest loss", "set it to eval_loss"),
        ),
    ),
    Row(
        TRAINER,
        "greater_is_better",
        YesNo(Refuse("the best is the one of the lowest loss", "set it to false"), Skip("as here")),
    ),
    *(Row(TRAINER, key, Either(_OF_EVALUATION)) for key in ("prediction_loss_only", "eval_do_concat_batches")),
    Row(TRAINER, "eval_use_gather_object", Either(_OF_EVALUATION)),
    *(
        Row(TRAINER, key, Amount(_OF_EVALUATION, 1))
        for key in ("per_device_eval_batch_size", "eval_accumulation_steps")
    ),
    # --- not built
    *(Row(TRAINER, key, Off(_AS_TRAINING)) for key in ("bf16_full_eval", "fp16_full_eval")),
    *(Row(TRAINER, key, Off(_LOSS_ALONE)) for key in ("include_for_metrics", "batch_eval_metrics")),
    Row(TRAINER, "do_predict", Off(Refuse("there is no data set to predict", "leave it out"))),
    *(
        Row(TRAINER, key, Off(_HUB))
        for key in ("push_to_hub", "hub_model_id", "hub_token", "hub_private_repo", "hub_revision")
    ),
    Row(TRAINER, "hub_strategy", Always(Skip("belongs to push_to_hub"))),
    Row(TRAINER, "hub_always_push", Either(Skip("belongs to push_to_hub"))),
    Row(TRAINER, "report_to", Off(_OBSERVE)),
    *(
        Row(TRAINER, key, Always(Skip("belongs to a tracker, which report_to asks for")))
        for key in ("project", "trackio_space_id", "trackio_bucket_id", "trackio_static_space_id")
    ),
    Row(TRAINER, "label_smoothing_factor", Off(Refuse("the loss is plain cross entropy", "set it to 0"))),
    Row(TRAINER, "neftune_noise_alpha", Off(Refuse("no noise is added to embeddings", "leave it out"))),
    *(
        Row(
            TRAINER,
            key,
            Off(Refuse("the loss is computed in chunks by itself; no kernels are swapped", "leave it out")),
        )
        for key in ("use_liger_kernel", "liger_kernel_config")
    ),
    *(
        Row(TRAINER, key, Off(Refuse("the optimizer has no such arguments", "leave it out")))
        for key in ("optim_args", "optim_target_modules")
    ),
    Row(TRAINER, "auto_find_batch_size", Off(Refuse("the batch is what the config says", "set it to false"))),
    Row(TRAINER, "torch_empty_cache_steps", Off(Refuse("the allocator is left alone", "leave it out"))),
    Row(TRAINER, "deepspeed", Off(Refuse("DeepSpeed is not an engine here", "leave it out; set fsdp: full_shard"))),
    Row(
        TRAINER,
        "train_sampling_strategy",
        Choice({"random": Skip("as here"), "sequential": _SHAPES, "group_by_length": _SHAPES}),
    ),
    Row(TRAINER, "group_by_length", Off(_SHAPES)),
    Row(TRAINER, "data_seed", Off(Refuse("run.seed seeds the order, too", "leave it out"))),
    Row(TRAINER, "full_determinism", Off(Refuse("kernels are the device's own", "set it to false"))),
    Row(TRAINER, "ignore_data_skip", Off(Refuse("a resumed run always goes on where its data was", "leave it out"))),
    Row(
        TRAINER,
        "average_tokens_across_devices",
        YesNo(
            Skip("the loss is always per token of the global batch"),
            Refuse("the loss is always per token of the global batch", "set it to true"),
        ),
    ),
    # --- says nothing about training here
    *(
        Row(TRAINER, f"dataloader_{key}", Either(_LOADER))
        for key in ("drop_last", "pin_memory", "persistent_workers", "in_order")
    ),
    Row(TRAINER, "dataloader_num_workers", Amount(_LOADER)),
    Row(TRAINER, "dataloader_prefetch_factor", Amount(_LOADER, 1)),
    Row(TRAINER, "dataloader_multiprocessing_context", Always(_LOADER)),
    Row(TRAINER, "remove_unused_columns", Either(_DATASET)),
    *(Row(TRAINER, key, Always(_DATASET)) for key in ("label_names", "length_column_name")),
    *(
        Row(TRAINER, f"ddp_{key}", Either(_DDP))
        for key in ("find_unused_parameters", "broadcast_buffers", "static_graph")
    ),
    Row(TRAINER, "ddp_bucket_cap_mb", Amount(_DDP, 1)),
    *(
        Row(TRAINER, key, Either(_LOGGING))
        for key in (
            "logging_first_step",
            "log_on_each_node",
            "logging_nan_inf_filter",
            "disable_tqdm",
            "include_tokens_per_second",
            "skip_memory_metrics",
        )
    ),
    *(
        Row(TRAINER, key, Always(_LOGGING))
        for key in ("logging_dir", "log_level", "log_level_replica", "include_num_input_tokens_seen")
    ),
    *(
        Row(TRAINER, key, Either(_ITSELF))
        for key in (
            "do_train",
            "overwrite_output_dir",
            "save_safetensors",
            "save_on_each_node",
            "enable_jit_checkpoint",
            "restore_callback_states_from_checkpoint",
            "use_cache",
        )
    ),
    *(Row(TRAINER, key, Always(_ITSELF)) for key in ("accelerator_config", "debug")),
    Row(TRAINER, "ddp_backend", Always(_PROCESSES)),
    Row(TRAINER, "ddp_timeout", Amount(_PROCESSES, 1)),
    Row(TRAINER, "local_rank", Amount(_PROCESSES, -1)),
    *(Row(TRAINER, key, CPU_OR_NOT) for key in ("use_cpu", "no_cuda")),
)
