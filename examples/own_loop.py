"""A training loop of one's own, with a loss of one's own: the same lines on CPUs, GPUs and TPUs, on any number of them.

python examples/own_loop.py configs/quickstart.yaml auto auto [section.key=value ...]; on several GPUs by torchrun
"""

import os
import sys

from torch import Tensor
from torch.nn.functional import cross_entropy

import portable_fsdp as pf


def smoothed(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """The sum over all labels that count (-100 doesn't), and how many they are."""
    loss = cross_entropy(logits.float().flatten(0, 1), labels.flatten(), label_smoothing=0.1, reduction="sum")
    return loss, (labels != -100).sum()


with pf.errors_as_sentences():
    path, device, backend, *overrides = sys.argv[1:] if len(sys.argv) > 3 else sys.exit(__doc__)
    config = pf.load_config(path, overrides, environ=os.environ)
    with pf.open_backend(config, device=device, backend=backend) as engine:
        corpus = pf.build_data(config.data, config.model)
        steps = pf.total_steps(config, len(corpus.rows))
        training = pf.build_training(config, engine, corpus.tokenizer, loss=smoothed)
        with pf.open_checkpoints(config, engine, training, corpus) as checkpoints:
            point, every = checkpoints.find(config.checkpoint.resume), config.checkpoint.every
            resumed = checkpoints.load(point, training.model, training.optimizer) if point else None
            with pf.open_batches(config, engine, training, corpus, resumed) as batches:
                for step in range(resumed.step + 1 if resumed else 1, steps + 1):
                    rows, lr = next(batches), pf.learning_rate(config.optim, step, steps)
                    metrics = training.step([engine.place(batch) for batch in rows.micro_batches], lr, [rows.count])
                    if engine.process.index == 0 and step % config.train.log_every == 0:  # then it waits
                        print(f"step: {step}  loss: {engine.fetch(metrics).result()['loss'].item():.4f}")
                    if step == steps or (isinstance(every, int) and step % every == 0):
                        checkpoints.save(step, training.model, training.optimizer, batches.position)
            checkpoints.wait()
