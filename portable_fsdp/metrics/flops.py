"""What a device can do at most, and what a model needs: together they are MFU.

MFU (PaLM, arXiv 2204.02311, appendix B) counts the FLOPs of the model, not those of recomputation, against the dense
peak of the device in the compute dtype.
"""

import re
from typing import NamedTuple

TERA = 1e12


class PeakFlops(NamedTuple):
    """Dense peaks of one device in TFLOP/s (multiply and add count as two); None: the vendor gives no figure."""

    words: tuple[str, ...]  # all of them stand in the device's name
    bfloat16: float | None
    float32: float | None  # outside of tensor cores: PyTorch's float32 matmul unless TF32 is allowed
    tf32: float | None
    source: str


_CLOUD_TPU = "peak compute per chip (bf16), docs.cloud.google.com/tpu/docs/"

# Specific names before general ones: the first row whose words all stand in the name counts. NVIDIA's data sheets give
# tensor-core figures "with sparsity"; such rows hold half of that, the dense figure.
PEAKS = (
    PeakFlops(("b200",), 2250, 75, 1100, "NVIDIA HGX B200 data sheet: BF16 4.5 PF and TF32 2.2 PF sparse, FP32 75 TF"),
    PeakFlops(
        ("h200", "nvl"), 835.5, 60, 417.5, "NVIDIA H200 data sheet, NVL: BF16 1,671 and TF32 835 sparse, FP32 60"
    ),
    PeakFlops(("h200",), 989, 67, 494.5, "NVIDIA H200 data sheet, SXM: BF16 1,979 and TF32 989 sparse, FP32 67"),
    PeakFlops(
        ("h100", "nvl"), 835.5, 60, 417.5, "NVIDIA H100 data sheet, NVL: BF16 1,671 and TF32 835 sparse, FP32 60"
    ),
    PeakFlops(("h100", "pcie"), 756, 51, 378, "NVIDIA H100 data sheet, PCIe: BF16 1,513 and TF32 756 sparse, FP32 51"),
    PeakFlops(("h100", "hbm3"), 989, 67, 494.5, "NVIDIA H100 data sheet, SXM: BF16 1,979 and TF32 989 sparse, FP32 67"),
    PeakFlops(("a100", "64gb"), None, None, None, "a custom part with more cores than the A100 of the data sheet"),
    PeakFlops(("a100",), 312, 19.5, 156, "NVIDIA A100 data sheet, dense, PCIe and SXM alike"),
    PeakFlops(("l40s",), 362, 91.6, 183, "NVIDIA L40S data sheet, dense"),
    PeakFlops(("l4",), 121, 30.3, 60, "NVIDIA L4 data sheet: BF16 242 and TF32 120 sparse, FP32 30.3"),
    PeakFlops(("v100", "sxm2"), None, 15.7, None, "NVIDIA V100 data sheet, SXM2; no bfloat16 tensor cores"),
    PeakFlops(("v100", "pcie"), None, 14, None, "NVIDIA V100 data sheet, PCIe; no bfloat16 tensor cores"),
    PeakFlops(("tpu7x",), 1153.5, None, None, _CLOUD_TPU + "tpu7x: 2307; a chip is two devices"),
    PeakFlops(("tpu", "v6e"), 918, None, None, _CLOUD_TPU + "v6e"),
    PeakFlops(("tpu", "v6", "lite"), 918, None, None, _CLOUD_TPU + "v6e; the name that PJRT gives it"),
    PeakFlops(("tpu", "v5p"), 459, None, None, _CLOUD_TPU + "v5p"),
    PeakFlops(("tpu", "v5e"), 197, None, None, _CLOUD_TPU + "v5e"),
    PeakFlops(("tpu", "v5", "lite"), 197, None, None, _CLOUD_TPU + "v5e; the name that PJRT gives it"),
    PeakFlops(("tpu", "v5"), 459, None, None, _CLOUD_TPU + "v5p; the name that PJRT gives it"),
    PeakFlops(("tpu", "v4", "lite"), None, None, None, "the inference chip v4i, not rented out"),
    PeakFlops(("tpu", "v4"), 275, None, None, _CLOUD_TPU + "v4"),
    PeakFlops(("tpu", "v3"), 61.5, None, None, _CLOUD_TPU + "v3: 123; a chip is two devices"),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense peak of one device in FLOP/s, by the name that its driver gives ("NVIDIA H100 80GB HBM3", "TPU v5p").

    `dtype` is bfloat16, float32 or tf32 (float32 matmuls rounded to TF32). None for what the table doesn't know:
    another device or dtype, or a slice of a device (MIG); MFU is then unknown, never guessed.
    """
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if "mig" in words:
        return None
    row = next((row for row in PEAKS if words.issuperset(row.words)), None)
    if row is None:
        return None
    tera = {"bfloat16": row.bfloat16, "float32": row.float32, "tf32": row.tf32}.get(dtype)
    return None if tera is None else tera * TERA


def model_flops_per_token(
    parameters: int, embedding_parameters: int, layers: int, hidden: int, seq_len: int, frozen_parameters: int = 0
) -> float:
    """Model FLOPs of forward and backward per token: 6 (N - E) + 12 L Q T (PaLM, arXiv 2204.02311, appendix B).

    Each weight of a matmul costs a multiply and an add forward, and twice that backward (gradients of the input and of
    the weight): 6. Attention scores and their use on the values are two matmuls of width Q = heads * head_dim with T
    keys a token: 2 * 2 Q T forward, three times that with the backward: 12 in each of L layers.

    NON-CAUSAL, as in PaLM and torchtitan: all T keys are counted though the causal mask leaves half of them; count
    6 L Q T for the causal convention. Recomputation (gradient checkpointing) is not counted, nor are norms, softmax,
    the optimizer, and that biases and norm weights (in N, under 0.1 %) cost less than 6.

    Args:
        parameters: N, all parameters, a tied weight once.
        embedding_parameters: E, those only looked up, never multiplied: input and position embeddings. A tied token
            embedding is the head's matrix too, so it is not in E.
        layers: L.
        hidden: Q; the model's hidden size where that is heads * head_dim.
        seq_len: T, tokens.
        frozen_parameters: weights of matmuls that don't train. Their own gradient, a third of the 6, isn't computed;
            that of their input is, as long as something before them trains.
    """
    return 6.0 * (parameters - embedding_parameters) - 2.0 * frozen_parameters + 12.0 * layers * hidden * seq_len
