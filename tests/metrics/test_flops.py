import pytest

from portable_fsdp.metrics.flops import PEAKS, model_flops_per_token, peak_flops


@pytest.mark.parametrize(
    ("name", "dtype", "tera"),
    [
        ("NVIDIA H100 80GB HBM3", "bfloat16", 989),
        ("NVIDIA H100 80GB HBM3", "float32", 67),
        ("NVIDIA H100 80GB HBM3", "tf32", 494.5),
        ("NVIDIA H100 PCIe", "bfloat16", 756),
        ("NVIDIA H100 NVL", "bfloat16", 835.5),
        ("NVIDIA H200", "bfloat16", 989),
        ("NVIDIA H200 NVL", "bfloat16", 835.5),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100-PCIE-40GB", "float32", 19.5),
        ("NVIDIA L4", "bfloat16", 121),
        ("NVIDIA L40S", "bfloat16", 362),
        ("NVIDIA B200", "bfloat16", 2250),
        ("Tesla V100-SXM2-16GB", "float32", 15.7),
        ("TPU v4", "bfloat16", 275),
        ("TPU v5 lite", "bfloat16", 197),
        ("TPU v5e", "bfloat16", 197),
        ("TPU v5", "bfloat16", 459),
        ("TPU v5p", "bfloat16", 459),
        ("TPU v6 lite", "bfloat16", 918),
        ("TPU v3", "bfloat16", 61.5),
        ("TPU7x", "bfloat16", 1153.5),
    ],
)
def test_known_devices(name: str, dtype: str, tera: float) -> None:
    assert peak_flops(name, dtype) == tera * 1e12


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("NVIDIA L40", "bfloat16"),  # not an L4, nor an L40S
        ("NVIDIA A10", "bfloat16"),
        ("NVIDIA GB200", "bfloat16"),  # another power limit than B200
        ("NVIDIA H20", "bfloat16"),
        ("NVIDIA H100 64GB HBM2", "bfloat16"),
        ("NVIDIA A100-SXM-64GB", "bfloat16"),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bfloat16"),
        ("Tesla V100-SXM2-16GB", "bfloat16"),
        ("TPU v4 lite", "bfloat16"),
        ("TPU v6e", "float32"),
        ("NVIDIA H200", "float8"),
        ("cpu", "float32"),
        ("", "bfloat16"),
    ],
)
def test_what_the_table_does_not_know_is_never_guessed(name: str, dtype: str) -> None:
    assert peak_flops(name, dtype) is None


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
