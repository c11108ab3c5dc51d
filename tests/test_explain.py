"""`python -m portable_fsdp.explain`: quick, without torch, and every option once for each engine."""

import json
import re
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from portable_fsdp import explain, launch
from portable_fsdp.backends.open import DEVICES, ENGINES, engines_on
from portable_fsdp.config.describe import option_names
from portable_fsdp.config.yaml_text import parse
from portable_fsdp.runtime.command import NOTHING_STARTED

ROOT = Path(__file__).parents[1]
CONFIG = f"--config={ROOT / 'configs/llama_1b.yaml'}"


def explained(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert explain.main(list(arguments)) == 0
    out, err = capsys.readouterr()
    assert not err
    return out


def explained_json(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    return json.loads(explained(capsys, *arguments, "--json"))


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert explain.main(list(arguments)) == 2
    out, err = capsys.readouterr()
    assert not out
    return err


def test_each_option_of_a_config_has_a_verdict_of_each_engine(capsys: pytest.CaptureFixture[str]) -> None:
    answer = explained_json(capsys, CONFIG, "memory.cpu_offload=true", "--num_devices=4", "--num_hosts=2")
    assert tuple(answer["options"]) == option_names()
    assert all(list(option["engines"]) == list(ENGINES) for option in answer["options"].values())
    assert answer["places"][0] == {"engine": "native", "device": "cuda", "devices": 8, "hosts": 2}
    offload = answer["options"]["memory.cpu_offload"]
    assert offload["value"] is True
    verdicts = [answer["verdict"] for answer in offload["engines"].values()]
    assert verdicts == ["honoured", "refused", "refused"]
    assert "Set memory.cpu_offload=false." in offload["engines"]["xla"]["text"]
    assert answer["options"]["sharding.forward_prefetch"]["engines"]["xla"]["verdict"] == "delegated"


def test_the_text_of_a_config(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, CONFIG, "memory.cpu_offload=true", "--device=cpu", "--all")
    assert text.startswith("native on cpu, xla on cpu, xla_fsdp1 on cpu; rules about the number of devices")
    entry = text.partition("memory.cpu_offload = true  # override 'memory.cpu_offload=true'\n")[2]
    assert entry.partition("\ncompile.enabled")[0].splitlines() == [
        "  native             honoured   CPUOffloadPolicy: the optimizer steps on the host",
        "  xla, xla_fsdp1     refused    on XLA: torch_xla keeps parameters and optimizer state in device memory. Set",
        "                                memory.cpu_offload=false, or --backend=native.",
    ]
    assert "train.log_every = 10  # default\n  all engines        honoured   " in text
    assert re.search(r"\noptim\.lr = 0\.0003  # .*configs/llama_1b\.yaml:\d+\n", text)
    assert all(f"\n{option} = " in text for option in option_names())
    assert max(map(len, text.splitlines())) <= 120


def test_what_is_refused_and_set_comes_first_and_the_rest_on_request(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, CONFIG, "memory.cpu_offload=true", "--device=cpu")
    _, summary, empty, first, *lines = text.splitlines()
    shown = re.findall(r"^([a-z_0-9.]+) = ", text, re.MULTILINE)
    assert (empty, first) == ("", "memory.cpu_offload = true  # override 'memory.cpu_offload=true'")
    others = len(option_names()) - len(shown)
    counts = rf"{len(option_names())} options: {len(shown)} set, 1 refused, \d+ delegated"
    assert re.fullmatch(rf"{counts}; --all prints the {others} other defaults too", summary)
    assert "optim.lr" in shown
    assert "train.log_every" not in shown
    assert not any(line.endswith("# default") for line in lines)


def test_rows_as_they_are_trained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "What is 2 plus 2?", "completion": " It is 4."}\n')
    config = tmp_path / "run.yaml"
    data = f"source: jsonl, path: {tmp_path}/mine.jsonl, format: prompt_completion, tokenizer: bytes"
    config.write_text(f"data: {{{data}}}\nmodel: {{pretrained: none}}\ntrain: {{steps: 1}}\n")
    assert explain.main([f"--config={config}", "--rows=2", "data.seq_len=32", "data.cache_dir=null"]) == 0
    out, err = capsys.readouterr()
    keys, _, rows = out.partition("\n\n")
    assert keys.replace(str(tmp_path), "").replace("\n  #", "  #").splitlines() == [
        "data.source = jsonl  # /run.yaml:1",
        "data.path = /mine.jsonl  # /run.yaml:1",
        "data.format = prompt_completion  # /run.yaml:1",
        "data.tokenizer = bytes  # /run.yaml:1",
        "data.seq_len = 32  # override 'data.seq_len=32'",
        "data.packing = auto  # default",
    ]
    assert rows.splitlines()[1:] == [
        "row 1 (index 0 of 1): 32 tokens, 10 count, 1 document(s), 5 padding",
        "  What is 2 plus 2?",
        "+  It is 4.<NUL>",
    ]
    assert f"data: training: 1 document of {tmp_path}/mine.jsonl in 1 rows of 32 tokens; 31% of tokens count" in err
    assert explain.main([f"--config={config}", "--rows=1", "data.packing=none"]) == 0
    assert (
        "% of all tokens are padding: data.seq_len=27 would do, and data.packing=documents" in capsys.readouterr().err
    )


def test_flags_narrow_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys, CONFIG, "--device=tpu", "--backend=xla", "--num_devices=4")
    assert text.startswith("xla on tpu; 4 device(s) of 1 host(s): shard 4\n")
    assert "\n  all engines " not in text
    for device in DEVICES:
        places = explained_json(capsys, CONFIG, f"--device={device}")["places"]
        assert tuple(place["engine"] for place in places) == engines_on(device)


def test_without_a_config_every_option_and_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    text = explained(capsys)
    assert [line for line in text.splitlines() if not line.startswith(" ")] == list(option_names())
    assert "on one device: sharded replicas need four devices or more" in text
    assert "(checked when the model is built)" in text
    table = explained_json(capsys, "--backend=xla")["options"]
    assert tuple(table) == option_names()
    assert {tuple(line["engines"]) for lines in table.values() for line in lines} == {("xla",)}
    assert {line["kind"] for line in table["sharding.wrap_classes"]} == {"honoured", "refused"}


QUICKSTART = [f"--config={ROOT / 'configs/quickstart.yaml'}", "--device=cpu", "--num_devices=2"]
WRONG = [
    *("optim.lrr=1", "optim.warmup_steps=151", "optim.schedule=wsd optim.decay_ratio=0.99", "train.global_batch=2"),
    *("memory.every=2", "compile.scan_layers=true memory.every=2 train.global_batch=2", "--num_devices=x"),
]


def test_strict_refuses_what_launch_refuses_in_its_words(capsys: pytest.CaptureFixture[str]) -> None:
    for wrong in WRONG:
        assert launch.main([*QUICKSTART, *wrong.split()]) == 2
        message = capsys.readouterr().err
        assert f"{refused(capsys, *QUICKSTART, '--strict', *wrong.split())}{NOTHING_STARTED}\n" == message


def test_strict_judges_the_usual_engine_of_the_device(capsys: pytest.CaptureFixture[str]) -> None:
    offload, scan = "memory.cpu_offload=true", "compile.scan_layers=true"
    for device, taken, wrong in (("cuda", offload, scan), ("tpu", scan, offload), ("cpu", offload, scan)):
        explained(capsys, CONFIG, "--strict", f"--device={device}", taken)
        assert wrong in refused(capsys, CONFIG, "--strict", f"--device={device}", wrong)
    words = [CONFIG, "--device=cpu", "--backend=xla", scan]
    assert explained(capsys, *words, "--strict") == explained(capsys, *words)
    # Not by a number of devices that it doesn't know.
    strict = [CONFIG, "--strict", "--device=cuda", "train.global_batch=7", "train.micro_batch=7"]
    assert explained(capsys, *strict, "--num_devices=1")
    assert explained(capsys, *strict)
    message = refused(capsys, *strict, "--num_devices=8", "--num_hosts=2")
    assert "expected at most 1, the rows of each of 16 devices (train.global_batch=7), found 7" in message


def test_a_key_is_explained_by_its_documentation_and_a_section_by_its_keys(capsys: pytest.CaptureFixture[str]) -> None:
    assert explained(capsys, "optim.lr").splitlines() == [
        "optim.lr",
        "  peak learning rate (a number > 0; default 0.0003)",
        "  all engines        honoured",
    ]
    section = explained(capsys, "checkpoint").splitlines()
    keys = [name for name in option_names() if name.startswith("checkpoint.")]
    assert [line for line in section if not line.startswith(" ")] == keys
    rate = "  lr: peak learning rate of the group; null: optim.lr (a number > 0 or null; default null)"
    assert rate in explained(capsys, "optim.groups").splitlines()
    assert list(explained_json(capsys, "run.dir", "optim.lr")["options"]) == ["run.dir", "optim.lr"]
    of_config = explained(capsys, CONFIG, "--device=cpu", "train.steps=7", "train.steps").splitlines()
    assert of_config[2:4] == [
        "train.steps = 7  # override 'train.steps=7'",
        "  optimizer updates in the whole run (an integer >= 1 or null; default null)",
    ]


def test_the_schema_takes_our_configs_and_finds_what_is_misspelt(capsys: pytest.CaptureFixture[str]) -> None:
    schema = json.loads(explained(capsys, "--schema"))
    validator = Draft202012Validator(schema)
    Draft202012Validator.check_schema(schema)
    files = sorted((ROOT / "configs").glob("*.yaml"))
    assert files
    for path in files:
        assert [error.message for error in validator.iter_errors(parse(path.read_text())[1])] == [], path
    wrong = {"model": {"pretrained": "folder"}, "train": {"steps": "many"}, "optim": {"learning_rate": 1}}
    assert sorted(error.json_path for error in validator.iter_errors(wrong)) == ["$.optim", "$.train.steps"]


def test_it_is_quick_and_imports_no_torch() -> None:
    program = (
        "import sys\nfrom portable_fsdp.explain import main\n"
        f"assert main([{CONFIG!r}]) == main([]) == main([{CONFIG!r}, '--strict', '--device=cuda']) == 0\n"
        "assert not {'torch', 'transformers', 'numpy', 'jax'} & set(sys.modules)"
    )
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60, stdout=subprocess.DEVNULL)
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before < 2  # seconds of the processor; 0.5 usually
    # A reader that goes away is no error.
    line = f"{sys.executable} -m portable_fsdp.explain --schema | head -0; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (141, "")
