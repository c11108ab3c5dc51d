"""Any module, dataset and loss (model.factory, data.factory, train.task), against a plain PyTorch loop in one process.

Of ours the loop has the initial weights and the order of the rows. Models of transformers compute their own loss.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import task_rows
import torch
from cases import assemble, assert_equal_states
from jobs import device_count, numbers, open_group, pieces
from plain_dropout import PlainDropout
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig
from transformers.models.auto import modeling_auto
from workers import GetWorkers, Group, JobFailed, Workers, marked

from portable_fsdp.backends.contract import Backend
from portable_fsdp.config.load import make_config
from portable_fsdp.convert.read import load_config
from portable_fsdp.data.build import build_data
from portable_fsdp.models.architecture import mapping_of
from portable_fsdp.models.build import build_model
from portable_fsdp.models.tasks import find_task
from portable_fsdp.optim.optimizer import learning_rate
from portable_fsdp.train.build import build_evaluator, build_training, open_batches, open_checkpoints, shard
from portable_fsdp.train.step import train_step

ROOT = Path(__file__).parents[2]
STEPS = 8
SIZES = "hidden_size: 48, num_hidden_layers: 2, num_attention_heads: 4, intermediate_size: 96, vocab_size: 64"
TOKENS = "pad_token_id: 1, cls_token_id: 2, sep_token_id: 2, bos_token_id: 2, eos_token_id: 2"


@dataclass(frozen=True)
class Example:
    """A config, and the mean loss of a batch as a plain loop computes it."""

    config: str
    loss: Callable[[nn.Module, dict[str, Tensor]], Tensor]
    settings: tuple[str, ...] = ()


def of_classifier(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]), batch["labels"])


def of_some_rows(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    weights = (batch["labels"] % 3).float()
    losses = F.cross_entropy(model(batch["images"]), batch["labels"], reduction="none")
    return (weights * losses).sum() / weights.sum()


def of_pairs(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Direct preference optimization, from the models' own logits."""
    sums: dict[str, Tensor] = {}
    for name in ("policy", "reference"):
        for kind in ("chosen", "rejected"):
            ids = batch[kind]
            logits = model.get_submodule(name)(input_ids=ids).logits[:, :-1].log_softmax(dim=-1)
            sums[f"{name} {kind}"] = logits.gather(2, ids[:, 1:, None]).sum(dim=(1, 2))
    margin = sums["policy chosen"] - sums["reference chosen"] - sums["policy rejected"] + sums["reference rejected"]
    return -F.logsigmoid(0.1 * margin).mean()


def of_transformers(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def of_rows_alone(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Each row without its padding."""
    sums, count = torch.zeros(()), 0
    for ids, labels in zip(batch["input_ids"], batch["labels"], strict=True):
        length = int(ids[0]) - 40
        logits = model(input_ids=ids[None, :length]).logits[0]
        sums, count = sums + F.cross_entropy(logits, labels[:length], reduction="sum"), count + length
    return sums / count


def of_texts(kind: str, more: str, task: str, rows: str) -> Example:
    architecture = f"model.architecture={{model_type: {kind}, {SIZES}, {more}}}"
    settings = (architecture, f"train.task={task}", f"data.factory=task_rows:{rows}")
    return Example("examples/seq2seq.yaml", of_transformers, settings)


SIZES_OF_ROWS = ("data.buckets={input_ids: [9, 12], labels: [9, 12]}", "data.eval_split=30%")
BUCKETS = of_texts("bert", "num_labels: 3, max_position_embeddings: 12", "token_classification", "Lengths")
WITHOUT_EVALUATION = ("data.eval_split=null", "train.eval_every=null")
ONE_MICRO_BATCH = ("train.global_batch=4", "train.micro_batch=1", *WITHOUT_EVALUATION)
IN_BUCKETS = Example(BUCKETS.config, of_rows_alone, (*BUCKETS.settings, *SIZES_OF_ROWS))

EXAMPLES = {
    "classifier": Example("examples/image_classifier.yaml", of_classifier),
    "own_count": Example(
        "examples/image_classifier.yaml",
        of_some_rows,
        ("train.task=task_rows:some_rows", "train.micro_batch=2", *WITHOUT_EVALUATION),
    ),
    "dpo": Example("examples/dpo.yaml", of_pairs),
    "vit": Example("examples/vit.yaml", of_transformers),
    "t5": Example("examples/seq2seq.yaml", of_transformers),
    "bert": of_texts("bert", "num_labels: 3, max_position_embeddings: 32", "sequence_classification", "rows"),
    "scores": of_texts("bert", "num_labels: 1, max_position_embeddings: 32", "sequence_classification", "scores"),
    "tags": of_texts("bert", "num_labels: 3, max_position_embeddings: 32", "sequence_classification", "tags"),
    "roberta": of_texts(
        "roberta", "num_labels: 3, max_position_embeddings: 32, pad_token_id: 1", "token_classification", "words"
    ),
    "modernbert": of_texts(
        "modernbert", f"local_attention: 4, global_attn_every_n_layers: 2, {TOKENS}", "masked_lm", "masked"
    ),
}


def plain_run(example: Example) -> tuple[list[float], float | None, float | None]:
    """The losses; and over the rows held out the last loss, and the share that a classifier of images gets right."""
    config = load_config(ROOT / example.config, [*example.settings, "optim.weight_decay=0.0"])
    corpus = build_data(config.data, config.model)
    task = find_task(config.train.task)
    built = build_model(config.model, seed=config.run.seed, seq_len=12, vocabulary=0, task=task)
    model = built.model
    if isinstance(config.model.architecture, dict):
        architecture = dict(config.model.architecture)
        settings = AutoConfig.for_model(architecture.pop("model_type"), **architecture)
        for key in settings.to_dict():
            if "dropout" in key and getattr(settings, key) is not None:
                setattr(settings, key, config.model.dropout or 0.0)
        kind: Any = getattr(modeling_auto, mapping_of(task.name))[type(settings)]
        model = kind._from_config(settings, attn_implementation="eager")
    else:
        buffers = dict(model.named_buffers())
        model.to_empty(device="cpu")
        for name, buffer in model.named_buffers():
            buffer.copy_(buffers[name])
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(built.fill(name, tuple(slice(0, size) for size in parameter.shape)))
    drawn = PlainDropout(model, config.run.seed) if config.model.dropout else None
    trained = [parameter for parameter in model.train().parameters() if parameter.requires_grad]
    optim = config.optim
    optimizer = torch.optim.AdamW(trained, lr=optim.lr, betas=optim.betas, eps=optim.eps, weight_decay=0.0)
    losses: list[float] = []
    for step in range(1, STEPS + 1):
        positions = np.arange((step - 1) * config.train.global_batch, step * config.train.global_batch)
        batch = corpus.rows.rows(corpus.rows.order(config.run.seed, positions))
        with drawn.of_step(int(positions[0]), len(positions)) if drawn else nullcontext():
            loss = example.loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, config.train.max_grad_norm or torch.inf)
        optimizer.param_groups[0]["lr"] = learning_rate(optim, step, config.train.steps or 0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    if corpus.eval_rows is None or example.loss not in (of_classifier, of_transformers):
        return losses, None, None
    batch = corpus.eval_rows.rows(np.arange(len(corpus.eval_rows)))
    model.eval()
    with torch.no_grad():
        loss = example.loss(model, batch).item()
        is_right = model(batch["images"]).argmax(dim=1) == batch["labels"] if "images" in batch else None
    return losses, loss, None if example.loss is of_transformers or is_right is None else is_right.float().mean().item()


NATIVE, XLA = Group("native", 2), Group("xla", 4)
IN_SUITE = {NATIVE: [name for name in EXAMPLES if name not in ("bert", "roberta")], XLA: ["t5"]}


def train_task(path: str, overrides: Sequence[str], last: int, folder: str) -> dict[str, Any]:
    """The run of a config file until step `last`, from its newest checkpoint in `folder` if there is one."""
    config = load_config(path, [*overrides, f"run.dir={folder}"])
    with open_group(config) as engine:
        corpus = build_data(config.data, config.model)
        training = build_training(config, engine, corpus.tokenizer, rows=corpus.rows)
        before, losses = engine.compilations, list[float]()
        with open_checkpoints(config, engine, training, corpus) as checkpoints:
            point = checkpoints.find("auto")
            resumed = checkpoints.load(point, training.model, training.optimizer) if point else None
            loaded = pieces(engine.state(training.model, training.optimizer))
            with open_batches(config, engine, training, corpus, resumed) as batches:
                for step in range(resumed.step + 1 if resumed else 1, last + 1):
                    rows, lr = next(batches), learning_rate(config.optim, step, config.train.steps or 0)
                    placed = [engine.place(batch) for batch in rows.micro_batches]
                    losses.append(engine.fetch(training.step(placed, lr, [rows.count])).result()["loss"].item())
                position = batches.position
            evaluator = build_evaluator(config, engine, training, corpus)
            evaluation = None if evaluator is None else evaluator()
            compilations = engine.compilations - before
            checkpoints.save(last, training.model, training.optimizer, position)
            checkpoints.wait()
        return {
            "losses": losses,
            "evaluation": evaluation,
            "compilations": (compilations, engine.expected_compilations),
            "loaded": loaded,
            "saved": pieces(engine.state(training.model, training.optimizer)),
        }


def trained(workers: Workers, example: Example, last: int, folder: Path) -> list[dict[str, Any]]:
    settings = [*example.settings, "optim.weight_decay=0.0"]
    path = str(ROOT / example.config)
    return workers.run(train_task, path=path, overrides=settings, last=last, folder=str(folder))


@pytest.fixture(autouse=True)
def same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """`load_config` puts the config's folder there."""
    monkeypatch.setattr(sys, "path", list(sys.path))


UNEVEN = ("train.global_batch=7", "train.micro_batch=2", *WITHOUT_EVALUATION)
LOSSES = [
    *(marked(group, name, (), in_suite=name in of_suite) for group, of_suite in IN_SUITE.items() for name in EXAMPLES),
    # Before the test that resumes such a run in the same processes: its programs are compiled by then.
    marked(XLA, "buckets", ONE_MICRO_BATCH, in_suite=False),
    marked(XLA, "buckets", (), in_suite=False),
    marked(NATIVE, "buckets", (), in_suite=True),
    *(
        marked(group, name, UNEVEN, in_suite=group == NATIVE and name in ("scores", "buckets"))
        for group in (NATIVE, Group("native", 3), XLA)
        for name in ("scores", "tags", "bert", "vit", "buckets")
    ),
    *(
        marked(group, name, ("model.dropout=0.1",), in_suite=False)
        for group in (NATIVE, XLA)
        for name in ("t5", "bert", "vit", "modernbert")
    ),
]


@pytest.mark.parametrize(("group", "name", "settings"), LOSSES)
def test_a_task_has_the_losses_of_a_plain_loop(
    workers: GetWorkers, group: Group, name: str, settings: tuple[str, ...], tmp_path: Path
) -> None:
    """Rows in buckets have those of rows without padding, and rows that fill up a batch change none. Labels are classes
    or numbers; in `buckets` a step's rows are sorted by size."""
    example = IN_BUCKETS if name == "buckets" else EXAMPLES[name]
    example = replace(example, settings=(*example.settings, *settings))
    answers = trained(workers(group), example, STEPS, tmp_path)
    expected, held_out, accuracy = plain_run(example)
    for answer in answers:
        assert answer["losses"] == pytest.approx(expected, rel=1e-5)
        actual, known = answer["compilations"]
        # Fewer: another case had the update, or no step had rows of a shape.
        assert actual <= known if settings == UNEVEN or name == "buckets" else actual == known
        if held_out is not None:
            assert answer["evaluation"].loss == pytest.approx(held_out, rel=2e-5)
        if accuracy is not None:
            assert answer["evaluation"].metrics["accuracy"] == pytest.approx(accuracy, abs=0.006)  # a row of 200
        elif answer["evaluation"] is not None:
            metric = "mean_absolute_error" if name == "scores" else "accuracy"
            assert 0 < answer["evaluation"].metrics[metric] <= 1


@pytest.mark.parametrize(
    ("name", "settings", "reason"),
    [
        ("own_count", (), "train.task=task_rows:some_rows counts its losses itself"),
        ("classifier", ("model.factory=task_rows:Normed",), "batch norm .* would see padding"),
    ],
)
def test_padding_that_would_change_a_loss_is_refused(
    workers: GetWorkers, name: str, settings: tuple[str, ...], reason: str, tmp_path: Path
) -> None:
    example = EXAMPLES[name]
    with pytest.raises(JobFailed, match=reason) as failure:
        trained(workers(NATIVE), replace(example, settings=(*example.settings, *settings, *UNEVEN)), 1, tmp_path)
    assert failure.value.kind == "ConfigError"
    assert "Set train.global_batch=4 or 8" in failure.value.message


@pytest.mark.xla
@pytest.mark.parametrize(
    ("example", "reader"),
    [
        pytest.param(EXAMPLES["dpo"], XLA, id="dpo", marks=pytest.mark.proof),
        pytest.param(IN_BUCKETS, Group("xla", 4), id="buckets"),
    ],
)
def test_a_task_resumes_on_another_engine_bit_for_bit(
    workers: GetWorkers, tmp_path: Path, example: Example, reader: Group
) -> None:
    before, after = (trained(workers(group), example, last, tmp_path) for group, last in ((NATIVE, 4), (reader, STEPS)))
    assert_equal_states(assemble([a["saved"] for a in before]), assemble([a["loaded"] for a in after]))
    assert [*before[0]["losses"], *after[0]["losses"]] == pytest.approx(plain_run(example)[0], rel=1e-5)


@pytest.mark.parametrize("group", [marked(Group("native", 1)), marked(NATIVE, in_suite=True), marked(XLA)])
def test_inputs_are_cast_unless_cast_inputs_is_false(workers: GetWorkers, group: Group, tmp_path: Path) -> None:
    def run(factory: str, *settings: str) -> None:
        settings = (f"model.factory=task_rows:{factory}", "precision.compute=bfloat16", *WITHOUT_EVALUATION, *settings)
        folder = tmp_path / factory / str(len(settings))
        trained(workers(group), replace(EXAMPLES["classifier"], settings=settings), 1, folder)

    run("sees_bfloat16")
    run("sees_float32", "precision.cast_inputs=false")
    with pytest.raises(JobFailed, match=r"images are torch\.bfloat16"):
        run("sees_float32")


def of_rounded(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """A plain loop with bfloat16 products and a float32 loss, as `precision.compute=bfloat16` has."""
    head = cast(nn.Linear, model.head)
    rounded = [tensor.bfloat16() for tensor in (batch["images"].flatten(1), head.weight, cast(Tensor, head.bias))]
    return F.cross_entropy(F.linear(*rounded).float(), batch["labels"])


@pytest.mark.parametrize(
    "group",
    [marked(Group("native", 1), in_suite=True), marked(NATIVE), marked(XLA), marked(Group("xla_fsdp1", 2))],
)
def test_a_task_gets_what_the_model_returns_in_the_dtype_of_output(
    workers: GetWorkers, group: Group, tmp_path: Path
) -> None:
    own = ("model.factory=task_rows:Answers", "train.task=task_rows:of_answers", "precision.compute=bfloat16")
    example = Example("examples/image_classifier.yaml", of_rounded, (*own, *WITHOUT_EVALUATION))
    expected = plain_run(example)[0]
    for output, error in (("float32", 1e-3), ("auto", 0.05)):
        settings = (*example.settings, f"precision.output={output}")
        losses = trained(workers(group), replace(example, settings=settings), STEPS, tmp_path / output)[0]["losses"]
        assert losses == pytest.approx(expected, rel=error)
        in_64ths = [loss * 24 * 64 for loss in losses]  # sums in bfloat16 of some rows have few digits
        assert (in_64ths == pytest.approx([*map(round, in_64ths)], abs=0.01)) == (output == "auto")


TURNS = 6


def plain_turns(first: list[dict[str, Tensor]]) -> tuple[list[list[float]], list[dict[str, Tensor]]]:
    """[loss, gradient norm] of each turn, and the last weights; where no row counts the critic misses its turn."""
    models = [task_rows.generator(), task_rows.critic()]
    for model, weights in zip(models, first, strict=True):
        model.load_state_dict({name: weights[name] for name in model.state_dict()})
    imitates, judges = models
    optimizers, turns = list[torch.optim.Optimizer](), list[list[float]]()
    for model in models:
        groups = [{"params": [p], "weight_decay": 0.1 if p.dim() > 1 else 0.0} for p in model.parameters()]
        optimizers.append(torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)))
    for step in range(1, TURNS + 1):
        batch = task_rows.pairs_of(step)
        fake = imitates(batch["noise"]).detach()
        for number in (1, 0):
            optimizers[number].zero_grad()
            if number == 1:
                total, count = task_rows.critics_losses(judges, {**batch, "fake": fake})
            else:
                total, count = task_rows.generators_losses(imitates, batch, judges)
            if count == 0:
                turns.append([0.0, 0.0])
            else:
                (total / count).backward()
                norm = nn.utils.clip_grad_norm_(models[number].parameters(), 0.5)
                turns.append([(total / count).item(), norm.item()])
                for group in optimizers[number].param_groups:
                    group["lr"] = 1e-2 * 0.9 ** (step - 1)
                optimizers[number].step()
    return turns, [dict(model.named_parameters()) for model in models]


FULL, WHOLE, KEPT = ({"sharding": {"strategy": name}} for name in ("FULL_SHARD", "NO_SHARD", "SHARD_GRAD_OP"))


def two_optimizers(settings: dict[str, Any], accumulation: int, steps: int) -> dict[str, Any]:
    """A generator and a critic by turns, each with its own optimizer and learning rates of torch's scheduler."""
    train = {"steps": 100, "global_batch": 12, "micro_batch": 12 // accumulation // device_count()}
    config = make_config(**{"optim": {"lr": 1e-2, "weight_decay": 0.1}, "train": train, **settings})
    with open_group(config) as engine:
        models = [shard(make, config, engine) for make in (task_rows.generator, task_rows.critic)]
        (imitates, _), (judges, _) = models
        tasks = [partial(task_rows.generators_losses, judge=judges), task_rows.critics_losses]
        make = partial(train_step, engine, accumulation=accumulation, max_grad_norm=0.5)
        turns = [make(*pair, task=task) for pair, task in zip(models, tasks, strict=True)]
        rates = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9) for _, optimizer in models]
        first = [pieces(engine.state(*pair)) for pair in models]
        out, compiled = list[dict[str, float]](), 0
        for step in range(1, steps + 1):
            batches = [engine.place(batch) for batch in _micro_batches(engine, step, accumulation)]
            with engine.evaluate():
                fakes = [{**batch, "fake": imitates(batch["noise"]) * 1} for batch in batches]
            for turn, given, rate in ((turns[1], fakes, rates[1]), (turns[0], batches, rates[0])):
                out.append(numbers(engine.fetch(turn(given, rate.get_last_lr()[0]))))
                rate.step()
            compiled = engine.compilations if step == 2 else compiled
        states = [pieces(engine.state(*pair)) for pair in models]
        return {"first": first, "metrics": out, "states": states, "late": engine.compilations - compiled}


def _micro_batches(engine: Backend, step: int, accumulation: int) -> list[dict[str, torch.Tensor]]:
    """This process's rows."""
    shard, batch = engine.data_shard, task_rows.pairs_of(step)
    own = {name: rows.chunk(shard.count)[shard.index].chunk(accumulation) for name, rows in batch.items()}
    return [{name: parts[number] for name, parts in own.items()} for number in range(accumulation)]


@pytest.mark.parametrize(
    ("group", "settings", "accumulation"),
    [
        marked(Group("native", 1), WHOLE, 2, in_suite=True),
        marked(NATIVE, FULL, 1, in_suite=True),
        marked(NATIVE, WHOLE, 3, in_suite=True),
        marked(XLA, FULL, 2, in_suite=True),
        marked(XLA, KEPT, 1, in_suite=False),
        marked(XLA, FULL, 1, in_suite=False),
        marked(Group("xla_fsdp1", 2), FULL, 2),
    ],
)
def test_two_models_train_by_turns_as_in_a_plain_loop(
    workers: GetWorkers, group: Group, settings: dict[str, Any], accumulation: int
) -> None:
    """No gradient that the other's loss left counts; a turn in which nothing counts changes nothing; the tensor that
    torch's scheduler gives is a learning rate, and compiles nothing."""
    answers = workers(group).run(two_optimizers, settings=settings, accumulation=accumulation, steps=TURNS)
    first, states = ([assemble([a[key][model] for a in answers]) for model in (0, 1)] for key in ("first", "states"))
    turns, weights = plain_turns(first)
    for answer in answers:
        actual = [[metrics["loss"], metrics["grad_norm"]] for metrics in answer["metrics"]]
        assert actual == [pytest.approx(turn, rel=1e-5) for turn in turns]
        assert answer["late"] == 0
    assert [metrics["is_empty"] for metrics in answers[0]["metrics"]].count(1.0) == 2
    for state, expected, count in zip(states, weights, (TURNS, TURNS - 2), strict=True):
        assert {float(value) for name, value in state.items() if name.startswith("step/")} == {count}
        for name, weight in expected.items():
            torch.testing.assert_close(state[name], weight.detach(), rtol=1e-4, atol=1e-6)
