"""Bytes that the loss moves for each logit, with all logits and in one with the head.

    python benchmarks/loss_bytes.py

Runs forward and backward of the head of Llama 3 8B (4,096 x 128,256, bfloat16) and its loss, without memory, and counts
what operators read and write of the logits and of tensors of their size. Matrix products aren't counted. What
torch.compile makes of the loss is counted by inductor, of its kernels for CPUs, none fused with another: a pass for the
largest logit of a row, one for the sum, one for the gradient. On GPUs the first two are one. Needs a C++ compiler.
"""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch._inductor import compile_fx, metrics
from torch._inductor import config as inductor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from portable_fsdp.models.loss import attach_loss, chunks, cross_entropy_to_compile

TOKENS, WIDTH, VOCABULARY = 8192, 4096, 128_256
RESULT = Path(__file__).parent / "results/loss_bytes.md"
FEW_READ = ("gather", "nll_loss_forward", "scatter_")  # a number a row
VIEWS = ("detach", "_unsafe_view")
ONLY_WRITTEN = ("nll_loss_backward",)


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False, device="meta", dtype=torch.bfloat16)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def forward(self, input_ids: Tensor, use_cache: bool) -> SimpleNamespace:
        return SimpleNamespace(logits=self.head(input_ids))


class LogitBytes(TorchDispatchMode):
    """`moved`: bytes in all; `calls`: of operators that touch logits; `largest`: of their tensors, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.moved = self.calls = self.largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._overloadpacket.__name__
        logits = [_bytes_of_logits(value) for value in (args, out)]
        self.largest = max(self.largest, *map(max, logits))
        is_view = any(a.alias_info is not None and not a.alias_info.is_write for a in func._schema.arguments)
        if any(map(any, logits)) and not is_view and func._overloadpacket not in flop_registry and name not in VIEWS:
            self.calls += 1
            read, written = map(sum, logits)
            overwritten = written if name == "copy_" else 0  # and not read
            self.moved += 0 if name in FEW_READ else written + (0 if name in ONLY_WRITTEN else read - overwritten)
        return out


def _bytes_of_logits(values: Any) -> list[int]:
    tensors = [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]
    return [0, *(t.nbytes for t in tensors if t.dim() > 1 and t.shape[-1] == VOCABULARY != t.numel() // WIDTH)]


def compiled() -> str:
    """The row of the compiled loss, for one chunk."""
    start, stop = chunks(TOKENS, TOKENS * VOCABULARY)[0]
    logits = torch.zeros(stop - start, VOCABULARY, dtype=torch.bfloat16)
    compile_fx.inductor_metrics_log.setLevel(logging.INFO)  # else it counts no bytes
    metrics.reset()
    with inductor.patch(max_fusion_size=1, force_disable_caches=True):
        torch.compile(cross_entropy_to_compile, dynamic=False)(logits, torch.zeros(stop - start, dtype=torch.int64))
    each = metrics.num_bytes_accessed / logits.numel()
    kernels = len(metrics.nodes_num_elem)
    return f"| in one with the head, compiled | {each:.1f} | {kernels} a chunk | {logits.nbytes / 2**30:.2f} GiB |"


def main() -> None:
    rows = [
        "# Bytes of the loss",
        "",
        f"Written by `python benchmarks/loss_bytes.py`: {TOKENS:,} tokens, a head of {WIDTH:,} x {VOCABULARY:,},",
        f"bfloat16, torch {torch.__version__}. Counted, not timed. Chunks hold 256 MiB of float32 logits.",
        "",
        "| way | bytes a logit | kernels | largest tensor |",
        "|---|---|---|---|",
    ]
    for way, steps in (("all logits", None), ("in one with the head", ())):
        model: Any = Head()
        attach_loss(model, steps=steps)
        hidden = torch.zeros(1, TOKENS, WIDTH, device="meta", dtype=torch.bfloat16, requires_grad=True)
        with LogitBytes() as counted:
            total, _ = model(hidden, torch.zeros(1, TOKENS, device="meta", dtype=torch.int64))
            total.backward()
        each = counted.moved / (TOKENS * VOCABULARY)
        rows.append(f"| {way} | {each:.1f} | {counted.calls} | {counted.largest / 2**30:.2f} GiB |")
        print(rows[-1], flush=True)
    rows.append(compiled())
    print(rows[-1])
    RESULT.write_text("\n".join(rows) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
