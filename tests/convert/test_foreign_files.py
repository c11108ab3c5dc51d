"""Each key of the example files has its answer, each misspelt twin its nearest key, and each translation reads back.

Golden files hold what becomes of whole files and of single keys: samples/ in golden/, small inputs in transcripts/. A
block of a transcript is an input, `---`, and what follows from it: settings of ours with the key that set them, keys
that set nothing, or the message. Its first line may be `$ overrides`, besides those that every run needs, or
`$$ overrides` alone. In merge.txt a block has several files, the config and its imports, and variables, each below a
line `+ NAME`. `--rewrite-goldens` writes what follows anew: review the diff.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from foreign_files import FILES, HERE, LAUNCHED, REST, plain, problems, read, rendered

from portable_fsdp import explain
from portable_fsdp.config.load import Loaded
from portable_fsdp.convert.read import load_config, read_config
from portable_fsdp.convert.table import find_anywhere, key_table
from portable_fsdp.explain import origin, translation
from portable_fsdp.runtime.errors import ConfigError

pytestmark = pytest.mark.slow

TRANSCRIPTS = sorted((HERE / "transcripts").iterdir())
Compare = Callable[[Path, str], None]
OURS = "model: {pretrained: folder}\ntrain: {steps: 100}\n"


def keys_of(path: Path) -> list[str]:
    pairs = re.findall(r'^\s*"?([A-Za-z_0-9]+)"?:|[{,]\s*"(\w+)":', path.read_text(), re.MULTILINE)
    return [key for key in map("".join, pairs) if not key.startswith("_")]


def answered(loaded: Loaded) -> set[str]:
    """The keys of the import that have an answer."""
    [imported] = loaded.imports
    return {entry.key for entry in (*imported.settings.values(), *imported.launcher, *imported.not_needed)}


def test_every_key_of_a_sample_is_answered_by_name_and_a_translation_reads_back(
    tmp_path: Path, assert_golden: Compare
) -> None:
    for path in FILES:
        loaded = read(path)
        assert_golden(HERE / "golden" / f"{path.name}.txt", plain("\n".join(rendered(loaded)) + "\n", path.parent))
        lost = {key for key in keys_of(path) if key not in key_table().nested} - answered(loaded)
        assert [key for key in lost if find_anywhere("", key) is not None] == [], path
        ours = tmp_path / "ours.yaml"
        ours.write_text(translation(loaded))
        assert load_config(ours) == loaded.config
        for setting in loaded.imports[0].settings.values():
            if loaded.origins.get(setting.option) == setting.where:
                assert f"# {setting.where}: {setting.key}: " in ours.read_text()


def misspelt(key: str) -> str:
    """One letter left out; one too many where the key is short, and another one would be as near."""
    cut = len(key) // 2
    return key[:cut] + key[cut + 1 :] if len(key) > 5 else f"{key}{key[-1]}"


def test_every_misspelt_key_is_named_with_its_nearest(tmp_path: Path) -> None:
    for path, key in [(file, key) for file in FILES for key in dict.fromkeys(keys_of(file))]:
        twin = tmp_path / path.name
        twin.write_text(re.sub(rf"\b{key}\b(?=\"?:)", misspelt(key), path.read_text(), count=1))
        message = problems(twin, *REST)
        row = find_anywhere("", key)
        names = {row.name, *row.aliases} if row else {key}
        names |= {key.removeprefix("fsdp_"), f"fsdp_{key}"}
        [near] = re.findall(rf"{misspelt(key)}: unknown key of .*\n  nearest: (\w+)\.", message)
        assert near in names, (path, key)


def test_explain_writes_and_names_the_origin_of_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = HERE / "samples/accelerate_0_20_fsdp.yaml"
    ours = tmp_path / "ours.yaml"
    arguments = [f"--import={theirs}", f"--write={ours}", "--backend=native", *REST]
    assert explain.main(arguments) == 0
    text = capsys.readouterr().out
    assert re.search(rf"memory\.cpu_offload = true\s+# {re.escape(str(theirs))}:\d+: fsdp_offload_params: true\n", text)
    assert f"{theirs}: the launcher decides:" in text
    assert load_config(ours).memory.cpu_offload
    assert explain.main(arguments) == 2
    assert "the file exists; name a new one" in capsys.readouterr().err


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path, tmp_path: Path, assert_golden: Compare) -> None:
    blocks = path.read_text().removeprefix("===\n").split("\n===\n")
    inputs = [block.partition("\n---\n")[0].removesuffix("\n---") for block in blocks]
    results = [f"===\n{text}\n---\n{outcome(path.stem, text, tmp_path)}\n" for text in inputs]
    assert_golden(path, "".join(results))


def outcome(topic: str, text: str, folder: Path) -> str:
    overrides, lines = list(REST), text
    if text.startswith("$"):
        line, _, lines = text.partition("\n")
        sign, *more = line.split()
        options = {override.partition("=")[0] for override in more}
        rest = [override for override in REST if override.partition("=")[0] not in options]
        overrides = [*rest, *more] if sign == "$" else more
    if topic == "environment":
        lines = f"+ ours.yaml\n{OURS}+ environment of accelerate launch\n{lines}"
    paths, environ = list[Path](), dict[str, str]()
    for part in f"\n{lines}".split("\n+ ")[1:] or [f"theirs.yaml\n{lines}"]:
        name, _, content = part.partition("\n")
        if name.startswith("environment"):
            environ = LAUNCHED if "accelerate" in name else {}
            environ = environ | dict(line.split("=", 1) for line in content.splitlines() if "=" in line)
        else:
            paths.append(folder / name)
            paths[-1].write_text(content)
    try:
        loaded = read_config(paths[0], overrides, paths[1:], environ)
    except ConfigError as error:
        return plain(str(error), folder)
    return plain("\n".join(rendered(loaded, lines if topic == "environment" else None)), folder)


def test_every_variable_is_answered_and_origins_are_those_that_count(tmp_path: Path) -> None:
    ours, theirs = tmp_path / "ours.yaml", tmp_path / "theirs.yaml"
    ours.write_text(OURS)
    loaded = read_config(ours, environ={**LAUNCHED, "FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"})
    assert answered(loaded) == {*LAUNCHED, "FSDP_STATE_DICT_TYPE"}
    assert origin(loaded, "sharding.strategy") == "accelerate launch: FSDP_SHARDING_STRATEGY: FULL_SHARD"
    assert loaded.config.sharding.wrap == "TRANSFORMER_BASED_WRAP"  # FSDP_MIN_NUM_PARAMS is the launcher's default
    loaded = read_config(ours, ["sharding.strategy=NO_SHARD"], environ=LAUNCHED)
    line = "#   FSDP_SHARDING_STRATEGY: FULL_SHARD: override 'sharding.strategy=NO_SHARD' takes precedence"
    assert line in translation(loaded)
    ours.write_text(f"{OURS}precision: {{compute: bfloat16}}\n")
    theirs.write_text("distributed_type: FSDP\nmixed_precision: bf16\n")
    origins = read_config(ours, imports=[theirs]).origins
    assert (origins["precision.compute"], origins["precision.reduce"]) == (f"{ours}:3", f"{theirs}:2")
    assert "optim.lr" not in origins


def test_what_a_file_leaves_out_is_the_default_of_trainer(tmp_path: Path) -> None:
    """Both files describe one run to Trainer: one has every key, as it writes them itself."""
    trainer = pytest.importorskip("transformers").TrainingArguments(use_cpu=True)
    whole, short = tmp_path / "whole.json", tmp_path / "short.json"
    whole.write_text(json.dumps(trainer.to_dict() | {"num_processes": 2}))
    short.write_text('{"disable_tqdm": true, "num_processes": 2}')
    configs = [read_config(path, ["model.pretrained=folder"]) for path in (whole, short)]
    assert configs[0].config == configs[1].config
    assert origin(configs[1], "optim.lr") == "default of Trainer: learning_rate: 5e-5"
    optim, train = configs[1].config.optim, configs[1].config.train
    betas, norm = (trainer.adam_beta1, trainer.adam_beta2), trainer.max_grad_norm
    assert (optim.lr, optim.betas, optim.weight_decay) == (trainer.learning_rate, betas, trainer.weight_decay)
    assert (optim.schedule, optim.eps) == (trainer.lr_scheduler_type, trainer.adam_epsilon)
    assert (train.epochs, train.max_grad_norm) == (trainer.num_train_epochs, norm)
    assert (configs[1].config.run.seed, train.global_batch) == (trainer.seed, 2 * trainer.per_device_train_batch_size)


def test_our_own_keys_and_accelerates_come_before_a_default_of_trainer(tmp_path: Path) -> None:
    ours, theirs, launcher = tmp_path / "ours.yaml", tmp_path / "trainer.json", tmp_path / "accelerate.yaml"
    ours.write_text("model: {pretrained: folder}\ntrain: {steps: 9, global_batch: 4}\noptim: {schedule: cosine}")
    theirs.write_text('{"adam_beta1": 0.8}')
    launcher.write_text("distributed_type: FSDP\ngradient_clipping: 0.5\nnum_processes: 4\n")
    config = read_config(ours, ["optim.lr=1"], [theirs, launcher]).config
    optim, train = config.optim, config.train
    assert (optim.lr, optim.betas, optim.min_lr_ratio, optim.weight_decay) == (1, (0.8, 0.999), 0.1, 0)
    assert (train.max_grad_norm, train.epochs, train.global_batch, train.micro_batch) == (0.5, None, 4, 8)
