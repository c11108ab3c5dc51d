"""accelerate's FSDP plugin, an object, in the keys of its file and in ours."""

from typing import TYPE_CHECKING, Any, cast

from portable_fsdp.runtime.errors import ConfigError

if TYPE_CHECKING:
    from accelerate.utils import FullyShardedDataParallelPlugin


def as_keys(plugin: "FullyShardedDataParallelPlugin") -> dict[str, Any]:
    """The keys of accelerate's file that mean the same. Raises ConfigError for a policy that is a function."""
    keys: dict[str, Any] = {
        "fsdp_version": plugin.fsdp_version,
        "fsdp_activation_checkpointing": bool(plugin.activation_checkpointing),
        "fsdp_transformer_layer_cls_to_wrap": ",".join(plugin.transformer_cls_names_to_wrap or ()) or None,
        "fsdp_min_num_params": plugin.min_num_params or None,
    }
    if plugin.fsdp_version == 2:
        keys["fsdp_reshard_after_forward"] = plugin.reshard_after_forward
        keys["fsdp_offload_params"] = type(plugin.cpu_offload).__name__ == "CPUOffloadPolicy"
    else:
        strategy: Any = plugin.sharding_strategy or plugin.reshard_after_forward
        keys["fsdp_sharding_strategy"] = strategy.name.lstrip("_")
        keys["fsdp_offload_params"] = bool(cast(Any, plugin.cpu_offload).offload_params)
    known = {"size_based_auto_wrap_policy": "SIZE_BASED_WRAP", "transformer_auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    if (policy := plugin.auto_wrap_policy) is not None:
        keys["fsdp_auto_wrap_policy"] = known.get(getattr(policy, "__name__", ""))
        if keys["fsdp_auto_wrap_policy"] is None:
            raise ConfigError(
                f"fsdp_plugin: auto_wrap_policy is a {type(policy).__name__}.\n  Name the classes of layers: "
                "sharding={'wrap_classes': [...]}; by default each layer is a unit."
            )
    given = {name: value for name, value in keys.items() if value is not None}
    return {"distributed_type": "FSDP", "fsdp_config": given}


def dtypes_of(plugin: "FullyShardedDataParallelPlugin | None") -> list[str]:
    """The overrides of torch's MixedPrecision or MixedPrecisionPolicy."""
    policy = plugin.mixed_precision_policy if plugin else None
    ours = {"param_dtype": "compute", "reduce_dtype": "reduce", "output_dtype": "output", "buffer_dtype": "buffers"}
    dtypes = {key: getattr(policy, name, None) for name, key in ours.items()}
    return [f"precision.{key}={str(dtype).removeprefix('torch.')}" for key, dtype in dtypes.items() if dtype]
