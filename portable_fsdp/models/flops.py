"""The peak FLOP/s of devices, and the FLOPs of a model: together they give MFU.

MFU (PaLM, arXiv 2204.02311, appendix B) counts the FLOPs of the model, not those of recomputation, against the dense
peak of the device in the compute dtype.
"""

import re
from typing import NamedTuple

TERA = 1e12


class Peaks(NamedTuple):
    """Dense peaks of one device in TFLOP/s (multiply and add count as two); None: the vendor publishes no figure."""

    words: tuple[str, ...]  # all of them are in the device's name
    bfloat16: float | None
    float32: float | None  # outside of tensor cores: PyTorch's float32 matmul unless TF32 is allowed
    tf32: float | None
    source: str
    float16: float | None = None  # None: same as bfloat16, as on tensor cores


_CLOUD_TPU = "peak compute per chip (bf16), docs.cloud.google.com/tpu/docs/"

# Specific names before general ones: the first row whose words are all in the name applies. NVIDIA's data sheets give
# tensor-core figures "with sparsity"; such rows hold half of that, the dense figure.
PEAKS = (
    Peaks(("b200",), 2250, 75, 1100, "NVIDIA HGX B200 data sheet: BF16 4.5 PF and TF32 2.2 PF sparse, FP32 75 TF"),
    Peaks(("h200", "nvl"), 835.5, 60, 417.5, "NVIDIA H200 data sheet, NVL: BF16 1,671 and TF32 835 sparse, FP32 60"),
    Peaks(("h200",), 989, 67, 494.5, "NVIDIA H200 data sheet, SXM: BF16 1,979 and TF32 989 sparse, FP32 67"),
    Peaks(("h100", "nvl"), 835.5, 60, 417.5, "NVIDIA H100 data sheet, NVL: BF16 1,671 and TF32 835 sparse, FP32 60"),
    Peaks(("h100", "pcie"), 756, 51, 378, "NVIDIA H100 data sheet, PCIe: BF16 1,513 and TF32 756 sparse, FP32 51"),
    Peaks(("h100", "hbm3"), 989, 67, 494.5, "NVIDIA H100 data sheet, SXM: BF16 1,979 and TF32 989 sparse, FP32 67"),
    Peaks(("a100", "64gb"), None, None, None, "a custom part with more cores than the A100 of the data sheet"),
    Peaks(("a100",), 312, 19.5, 156, "NVIDIA A100 data sheet, dense, PCIe and SXM alike"),
    Peaks(("l40s",), 362, 91.6, 183, "NVIDIA L40S data sheet, dense"),
    Peaks(("l4",), 121, 30.3, 60, "NVIDIA L4 data sheet: BF16 242 and TF32 120 sparse, FP32 30.3"),
    Peaks(("v100", "sxm2"), None, 15.7, None, "NVIDIA V100 data sheet, SXM2; no bfloat16 tensor cores", 125),
    Peaks(("v100", "pcie"), None, 14, None, "NVIDIA V100 data sheet, PCIe; no bfloat16 tensor cores", 112),
    Peaks(("tpu7x",), 1153.5, None, None, _CLOUD_TPU + "tpu7x: 2307; a chip is two devices"),
    Peaks(("tpu", "v7"), 1153.5, None, None, _CLOUD_TPU + "tpu7x; the name that torch_tpu 0.2.0 gives it"),
    Peaks(("tpu", "v6e"), 918, None, None, _CLOUD_TPU + "v6e"),
    Peaks(("tpu", "v6", "lite"), 918, None, None, _CLOUD_TPU + "v6e; the name that PJRT gives it"),
    Peaks(("tpu", "v5p"), 459, None, None, _CLOUD_TPU + "v5p"),
    Peaks(("tpu", "v5e"), 197, None, None, _CLOUD_TPU + "v5e"),
    Peaks(("tpu", "v5", "lite"), 197, None, None, _CLOUD_TPU + "v5e; the name that PJRT gives it"),
    Peaks(("tpu", "v5"), 459, None, None, _CLOUD_TPU + "v5p; the name that PJRT gives it"),
    Peaks(("tpu", "v4", "lite"), None, None, None, "the inference chip v4i, not rented out"),
    Peaks(("tpu", "v4"), 275, None, None, _CLOUD_TPU + "v4"),
    Peaks(("tpu", "v3"), 61.5, None, None, _CLOUD_TPU + "v3: 123; a chip is two devices"),
)


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Return the dense peak of one device in FLOP/s, by its driver's name ("NVIDIA H100 80GB HBM3", "TPU v5p").

    `dtype` is bfloat16, float16, float32 or tf32 (float32 matmuls rounded to TF32). None for a device or dtype that is
    not in the table, and for a slice of a device (MIG); MFU is then unknown, never guessed.
    """
    words = set(re.split(r"[^a-z0-9]+", device_name.lower()))
    if "mig" in words:
        return None
    row = next((row for row in PEAKS if words.issuperset(row.words)), None)
    if row is None:
        return None
    halves = {"bfloat16": row.bfloat16, "float16": row.float16 or row.bfloat16}
    tera = {**halves, "float32": row.float32, "tf32": row.tf32}.get(dtype)
    return None if tera is None else tera * TERA


class RowCost(NamedTuple):
    """Tokens of a row (1 if rows have no tokens), and model FLOPs of forward and backward if torch counts them."""

    tokens: int
    flops: float | None


def model_flops_per_token(
    parameters: int, embedding_parameters: int, layers: int, hidden: int, seq_len: int, frozen_parameters: int = 0
) -> float:
    """Return model FLOPs of forward and backward per token: 6 (N - E) + 12 L Q T (PaLM, arXiv 2204.02311, appendix B).

    Each weight of a matmul costs a multiply and an add forward, and twice that backward (gradients of input and
    weight): 6. Attention has two matmuls (scores, values) of width Q = heads * head_dim with T keys per token:
    2 * 2 Q T forward, three times that with backward: 12 in each of L layers.

    NON-CAUSAL, as in PaLM and torchtitan: all T keys count though the causal mask leaves half; the causal convention is
    6 L Q T. Not counted: recomputation (gradient checkpointing), norms, softmax, the optimizer, and that biases and
    norm weights (in N, under 0.1 %) cost less than 6.

    Args:
        parameters: N, all parameters, a tied weight once.
        embedding_parameters: E, those only looked up, never multiplied: input and position embeddings. A tied token
            embedding is the head's matrix too, so it is not in E.
        layers: L.
        hidden: Q; equals the model's hidden size if that is heads * head_dim.
        seq_len: T, tokens.
        frozen_parameters: weights of matmuls that don't train: a third of the 6, their own gradient, is not computed.
    """
    return 6.0 * (parameters - embedding_parameters) - 2.0 * frozen_parameters + 12.0 * layers * hidden * seq_len
