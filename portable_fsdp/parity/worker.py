"""One place of a comparison: `python -m portable_fsdp.parity.worker PARENT TASK` trains some steps and writes records.

Saves nothing, and leaves run.dir alone. PARENT is the process to end with, TASK the JSON file of a `PlaceTask`.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from portable_fsdp.backends.open import local_processes, open_backend, spec_of
from portable_fsdp.config.schema import Config
from portable_fsdp.parity.record import Place, PlaceRecord, PlaceTask, RunTask
from portable_fsdp.runtime.command import configure_log
from portable_fsdp.runtime.errors import EXIT_FINISHED, PortableFSDPError
from portable_fsdp.runtime.files import write_text_atomically
from portable_fsdp.runtime.launchers import detect_launch
from portable_fsdp.runtime.rendezvous import run_processes
from portable_fsdp.runtime.signals import end_with_agent, end_with_parent

if TYPE_CHECKING:
    from portable_fsdp.train.build import Training


def main(argv: list[str], prepare: Callable[["Training"], None] = lambda training: None) -> int:
    """Do the task; returns the exit code. `prepare` gets the training before its first step.

    An error of ours goes into the file `<out>.error`.
    """
    parent, path = argv
    task, launch = PlaceTask.model_validate_json(Path(path).read_bytes()), detect_launch(os.environ)
    place = task.place
    if launch.is_alone:
        end_with_parent(int(parent))
        processes = local_processes(place.device, place.engine, place.devices)
        hosts = spec_of(place.engine).prepare_start(place.device, processes, os.environ)
        if processes > 1 or hosts:
            return run_processes(processes, task.module, argv, hosts)
    end_with_agent(os.environ)
    try:
        records = [run(place, each, prepare) for each in task.runs]
    except PortableFSDPError as error:
        write_text_atomically(Path(f"{task.out}.error"), str(error))
        return error.exit_code
    if launch.rank == 0:
        write_text_atomically(Path(task.out), "\n".join(record.model_dump_json() for record in records))
    return EXIT_FINISHED


def run(place: Place, task: RunTask, prepare: Callable[["Training"], None]) -> PlaceRecord:
    """Train the first steps of a run. *collective*"""
    from portable_fsdp.observe.run_files import environment
    from portable_fsdp.optim.optimizer import learning_rate
    from portable_fsdp.parity.recorder import StepRecorder, state_statistics
    from portable_fsdp.train.build import build_training, open_batches, total_steps
    from portable_fsdp.train.preflight import open_data
    from portable_fsdp.train.step import train_step

    config = Config.model_validate_json(task.config)
    with open_backend(config, device=place.device, backend=place.engine, num_devices=place.devices) as engine:
        configure_log(engine.process.index)
        corpus = open_data(config, engine)
        training = build_training(config, engine, corpus.tokenizer, rows=corpus.rows)
        prepare(training)
        record = PlaceRecord(place=place, device_name=engine.device_name, versions=environment())
        step, total = training.step, total_steps(config, len(corpus.rows))
        recorder: Any = StepRecorder(engine, training) if task.records else None
        if recorder:
            step = train_step(
                recorder,
                training.model,
                training.optimizer,
                accumulation=training.accumulation,
                max_grad_norm=config.train.max_grad_norm,
                task=training.task,
            )
            record.state.append(state_statistics(engine, training))
        with open_batches(config, engine, training, corpus) as batches:
            for number in range(1, min(task.steps, total) + 1):
                rows, lr = next(batches), learning_rate(config.optim, number, total)
                placed = [engine.place(batch) for batch in rows.micro_batches]
                metrics = engine.fetch(step(placed, lr, [rows.count])).result()
                record.losses.append(metrics["loss"].item())
                record.grad_norms.append(metrics["grad_norm"].item())
                if recorder:
                    record.modules.append(recorder.total)
                    recorder.total = {}
                    record.state.append(state_statistics(engine, training))
        return record


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
