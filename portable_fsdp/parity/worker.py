"""One place of a comparison: `python -m portable_fsdp.parity.worker PARENT TASK` trains some steps and writes a record.

Saves nothing, and leaves run.dir alone. PARENT is the process to end with, TASK the JSON file of a `PlaceTask`.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, cast

from portable_fsdp.backends.open import open_backend
from portable_fsdp.config.schema import Config
from portable_fsdp.optim.schedule import learning_rate
from portable_fsdp.parity.record import PlaceTask, RunRecord
from portable_fsdp.runtime.command import configure_log
from portable_fsdp.runtime.elastic import run_processes
from portable_fsdp.runtime.errors import EXIT_FINISHED, PortableFSDPError
from portable_fsdp.runtime.files import write_text_atomically
from portable_fsdp.runtime.process import detect_launch, end_with_agent, end_with_parent

if TYPE_CHECKING:
    from portable_fsdp.backends.base import Backend
    from portable_fsdp.train.build import Training

Prepare = Callable[["Training"], None]
"""Called with the training before its first step."""


def main(argv: list[str], prepare: Prepare = lambda training: None) -> int:
    """Do the task; returns the exit code. An error of ours goes into the file `<out>.error`."""
    parent, path = argv
    task, launch = PlaceTask.model_validate_json(Path(path).read_bytes()), detect_launch(os.environ)
    if launch.is_alone:
        end_with_parent(int(parent))
        if task.processes > 1:
            return run_processes(task.processes, task.module, argv)
    end_with_agent(os.environ)
    try:
        record = run(task, prepare)
    except PortableFSDPError as error:
        write_text_atomically(Path(f"{task.out}.error"), str(error))
        return error.exit_code
    if record is not None:
        write_text_atomically(Path(task.out), record.model_dump_json())
    return EXIT_FINISHED


def run(task: PlaceTask, prepare: Prepare = lambda training: None) -> RunRecord | None:
    """Train the first steps of the config on one place; None on all processes but the first. *collective*"""
    from portable_fsdp.parity.recorder import StepRecorder, state_statistics
    from portable_fsdp.train.build import build_training, open_batches, total_steps
    from portable_fsdp.train.consistency import open_data
    from portable_fsdp.train.records import environment
    from portable_fsdp.train.step import train_step

    config, place = Config.model_validate_json(task.config), task.place
    with open_backend(config, device=place.device, backend=place.engine, num_devices=place.devices) as engine:
        configure_log(engine.process.index)
        corpus = open_data(config, engine)
        training = build_training(config, engine, corpus.tokenizer)
        prepare(training)
        record = RunRecord(place=place, device_name=engine.device_name, versions=environment())
        step, recorder = training.step, None
        if task.records:
            recorder = StepRecorder(engine, training)
            clip = config.train.max_grad_norm
            step = train_step(
                cast("Backend", recorder),
                training.model,
                training.optimizer,
                accumulation=training.accumulation,
                max_grad_norm=clip,
            )
            record.state.append(state_statistics(engine, training))
        total = total_steps(config, len(corpus.rows))
        with open_batches(config, engine, training, corpus) as batches:
            for number in range(1, min(task.steps, total) + 1):
                placed = [engine.place(batch) for batch in next(batches)]
                metrics = engine.fetch(step(placed, learning_rate(config.optim, number, total))).result()
                record.losses.append(metrics["loss"].item())
                record.grad_norms.append(metrics["grad_norm"].item())
                if recorder:
                    record.modules.append(recorder.take())
                    record.state.append(state_statistics(engine, training))
        return record if engine.process.index == 0 else None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
