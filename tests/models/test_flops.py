import pytest

from portable_fsdp.models.weights import PEAKS, model_flops_per_token, peak_flops

# Device, dtype -> TFLOP/s; None: never guessed.
KNOWN = {
    "NVIDIA H100 80GB HBM3": {"bfloat16": 989, "float32": 67, "tf32": 494.5},
    "NVIDIA H100 PCIe": {"bfloat16": 756},
    "NVIDIA H100 NVL": {"bfloat16": 835.5},
    "NVIDIA H100 64GB HBM2": {"bfloat16": None},
    "NVIDIA H200": {"bfloat16": 989, "float8": None},
    "NVIDIA H200 NVL": {"bfloat16": 835.5},
    "NVIDIA H20": {"bfloat16": None},
    "NVIDIA A100-SXM4-80GB": {"bfloat16": 312, "float16": 312},
    "NVIDIA A100-PCIE-40GB": {"float32": 19.5},
    "NVIDIA A100-SXM-64GB": {"bfloat16": None},
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": {"bfloat16": None},
    "NVIDIA A10": {"bfloat16": None},
    "NVIDIA L4": {"bfloat16": 121},
    "NVIDIA L40": {"bfloat16": None},
    "NVIDIA L40S": {"bfloat16": 362},
    "NVIDIA B200": {"bfloat16": 2250},
    "NVIDIA GB200": {"bfloat16": None},  # another power limit than B200
    "Tesla V100-SXM2-16GB": {"float32": 15.7, "bfloat16": None, "float16": 125},
    "TPU v3": {"bfloat16": 61.5},
    "TPU v4": {"bfloat16": 275},
    "TPU v4 lite": {"bfloat16": None},
    "TPU v5 lite": {"bfloat16": 197},
    "TPU v5e": {"bfloat16": 197},
    "TPU v5": {"bfloat16": 459},
    "TPU v5p": {"bfloat16": 459},
    "TPU v6 lite": {"bfloat16": 918},
    "TPU v6e": {"float32": None},
    "TPU v7": {"bfloat16": 1153.5},
    "TPU7x": {"bfloat16": 1153.5},
    "cpu": {"float32": None},
    "": {"bfloat16": None},
}


@pytest.mark.parametrize("name", KNOWN)
def test_peaks_of_devices(name: str) -> None:
    for dtype, tera in KNOWN[name].items():
        assert peak_flops(name, dtype) == (None if tera is None else tera * 1e12)


def test_every_row_has_a_source_and_can_be_reached() -> None:
    for place, row in enumerate(PEAKS):
        assert len(row.source) > 20
        assert not [earlier for earlier in PEAKS[:place] if set(earlier.words) <= set(row.words)], row.words


def test_llama_3_8b_at_8192_tokens() -> None:
    """8,030,261,248 parameters, untied embedding of 128256 x 4096: 57.9 GFLOPs a token, as torchtitan counts."""
    flops = model_flops_per_token(8_030_261_248, 128_256 * 4096, layers=32, hidden=4096, seq_len=8192)
    assert flops == pytest.approx(57.91e9, rel=1e-4)


def test_formula_against_a_count_of_matmuls() -> None:
    """One layer of width 8 with 3 projections, 5 tokens: multiply and add forward, twice that backward."""
    weights, scores = 3 * 8 * 8, 2 * 8 * 5
    assert model_flops_per_token(weights + 100, 100, layers=1, hidden=8, seq_len=5) == 3 * 2 * (weights + scores)
