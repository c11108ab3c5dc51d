"""Scripts and notebooks on `portable_fsdp.Accelerator`, as people start them."""

import json
from pathlib import Path

import pytest
from cli import PROGRAMS, ROOT, finish
from test_accelerate_launch import NATIVE, accelerate

pytestmark = pytest.mark.slow

SCRIPT = """
import sys
from accelerate.logging import get_logger
from accelerate.utils import set_seed
import torch
from torch.utils.data import DataLoader, TensorDataset
from portable_fsdp import Accelerator

set_seed(1)  # before the Accelerator: it must not take an XLA device, which would fix their number


def train(path):
    accelerator = Accelerator(split_batches=True)
    rows = torch.randn(24, 4, generator=torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 1)
    model, optimizer, loader = accelerator.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), DataLoader(TensorDataset(rows), batch_size=12)
    )
    losses = []
    for epoch in range(2):
        for (x,) in loader:
            with accelerator.accumulate(model):
                loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach()).mean().item())
    get_logger(__name__).warning("trained", main_process_only=True)
    if accelerator.is_main_process:
        kinds = [str(accelerator.distributed_type), accelerator.num_processes, losses]
        open(path, "w").write(repr(kinds))
    accelerator.end_training()
"""
MAIN = """
if __name__ == "__main__":
    train(sys.argv[1])
"""
LAUNCH = """
from portable_fsdp import notebook_launcher
notebook_launcher(train, ("out.txt",), num_processes={count})
"""


def result(folder: Path) -> tuple[str, int, list[float]]:
    kind, count, losses = eval((folder / "out.txt").read_text())
    return kind.removeprefix("DistributedType."), count, losses


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    folder = tmp_path_factory.mktemp("plain")
    (folder / "script.py").write_text(SCRIPT + MAIN)
    run = finish([str(PROGRAMS / "python"), "script.py", "out.txt"], folder, PORTABLE_FSDP="device=cpu backend=native")
    assert result(folder)[:2] == ("NO", 1)
    assert "[Gloo]" not in run.out + run.err
    return result(folder)[2]


@pytest.mark.parametrize(
    ("start", "variables", "kind"),
    [
        (["python"], {"PORTABLE_FSDP": "device=cpu backend=native num_devices=2"}, "FSDP"),
        (["torchrun", "--standalone", "--nproc_per_node=2"], {"PORTABLE_FSDP": "device=cpu"}, "FSDP"),
        (["accelerate"], NATIVE, "FSDP"),
        pytest.param(
            ["python"],
            {"PORTABLE_FSDP": "device=cpu backend=xla num_devices=2"},
            "XLA",
            marks=pytest.mark.xla,
        ),
    ],
    ids=["plainly", "torchrun", "accelerate launch", "xla"],
)
def test_each_way_to_start_a_script_trains_alike(
    start: list[str], variables: dict[str, str], kind: str, plain: list[float], tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT + MAIN)
    is_launch = start == ["accelerate"]
    fsdp = {"fsdp_version": 2, "fsdp_reshard_after_forward": False}
    theirs = {"mixed_precision": "no", "fsdp_config": fsdp}
    program = accelerate(tmp_path, **theirs) if is_launch else [str(PROGRAMS / start[0]), *start[1:]]
    run = finish([*program, "script.py", "out.txt"], tmp_path, **variables)
    assert result(tmp_path) == (kind, 2, pytest.approx(plain, rel=1e-5))
    starts_its_own = start == ["python"] and kind == "FSDP"
    assert ("the lines before Accelerator() run again in each" in run.err) == starts_its_own
    assert "[Gloo]" not in run.out + run.err


@pytest.mark.parametrize(
    "variable", ["device=cpu", pytest.param("device=cpu backend=xla num_devices=2", marks=pytest.mark.xla)]
)
def test_a_notebook_trains_in_forked_processes_or_on_xla(
    variable: str, plain: list[float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A real notebook, in a kernel of its own; a backward has run before."""
    import nbclient
    import nbformat

    backward = "torch.nn.Linear(2, 2)(torch.ones(2)).sum().backward()" if "xla" not in variable else "pass"
    cells = [nbformat.v4.new_code_cell(cell) for cell in (SCRIPT, backward, LAUNCH.format(count=2))]
    notebook = nbformat.v4.new_notebook(cells=cells)
    monkeypatch.setenv("PORTABLE_FSDP", variable)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    where = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=120, kernel_name="python3", resources=where).execute()
    assert result(tmp_path)[1:] == (2, pytest.approx(plain, rel=1e-5))
    assert "Traceback" not in json.dumps(notebook.cells[-1].outputs)


def test_a_mistake_ends_a_script_with_one_sentence(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("from portable_fsdp import Accelerator\nAccelerator(mixed_precision='fp8')\n")
    run = finish([str(PROGRAMS / "python"), "script.py"], tmp_path, 2)
    assert run.err.strip() == "Accelerator: mixed_precision=fp8 isn't built.\n  Set bf16 or no."
