"""Context parallelism on native: processes along the axis `context` get the same rows, and hold a part of their tokens.

Attention gathers the keys and values of whole rows, once a layer; its backward sums their gradients and scatters them.
All other layers work on a token alone, and positions are those of whole rows.
"""

import torch
from torch import Tensor

from portable_fsdp.backends.contract import Batch
from portable_fsdp.backends.native.groups import Group, enter
from portable_fsdp.layout import RowParts
from portable_fsdp.runtime.errors import DataError

_OF_TOKENS = ("input_ids", "labels", "positions", "is_last")
"""The tensors of a batch that are split; `segments` stay whole, since queries see the documents of all keys."""


def gather_tokens(group: Group, tokens: Tensor) -> Tensor:
    """Implement `RowParts.gather` for the processes that split a row."""
    first, second = enter(tokens, group, 0).unflatten(0, (group.count, 2, -1)).unbind(1)
    return torch.cat([first, second.flip(0)]).flatten(0, 1)


def split_tokens(batch: Batch, parts: RowParts) -> Batch:
    """Cut the rows of a batch of text on the host, and add their positions. Raises DataError for a length that the
    devices don't divide."""
    if (ids := batch.get("input_ids")) is None:
        return batch
    length = ids.shape[1]
    if length % (2 * parts.count):
        raise DataError(
            f"sharding.context={parts.count}: expected rows whose tokens are a multiple of {2 * parts.count}, found "
            f"{length}.\n  Pad the rows (data.buckets), or set sharding.context=1."
        )
    if "segments" not in batch:  # else positions may restart
        batch = {**batch, "positions": torch.arange(length).expand_as(ids)}
    own = torch.tensor(parts.positions(length))
    return {name: value[:, own] if name in _OF_TOKENS else value for name, value in batch.items()}
