"""nn.LSTM, nn.GRU and nn.RNN on XLA: one loop over the positions of a row.

torch unrolls them into operations for each position, which take minutes to compile. torch_xla 2.9 loops only over a
GRU, and keeps its first trace: after an evaluation, or behind a frozen embedding, it silently loses input gradients.
"""

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop
from torch.nn.functional import linear


def loop_over_positions(library: torch.library.Library) -> None:
    """Lower torch's recurrent operators, except for packed sequences, as loops on XLA in this process."""
    from torch_xla.experimental import gru

    nn.GRU = getattr(nn.GRU, "_orig", nn.GRU)
    gru.GRU.forward = nn.GRU.forward
    for kind in ("lstm", "gru", "rnn_tanh", "rnn_relu"):
        library.impl(f"{kind}.input", partial(_run, kind), "AutogradXLA")


@cache  # scan keeps one trace of a function for all inputs of its shapes, with gradients or without
def _position(kind: str, wants_gradient: bool) -> Callable[..., Any]:
    """Return the step of one position: ((states, recurrent weights, projection), inputs' gates) -> (same, output)."""

    def position(carry: Any, x: Tensor) -> Any:
        (h, *cells), weights, projection = carry
        gates = linear(h, *weights)
        if kind == "lstm":
            i, f, g, o = (x + gates).chunk(4, 1)
            cells = [f.sigmoid() * cells[0] + i.sigmoid() * g.tanh()]
            h = o.sigmoid() * cells[0].tanh()
            h = linear(h, *projection) if projection else h
        elif kind == "gru":
            (r, z, n), (r_h, z_h, n_h) = x.chunk(3, 1), gates.chunk(3, 1)
            n = (n + (r + r_h).sigmoid() * n_h).tanh()
            h = n + (z + z_h).sigmoid() * (h - n)
        else:
            h = (x + gates).tanh() if kind == "rnn_tanh" else (x + gates).relu()
        return ([h, *cells], weights, projection), h

    return position


def _run(kind: str, x: Tensor, hx: Tensor | Sequence[Tensor], weights: Sequence[Tensor], *rest: Any) -> Any:
    """Return (outputs, last states); arguments as of torch.lstm, torch.gru, torch.rnn_tanh and torch.rnn_relu."""
    from torch_xla.experimental.scan import scan

    has_biases, layers, dropout, train, bidirectional, batch_first = rest
    x = x.transpose(0, 1) if batch_first else x
    states, ends = [hx] if isinstance(hx, Tensor) else hx, list[list[Tensor]]()
    for layer in range(layers):
        outputs: list[Tensor] = []
        for backwards in (False, True)[: 1 + bidirectional]:
            begin, end = (len(weights) * at // len(states[0]) for at in (len(ends), len(ends) + 1))
            w_input, w_states, *others = weights[begin:end]
            biases, projection = (others[:2], others[2:]) if has_biases else ([], others)
            xs = linear(x.flip(0) if backwards else x, w_input, *biases[:1])
            init = ([state[len(ends)] for state in states], [w_states, *biases[1:]], projection)
            (last, _, _), ys = cast(Any, scan)(_position(kind, xs.requires_grad), init, xs, is_fn_pure=True)
            ends.append(last)
            outputs.append(ys.flip(0) if backwards else ys)
        x = drop(torch.cat(outputs, -1), dropout, train and layer < layers - 1)
    return x.transpose(0, 1) if batch_first else x, *map(torch.stack, zip(*ends, strict=True))
