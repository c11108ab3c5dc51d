"""XLA SPMD: what makes no program is refused by its line, what compiles again is named, recurrent layers are loops."""

import logging
import re
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from cases import GLOBAL_BATCH, Case
from jobs import open_case
from torch import Tensor
from workers import GetWorkers, Group, JobFailed

from portable_fsdp.runtime.errors import BackendError
from portable_fsdp.train.build import shard
from portable_fsdp.train.step import train_step

pytestmark = pytest.mark.xla

FOUR = Group("xla", 4)


class _ReadsItsGradient(torch.autograd.Function):
    """The same values; its backward branches on one, or copies them to the host, which no operator of torch does."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, copies: bool) -> Tensor:
        ctx.copies = copies
        return rows * 1

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        if ctx.copies:
            return outer[0].cpu().to(outer[0].device), None
        return outer[0] * (2 if outer[0].sum() < 0 else 1), None


def _filled(rows: Tensor) -> Tensor:
    return rows.masked_scatter(rows > 2, rows)


HOST = "would run on the host"
NO_PROGRAMS: dict[str, tuple[Callable[[Tensor], Tensor], str]] = {
    "value": (
        lambda rows: rows[: int(rows.sum().item())].sum(),
        rf"aten::_local_scalar_dense {HOST} in\n.*rows\.sum\(\)\.item",
    ),
    "operation": (
        lambda rows: torch.linalg.solve(torch.outer(rows, rows), rows).sum(),
        rf"aten::_linalg_solve_ex\S* {HOST} in\n.*linalg\.solve",
    ),
    "operation on an input": (
        lambda rows: torch.unique(rows.detach()).sum(),
        rf"aten::_unique2 {HOST} in\n.*torch\.unique",
    ),
    "gradient": (
        lambda rows: torch.zeros_like(rows).masked_scatter(rows > 2, rows).sum(),
        rf"aten::masked_select {HOST} in the backward of\n.*masked_scatter",
    ),
    "value of a gradient": (
        lambda rows: cast(Any, _ReadsItsGradient).apply(rows * 2, False).sum(),
        rf"aten::_local_scalar_dense {HOST} in\n.*outer\[0\]\.sum\(\) < 0",
    ),
    "copy of a gradient": (
        lambda rows: cast(Any, _ReadsItsGradient).apply(rows * 2, True).sum(),
        r"a value is read on the host in\n.*outer\[0\]\.cpu",
    ),
    "broken gradient": (
        lambda rows: torch.linalg.slogdet(torch.eye(2, device=rows.device) * rows.sum())[1],
        r"torch_xla fails in the backward of\n.*slogdet",
    ),
    # torch_xla compiles it for one device.
    "evaluation": (
        lambda rows: _filled(rows[:, None] * torch.ones(1, 4, device=rows.device)).sum(),
        r"torch_xla fails in\n.*\.masked_scatter.*\n  aten\.masked_scatter\S*: ",
    ),
    "own mistake": (lambda rows: rows * {}["absent"], ""),
}
"""Functions that make no program, and what the refusal says.

All but `value` and `operation` passed torch_xla's own check, or ended in C++.
"""

LEAVE_TENSORS = ("evaluation", "copy of a gradient")
"""XLA had begun to run these: tensors have lost their operations, and have no values yet."""


def no_program(case: Case, how: str) -> None:
    """Forward and backward of one of them; its refusal is the JobFailed that the test expects.

    The next engine of the process works, or is refused while the error keeps tensors of the refused program.
    """
    backend, _ = open_case(case)

    def run(rows: Tensor) -> dict[str, Tensor]:
        weights = rows.detach().requires_grad_(how != "evaluation")
        total = NO_PROGRAMS[how][0](weights)
        if total.requires_grad:
            total.backward()
        return {"total": total.detach(), "gradient": rows if weights.grad is None else weights.grad}

    rows = {"rows": torch.arange(GLOBAL_BATCH).float()}
    try:
        with backend:
            backend.compile(run, "asks")(backend.place(rows)["rows"])
        return
    except Exception as error:
        refused = error
    if how in LEAVE_TENSORS:
        with pytest.raises(BackendError, match=r"without values\.\n  Start a new process"):
            open_case(case)
        refused = BackendError(str(refused))
    following, _ = open_case(case)
    with following:
        total = following.compile(lambda rows: {"total": rows.sum()}, "next")(following.place(rows)["rows"])["total"]
        assert float(total) == rows["rows"].sum()
    raise refused


REFUSED = [how for how, (_, words) in NO_PROGRAMS.items() if words]


@pytest.mark.parametrize(
    ("how", "devices"),
    [
        *((how, 4) for how in REFUSED),
        *(pytest.param(how, 1, marks=pytest.mark.proof) for how in REFUSED if how != "evaluation"),
    ],
)
def test_what_is_no_program_is_refused_by_its_operation_and_line(workers: GetWorkers, how: str, devices: int) -> None:
    """In forward, in backward and when it is compiled, whatever the number of devices; closing hides nothing."""
    with pytest.raises(JobFailed) as failure:
        workers(Group("xla", devices)).run(no_program, case=Case(), how=how)
    assert failure.value.kind == "BackendError"
    assert re.search(rf"'asks': XLA can't compile it: {NO_PROGRAMS[how][1]}", failure.value.message)
    assert re.search(r"test_xla_programs\.py:\d+: ", failure.value.message)
    assert not re.search("Traceback|stack trace", failure.value.message)


def test_a_backward_before_the_first_device_is_refused_in_one_sentence() -> None:
    """torch counts the devices at a process's first backward: its own words are an assertion and `report a bug`."""
    program = (
        "import torch\n"
        "torch.ones(1, requires_grad=True).sum().backward()\n"
        "from portable_fsdp.backends.torch_xla.runtime import set_environment\n"
        "from portable_fsdp.backends.torch_xla.program import run_program\n"
        "set_environment('cpu')\n"
        "import torch_xla\n"
        "rows = torch.ones(1, device='xla', requires_grad=True)\n"
        "run_program(lambda: rows.sum().backward(), 'backend xla', 'step')\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert "BackendError: backend xla: a backward ran in this process before" in done.stderr


def test_an_error_of_the_models_own_stays_as_it_is(workers: GetWorkers) -> None:
    with pytest.raises(JobFailed) as failure:
        workers(FOUR).run(no_program, case=Case(), how="own mistake")
    assert failure.value.kind == "KeyError"


def warnings_of_three_steps(how: str, width: int) -> list[str]:
    """Of a small model, for which something changes at the third step."""
    changes, messages = [False], list[str]()

    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(2, width), torch.nn.Linear(width, 2)

        def forward(self, rows: Tensor) -> Tensor:
            if how == "gradient" and changes[0]:
                return self.first(rows)
            rows = self.second(self.first(rows))
            return rows.tanh() if how == "branch" and changes[0] else rows

    def loss(model: torch.nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        losses = model(batch["rows"]).square().flatten(1).mean(1)
        return losses.sum(), torch.ones_like(losses).sum()

    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())
    logging.getLogger("portable_fsdp").addHandler(handler)
    backend, config = open_case(Case())
    with backend:
        model, optimizer = shard(Two, config, backend)
        step = train_step(backend, model, optimizer, accumulation=1, max_grad_norm=1.0, task=loss)
        for number in range(3):
            changes[0] = number == 2
            if how == "number":
                optimizer.param_groups[0]["betas"] = (0.0 if changes[0] else 0.5, 0.9)
            shape = (GLOBAL_BATCH, 3, 2) if how == "shape" and changes[0] else (GLOBAL_BATCH, 2)
            step([backend.place({"rows": torch.ones(shape)})], 0.01 * (number + 1))
    logging.getLogger("portable_fsdp").removeHandler(handler)
    return messages


LOST = [f"the gradient of second.{name} changed from present to absent" for name in ("weight", "bias")]
CAUSES = {
    "shape": f"rows changed from [{GLOBAL_BATCH}, 2] torch.float32 to [{GLOBAL_BATCH}, 3, 2] torch.float32.",
    "gradient": "; ".join(LOST) + ".",
    "number": "betas of optimizer group 0 changed from (0.5, 0.9) to (0.0, 0.9).",
    "branch": "no input, gradient or optimizer number c",
    "nothing": "",
}


@pytest.mark.parametrize("how", CAUSES)
def test_a_program_that_is_compiled_again_is_named_with_the_cause(how: str, workers: GetWorkers) -> None:
    """The learning rate changes at each step, and is never the cause."""
    width = 2 + list(CAUSES).index(how)  # each has a width of its own: a worker keeps its programs
    messages = workers(FOUR).run(warnings_of_three_steps, how=how, width=width)[0]
    causes = [message.partition("Cause: ")[2] for message in messages if "Cause: " in message]
    assert [cause[:40] if how == "branch" else cause for cause in causes] == [CAUSES[how]] * (how != "nothing")


def programs_of_reads(case: Case) -> tuple[int, list[dict[str, Tensor]]]:
    """Compilations of 5 further steps whose outputs are read, and the outputs."""
    from torch_xla.debug.metrics import metric_data

    backend, _ = open_case(case)
    compiled, out = list[int](), list[dict[str, Tensor]]()

    def step(rows: Tensor) -> dict[str, Tensor]:
        return {"rows": rows, "logits": rows[:, None] * rows, "large": rows > 2}

    with backend:
        program = backend.compile(step, "read")
        for number in range(6):
            rows = backend.place({"rows": torch.arange(GLOBAL_BATCH) + number})["rows"]
            out.append(backend.fetch(program(rows)).result())
            compiled.append(cast(Any, metric_data)("CompileTime")[0])
        return compiled[-1] - compiled[0], out


def test_reading_what_a_program_returns_compiles_nothing(workers: GetWorkers) -> None:
    [(compiled, out)] = workers(FOUR).run(programs_of_reads, case=Case())
    assert compiled == 0
    for number, tensors in enumerate(out):
        rows = torch.arange(GLOBAL_BATCH) + number
        for name, expected in (("rows", rows), ("logits", rows[:, None] * rows), ("large", rows > 2)):
            torch.testing.assert_close(tensors[name], expected, rtol=0, atol=0)


def recurrent(kind: str, options: dict[str, Any], data: Tensor, device: str = "cpu") -> dict[str, Tensor]:
    """Outputs and gradients of a recurrent layer, which was evaluated before."""
    torch.manual_seed(0)
    layer: Any = getattr(torch.nn, kind)(3, 3, batch_first=True, **options)
    weights = {name: value.detach().to(device) for name, value in layer.named_parameters()}
    call: Any = partial(torch.func.functional_call, layer, weights)
    given = data.to(device)
    with torch.no_grad():
        call((given,))
    for weight in weights.values():
        weight.requires_grad_()
    embedded = given.clone().requires_grad_()
    frozen, _ = call((given,))  # as data, or a frozen embedding, are
    output, last = call((embedded,))
    states = last if isinstance(last, tuple) else (last,)
    (output.square().sum() + frozen.cos().sum() + sum(state.sin().sum() for state in states)).backward()
    gradients = {name: cast(Tensor, tensor.grad) for name, tensor in {"input": embedded, **weights}.items()}
    return {"output": output, **gradients}


def recurrent_on_xla(**arguments: Any) -> dict[str, Any]:
    import torch_xla

    with open_case(Case())[0]:
        tensors = recurrent(**arguments, device="xla")
        loops = cast(Any, torch_xla)._XLAC._get_xla_tensors_hlo([tensors["output"]]).count(" while(")
        torch_xla.sync()  # one program for all of them
        return {"loops": loops, **{name: tensor.detach().cpu() for name, tensor in tensors.items()}}


@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")  # torch's own, on the host
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("LSTM", {"num_layers": 2, "bidirectional": True}),
        pytest.param("LSTM", {"proj_size": 2, "bias": False}, marks=pytest.mark.proof),
        ("GRU", {"num_layers": 2}),
        pytest.param("RNN", {"bidirectional": True, "bias": False, "nonlinearity": "relu"}, marks=pytest.mark.proof),
    ],
)
def test_recurrent_layers_are_loops_with_the_values_of_torch(
    workers: GetWorkers, kind: str, options: dict[str, Any]
) -> None:
    """Unrolled they would compile for minutes; torch_xla's GRU loses gradients after an evaluation."""
    data = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(1))
    [answer] = workers(FOUR).run(recurrent_on_xla, kind=kind, options=options, data=data)
    assert answer.pop("loops") == options.get("num_layers", 1) * (1 + options.get("bidirectional", False))
    torch.testing.assert_close(answer, recurrent(kind, options, data), rtol=1e-5, atol=1e-6)


def matmul_precision(case: Case) -> tuple[list[str], str]:
    """XLA's setting before a backend opens, while it is open, and after; and a product traced in between, as HLO."""
    import torch_xla

    bridge: Any = cast(Any, torch_xla)._XLAC
    before = bridge._xla_get_mat_mul_precision()
    backend, _ = open_case(case)
    with backend:
        during = bridge._xla_get_mat_mul_precision()
        square = torch.ones(4, 4).to(backend.device)
        product = bridge._get_xla_tensors_hlo([square @ square])
    return [before, during, bridge._xla_get_mat_mul_precision()], product


@pytest.mark.parametrize("precision", ["highest", "default"])
def test_matmul_precision_holds_while_the_backend_is_open(workers: GetWorkers, precision: str) -> None:
    chosen = Case(settings={"precision.matmul": precision})
    (before, during, after), product = workers(FOUR).run(matmul_precision, case=chosen)[0]
    assert (before, during, after) == ("default", precision, "default")
    assert ("operand_precision={highest,highest}" in product) == (precision == "highest")
