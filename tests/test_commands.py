"""`portable-fsdp` and `python -m portable_fsdp`: the commands, and the wheel that installs them."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

from portable_fsdp import __version__, explain, sample
from portable_fsdp.__main__ import COMMANDS, main
from portable_fsdp.plan import __main__ as plan

ROOT = Path(__file__).parents[1]


def run(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env={**os.environ, **variables})


def files_below(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def test_each_command_has_one_line_and_a_module() -> None:
    done = run("-m", "portable_fsdp")
    assert (done.returncode, done.stderr) == (0, "")
    assert [line.split()[0] for line in done.stdout.splitlines()[2:]] == list(COMMANDS)
    for name in COMMANDS.keys() - {"examples"}:
        assert importlib.util.find_spec(f"portable_fsdp.{name}")


@pytest.mark.slow
def test_a_command_is_its_module(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Same output, errors and exit code; flags anywhere; a misspelt command or flag names the nearest."""
    for module, *words in (
        (sample.main, "sample", "/none"),
        (explain.main, "explain", "--device=cpu", "optim.lr"),
        (plan.main, "plan", "--onn=h100:8"),
    ):
        done = run("-m", "portable_fsdp", *words)
        assert (done.returncode, done.stdout, done.stderr) == (module(words[1:]), *capsys.readouterr())
    assert "unknown flag --onn; nearest: --on\n" in done.stderr
    monkeypatch.setattr(sys, "argv", ["portable-fsdp", "explan"])
    assert main() == 2
    message = capsys.readouterr().err
    assert message.startswith("unknown command explan; nearest: explain\nusage: portable-fsdp COMMAND")


@pytest.mark.slow
def test_a_command_without_its_packages_says_what_to_install() -> None:
    for command in COMMANDS.keys() - {"doctor", "examples", "sample"}:  # which need none so far
        done = run("-S", "-m", f"portable_fsdp.{command}", "x.yaml", PYTHONPATH=str(ROOT))
        assert (done.returncode, "Traceback" in done.stderr) == (2, False), done.stderr
        assert re.match(r"The package \w+ is not installed: pip install '\.'\n", done.stderr)


def test_flags_from_a_file_and_overrides_with_dashes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "cpu.flags").write_text("# a host without GPUs\n--device=cpu\n--json\n")
    words = [f"--flagfile={tmp_path / 'cpu.flags'}", f"--config={ROOT}/configs/quickstart.yaml"]
    for overrides in (["optim.lr=0.5", "optim.weight_decay=0.25"], ["--optim.lr=0.5", "--optim.weight-decay", "0.25"]):
        assert explain.main([*overrides, *words]) == 0
        options = json.loads(capsys.readouterr().out)["options"]
        assert [options[f"optim.{name}"]["value"] for name in ("lr", "weight_decay")] == [0.5, 0.25], overrides
    assert explain.main(["--flagfile=/none"]) == 2
    assert "/none" in capsys.readouterr().err


def test_the_examples_of_a_checkout_are_its_configs_with_their_modules(tmp_path: Path) -> None:
    (ROOT / "configs/__pycache__").mkdir(exist_ok=True)
    done = run("-m", "portable_fsdp", "examples", str(tmp_path / "written"))
    assert (done.returncode, done.stderr) == (0, "")
    written = files_below(tmp_path / "written/configs")
    assert written == [name for name in files_below(ROOT / "configs") if "__pycache__" not in name]
    assert {Path(name).suffix for name in written} == {".yaml", ".py"}


@pytest.mark.proof  # pip fetches setuptools
def test_the_wheel_installs_one_command_and_the_examples(tmp_path: Path) -> None:
    project, prefix, written = tmp_path / "project", tmp_path / "prefix", tmp_path / "written"
    project.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    for name in ("portable_fsdp", "configs", "launch"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = ["-m", "pip", "--quiet", "--disable-pip-version-check"]
    built = run(*pip, "wheel", "--no-deps", f"--wheel-dir={tmp_path}", str(project))
    assert built.returncode == 0, built.stderr
    [wheel] = tmp_path.glob("*.whl")
    with ZipFile(wheel) as archive:
        metadata = archive.read(f"portable_fsdp-{__version__}.dist-info/METADATA").decode()
    assert "Project-URL: Documentation, " in metadata
    assert "Classifier: Typing :: Typed" in metadata

    installed = run(*pip, "install", "--no-deps", "--ignore-installed", f"--prefix={prefix}", str(wheel))
    assert installed.returncode == 0, installed.stderr
    [site] = prefix.glob("lib/*/site-packages")
    package = ROOT / "portable_fsdp"
    sources = [name for name in files_below(package) if "__pycache__" not in name]
    assert [name for name in files_below(site / "portable_fsdp") if "__pycache__" not in name] == sources

    command = str(prefix / "bin/portable-fsdp")
    done = run(command, "examples", str(written), PYTHONPATH=str(site))
    assert done.returncode == 0, done.stderr
    for folder in ("configs", "launch"):
        assert files_below(written / folder) == [n for n in files_below(ROOT / folder) if "__pycache__" not in n]
    scripts = [path for path in (ROOT / "launch").iterdir() if os.access(path, os.X_OK)]
    assert all(os.access(written / "launch" / path.name, os.X_OK) for path in scripts)
    done = run(command, "examples", str(written), PYTHONPATH=str(site))
    assert (done.returncode, done.stderr.count("Nothing was started.")) == (2, 0)  # only launch starts a run
    assert "already has files; name a new folder" in done.stderr
    done = run(command, "explain", f"--config={written}/configs/llama_1b.yaml", PYTHONPATH=str(site))
    assert (done.returncode, done.stderr) == (0, "")
