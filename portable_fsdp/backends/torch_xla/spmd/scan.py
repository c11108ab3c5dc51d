"""One program for all layers on XLA: torch_xla's `scan` over the model's repeated blocks, instead of a copy for each.

The parameters keep their places and FQNs; every step stacks their compute copies, and the loop takes a slice of each.
The first layer's forward runs the whole loop; the other layers return their input.
"""

# The first layer's weights are replaced in its modules' tables while the loop's body is traced.
# pyright: reportPrivateUsage=false

from collections.abc import Callable, Iterator
from functools import partial
from itertools import zip_longest
from typing import Any, cast

import torch
from torch import Tensor, fx, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from portable_fsdp.backends.contract import ShardPolicy
from portable_fsdp.backends.torch_xla.runtime import is_float
from portable_fsdp.backends.torch_xla.spmd.attention import is_kept
from portable_fsdp.backends.torch_xla.spmd.forward import is_product
from portable_fsdp.backends.torch_xla.spmd.tensors import Layouts, rows_between
from portable_fsdp.backends.weight_uses import Use, cast_weight, swapped
from portable_fsdp.runtime.errors import BackendError


class LayerLoop:
    """Replaces the layers' forwards by one loop. Raises BackendError for layers that can't be its iterations.

    They must be two or more consecutive items of a list of the model, be alike, and hold none of its `units`.
    """

    def __init__(
        self,
        model: nn.Module,
        policy: ShardPolicy,
        uses: dict[str, Use],
        layouts: Layouts,
        *,
        gather: bool,
        offload: bool,
    ) -> None:
        layers = {name: model.get_submodule(name) for name in policy.layers}
        by_layer = {  # name in the layer -> use of that weight
            name: {fqn.removeprefix(f"{name}."): use for fqn, use in uses.items() if fqn.startswith(f"{name}.")}
            for name in layers
        }
        for problem in _problems(model, policy, layers, by_layer):
            raise _refusal(problem)
        self._weights = [list(of_layer.values()) for of_layer in by_layer.values()]  # in one order
        self._layouts, self._gather, self._recompute = layouts, gather, bool(policy.recompute)
        self._products, self._offload = "matmul" in policy.save_ops, offload
        self._between = rows_between(policy)
        self._draws = policy.draws
        self._body = next(iter(layers.values())).forward
        self._names = list(layers)
        # Keyed by whether autograd records: the call of the layers, and the body for it. scan keeps the first
        # program that it traces of a body, and one traced in an evaluation has no gradients of the weights.
        self._traced: dict[bool, tuple[Any, Any]] = {}
        self._inputs: list[Any] = []
        self._returns_tuple = False
        self._result: Any = None
        self._last = len(layers) - 1  # the layer that was called last
        for index, layer in enumerate(layers.values()):
            layer.forward = self._run_all if index == 0 else partial(self._return_input, index)
        model.register_forward_hook(self._note_end)
        model.register_forward_pre_hook(self._forget_calls)  # an earlier forward may have ended in an error

    def _run_all(self, *args: Any, **kwargs: Any) -> Any:
        from torch._functorch.partitioners import default_partition
        from torch_xla.experimental.scan import scan

        self._note_call(0)
        leaves, structure = tree_flatten((args, kwargs))
        self._inputs = self._flat(args, kwargs)
        carried = [leaf for leaf in leaves if is_float(leaf)]
        others = [leaf.expand(len(self._names), *leaf.shape) for leaf in leaves if _is_other(leaf)]
        if self._draws is not None and (draw := kwargs.get(self._draws.argument)) is not None:
            integers = [leaf for leaf in leaves if _is_other(leaf)]
            others = [
                self._draws.rows_of(self._names) if leaf is draw.rows else other
                for leaf, other in zip(integers, others, strict=True)
            ]
        copies = [[cast_weight(use) for use in uses] for uses in zip(*self._weights, strict=True)]
        specs = [use.spec for use in self._weights[0]]
        weights = [self._layouts.stacked(c, spec, self._gather) for c, spec in zip(copies, specs, strict=True)]
        call = (structure, [None if isinstance(leaf, Tensor) else leaf for leaf in leaves])
        known, body = self._traced.get(torch.is_grad_enabled(), (None, None))
        if known != call:
            body = self._one_layer(leaves, structure)
            self._traced[torch.is_grad_enabled()] = (call, body)
        offload = self._offload and torch.is_grad_enabled()  # evaluation has no backward
        recompute = partial(_recompute, products=self._products, offload=offload)
        partition = partial(_without_draws, recompute if self._recompute else default_partition)
        carry, _ = scan(body, tuple(carried), (weights, others), partition_fn=partition, is_fn_pure=True)
        hidden = cast(tuple[Tensor, ...], carry)[0]
        self._result = (hidden,) if self._returns_tuple else hidden
        return self._result

    def _note_call(self, index: int) -> None:
        due, self._last = (self._last + 1) % len(self._names), index
        if index != due:
            raise _refusal(f"the model calls {self._names[index]} instead of {self._names[due]}")

    def _note_end(self, *_: Any) -> None:
        if self._last != len(self._names) - 1:
            raise _refusal(f"the model doesn't call {self._names[self._last + 1]}")

    def _forget_calls(self, *_: Any) -> None:
        self._last = len(self._names) - 1

    def _flat(self, args: Any, kwargs: dict[str, Any]) -> list[Any]:
        """The leaves of a layer's arguments but for the keys of dropout, which each layer has for itself."""
        name = getattr(self._draws, "argument", "")
        return tree_flatten((args, {key: value for key, value in kwargs.items() if key != name}))[0]

    def _one_layer(self, leaves: list[Any], structure: Any) -> Callable[..., Any]:
        """Return the body: (hidden and other floats, (a layer's weights, integers)) -> the floats, with new hidden."""
        wants = [leaf.requires_grad for leaf in leaves if is_float(leaf)]
        kinds = ["float" if is_float(leaf) else "other" if _is_other(leaf) else leaf for leaf in leaves]

        def body(carry: tuple[Tensor, ...], x: tuple[list[Tensor], list[Tensor]]) -> tuple[Any, None]:
            weights, others = x
            # scan computes gradients of everything that it carries; a rotary table needs none.
            used = [t if index == 0 or wants[index] else t.detach() for index, t in enumerate(carry)]
            floats, rest = iter(used), iter(others)
            values = [next(floats) if k == "float" else next(rest) if k == "other" else k for k in kinds]
            args, kwargs = tree_unflatten(values, structure)
            with swapped(self._weights[0], weights):
                output = self._body(*args, **kwargs)
            self._returns_tuple = isinstance(output, tuple)
            hidden = cast(Tensor, output[0] if self._returns_tuple else output)
            return (self._layouts.split_rows_in_loop(hidden, *self._between), *carry[1:]), None

        return body

    def _return_input(self, index: int, /, *args: Any, **kwargs: Any) -> Any:
        self._note_call(index)
        leaves = self._flat(args, kwargs)
        expected = [*tree_flatten(self._result)[0], *self._inputs[1:]]
        if len(leaves) != len(expected) or any(a is not b for a, b in zip(leaves, expected, strict=True)):
            raise _refusal(f"the model passes {self._names[index]} other arguments than {self._names[0]}")
        return self._result


def _without_draws(partition: Callable[..., Any], joint: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
    """Return `partition(joint, ...)`. Raises BackendError for a body that draws: the loop has one seed."""
    for node in joint.graph.nodes:
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            raise _refusal(f"they draw random numbers ({node.target}), which would be the same in each")
    return partition(joint, *args, **kwargs)


def _recompute(
    joint: fx.GraphModule, _inputs: Any, *, num_fwd_outputs: int, products: bool, offload: bool, **_: Any
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the body's forward, and a backward that gets its inputs and attention's results, and recomputes the rest.

    Args:
        products: backward also gets the outputs of matrix products.
        offload: the first input, hidden states, stays in host memory until backward.
    """
    from torch._functorch.partitioners import _extract_fwd_bwd_modules

    nodes: list[fx.Node] = []
    of_backward: set[fx.Node] = set()
    for node in joint.graph.nodes:
        if "tangents" in str(node.target) or not of_backward.isdisjoint(node.all_input_nodes):
            of_backward.add(node)
        elif node.op == "placeholder" or is_kept(node) or (products and is_product(node.target)):
            nodes.append(node)
    forward, backward = _extract_fwd_bwd_modules(joint, nodes, [], num_fwd_outputs=num_fwd_outputs)
    if offload:
        _keep_on_host(forward, backward, nodes[0].name)
    return forward, backward


def _keep_on_host(forward: fx.GraphModule, backward: fx.GraphModule, name: str) -> None:
    """Let forward store a copy of its input `name` on the host, and backward fetch it.

    libtpu treats these as annotations, and copies while other operations run. XLA's CPU client refuses them.
    """
    from torch_xla.experimental.stablehlo_custom_call import place_to_device, place_to_host

    output, (kept,) = forward.graph.output_node(), forward.graph.find_nodes(op="placeholder", target=name)
    with forward.graph.inserting_before(output):
        stored = forward.graph.call_function(cast(Any, place_to_host)._opoverload, (kept,))
    output.replace_input_with(kept, stored)
    (stored,) = backward.graph.find_nodes(op="placeholder", target=name)
    with backward.graph.inserting_before(next(n for n in backward.graph.nodes if n.op != "placeholder")):
        fetched = backward.graph.call_function(cast(Any, place_to_device)._opoverload, (stored,))
    stored.replace_all_uses_with(fetched, delete_user_cb=lambda user: user is not fetched)
    for graph in (forward, backward):
        graph.recompile()


def _problems(
    model: nn.Module, policy: ShardPolicy, layers: dict[str, nn.Module], by_layer: dict[str, dict[str, Use]]
) -> Iterator[str]:
    """Yield the reasons why the layers can't be iterations of one loop."""
    (first, layer), *others = layers.items()
    holder, _, number = first.rpartition(".")
    follow = number.isdecimal() and list(layers) == [f"{holder}.{int(number) + turn}" for turn in range(len(layers))]
    if not (others and follow and isinstance(model.get_submodule(holder), nn.ModuleList)):
        listed = f"{', '.join(list(layers)[:3])}{', ...' if len(layers) > 3 else ''} ({type(layer).__name__})"
        yield f"they must be two or more consecutive items of a list of the model, not {listed}"
    for unit in policy.units:
        for name in (name for name in layers if unit.startswith(f"{name}.")):
            yield f"{unit} is a unit inside {name}: the loop gathers a layer as one"
    for name, other in others:
        for difference in _differences(layer, other):
            yield f"{name} differs from {first}: {difference}"
        # The first layer's forward, with the casts of `precision.modules` in it, runs all layers.
        for leaf, use in by_layer[first].items():
            if (dtype := by_layer[name][leaf].dtype) != use.dtype:
                yield f"{name}.{leaf} computes in {dtype}, but {first}.{leaf} in {use.dtype}"


def _refusal(reason: str) -> BackendError:
    return BackendError(
        f"backend xla: compile.scan_layers=true cannot be honoured: it runs one program for all layers, and {reason}.\n"
        "  Set compile.scan_layers=false."
    )


def _differences(first: nn.Module, other: nn.Module) -> Iterator[str]:
    """Yield how two layers differ, apart from their number."""
    for (path, module), (there, twin) in zip_longest(
        first.named_modules(), other.named_modules(), fillvalue=("", None)
    ):
        if module is None or twin is None or path != there or type(module) is not type(twin):
            yield f"{path or there} is a {type(twin).__name__}, not a {type(module).__name__}"
            return
        ours, theirs = _plain(module), _plain(twin)
        for key in sorted(key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)):
            yield f"{f'{path}.{key}'.lstrip('.')} is {theirs.get(key)}, not {ours.get(key)}"


def _plain(module: nn.Module) -> dict[str, Any]:
    """Values that a forward may read: numbers, strings, mappings to numbers (peft's), and the shapes of its tensors."""
    plain = {
        key: value
        for key, value in vars(module).items()
        if isinstance(value, int | float | str | tuple | torch.dtype | None) and key != "layer_idx"
    }
    mappings = {
        key: value for key, value in vars(module).items() if isinstance(value, dict) and not key.startswith("_")
    }
    plain |= {key: value for key, value in mappings.items() if all(isinstance(v, int | float) for v in value.values())}
    shapes = {key: tuple(weight.shape) for key, weight in module._parameters.items() if weight is not None}
    values = {key: buffer.tolist() for key, buffer in module._buffers.items() if buffer is not None}
    return {**plain, **shapes, **values}


def _is_other(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and not leaf.is_floating_point()
