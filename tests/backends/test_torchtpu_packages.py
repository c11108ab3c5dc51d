"""What native says of the packages beside torch_tpu; none of them is needed here: it reads metadata alone."""

import sys
from pathlib import Path

import pytest

from portable_fsdp.backends.native.torchtpu import check_installation
from portable_fsdp.runtime.errors import BackendError

METADATA = "Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
NEEDS = ("torch<=2.15,>=2.11", "libtpu>=0.0.50")
FITTING = {"torch": "2.13.0+cpu", "torch_tpu": "0.2.0", "libtpu": "0.0.52"}
PROBLEMS = {
    "torch_xla": (FITTING | {"torch_xla": "2.9.0"}, r"torch_tpu 0\.2\.0 and torch_xla 2\.9\.0 are both installed"),
    "no libtpu": ({"torch": "2.13.0", "torch_tpu": "0.2.0"}, r"torch_tpu 0\.2\.0 needs libtpu>=0\.0\.50, found none"),
    "an older torch": (FITTING | {"torch": "2.10.0"}, r"needs torch<=2\.15,>=2\.11, found 2\.10\.0"),
    "a newer torch": (FITTING | {"torch": "2.16.0"}, r"needs torch<=2\.15,>=2\.11, found 2\.16\.0"),
}


def install_only(site: Path, monkeypatch: pytest.MonkeyPatch, packages: dict[str, str]) -> None:
    """Metadata as pip leaves it, and no other package."""
    for name, version in packages.items():
        info = site / f"{name}-{version}.dist-info"
        info.mkdir()
        lines = "".join(f"Requires-Dist: {line}\n" for line in NEEDS) if name == "torch_tpu" else ""
        (info / "METADATA").write_text(METADATA.format(name=name, version=version) + lines)
    monkeypatch.setattr(sys, "path", [str(site)])


def test_what_fits_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_only(tmp_path, monkeypatch, FITTING)
    check_installation()


@pytest.mark.parametrize("name", PROBLEMS)
def test_what_does_not_fit_is_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    packages, message = PROBLEMS[name]
    install_only(tmp_path, monkeypatch, packages)
    with pytest.raises(BackendError, match=message) as refusal:
        check_installation()
    assert "environment" in str(refusal.value)
