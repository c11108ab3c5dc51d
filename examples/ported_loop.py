"""accelerate_loop.py on portable_fsdp: python THIS cpu xla 4, or torchrun --nproc_per_node=8 THIS cuda native"""

import sys

from image_classifier import Classifier, Shapes
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import portable_fsdp as pf


def scores(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    logits, labels = model(batch["images"]), batch["labels"]
    hits = (logits.argmax(dim=-1) == labels).float()
    return cross_entropy(logits, labels, reduction="sum"), hits.new_ones(hits.shape).sum(), {"accuracy": hits.sum()}


def main(device: str = "auto", backend: str = "auto", devices: str = "") -> None:
    config = pf.make_config(
        run={"dir": "runs/ported_loop"},
        model={"factory": Classifier},
        data={"factory": Shapes, "eval_split": "test"},
        train={"task": scores, "epochs": 3, "global_batch": 24, "micro_batch": 12, "eval_every": 125},
        optim={"lr": 1e-3, "schedule": "constant", "betas": (0.9, 0.999)},
    )
    with pf.open_backend(config, device=device, backend=backend, num_devices=int(devices or 0) or None) as engine:
        corpus = pf.build_data(config.data)
        training = pf.build_training(config, engine, None, rows=corpus.rows)
        evaluate = pf.build_evaluator(config, engine, training, corpus)
        steps = pf.total_steps(config, len(corpus.rows))
        with pf.open_checkpoints(config, engine, training, corpus) as checkpoints:
            point = checkpoints.find("auto")
            resumed = checkpoints.load(point, training.model, training.optimizer) if point else None
            with pf.open_batches(config, engine, training, corpus, resumed) as batches:
                for step in range(resumed.step + 1 if resumed else 1, steps + 1):
                    lr = pf.learning_rate(config.optim, step, steps)
                    rows = next(batches)
                    training.step([engine.place(batch) for batch in rows.micro_batches], lr, [rows.count])
                    if evaluate and step % 125 == 0:
                        evaluation = evaluate()
                        if evaluation and engine.process.index == 0:
                            print(f"step {step}: accuracy {evaluation.metrics['accuracy']:.3f}")
                        checkpoints.save(step, training.model, training.optimizer, batches.position)
            checkpoints.wait()


if __name__ == "__main__":
    with pf.errors_as_sentences():
        main(*sys.argv[1:])
