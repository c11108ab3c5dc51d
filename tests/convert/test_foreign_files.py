"""Each key of the example files has its answer, each misspelt twin its nearest key, and each translation reads back."""

import re
from pathlib import Path

import pytest
from foreign_files import FILES, REST, named, problems, read

from portable_fsdp import explain
from portable_fsdp.convert.read import load_config
from portable_fsdp.convert.table import find_anywhere, key_table
from portable_fsdp.explain import translation


def keys_of(path: Path) -> list[str]:
    pairs = re.findall(r'^\s*"?([A-Za-z_0-9]+)"?:|[{,]\s*"(\w+)":', path.read_text(), re.MULTILINE)
    return [key for key in map("".join, pairs) if not key.startswith("_")]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_key_is_answered_by_name_and_a_translation_reads_back(path: Path, tmp_path: Path) -> None:
    loaded = read(path)
    [imported] = loaded.imports
    answered = {entry.key for entry in (*imported.settings.values(), *imported.launcher, *imported.not_needed)}
    lost = [key for key in keys_of(path) if key not in answered and key not in key_table().nested]
    assert [key for key in lost if find_anywhere("", key) is not None] == []
    ours = tmp_path / "ours.yaml"
    ours.write_text(translation(loaded))
    assert load_config(ours) == loaded.config
    for setting in imported.settings.values():
        if loaded.origins.get(setting.option) == setting.where:
            assert f"# {setting.where}: {setting.key}: " in ours.read_text()


def misspelt(key: str) -> str:
    """One letter left out; one too many where the key is short, and another one would be as near."""
    cut = len(key) // 2
    return key[:cut] + key[cut + 1 :] if len(key) > 5 else f"{key}{key[-1]}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_misspelt_key_is_named_with_its_nearest(path: Path, tmp_path: Path) -> None:
    twin = tmp_path / path.name
    for key in dict.fromkeys(keys_of(path)):
        twin.write_text(re.sub(rf"\b{key}\b(?=\"?:)", misspelt(key), path.read_text(), count=1))
        message = problems(twin, *REST)
        row = find_anywhere("", key)
        names = {row.name, *row.aliases} if row else {key}
        names |= {key.removeprefix("fsdp_"), f"fsdp_{key}"}
        [near] = re.findall(rf"{misspelt(key)}: unknown key of .*\n  nearest: (\w+)\.", message)
        assert near in names, key


def test_explain_writes_and_names_the_origin_of_a_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    theirs = named("accelerate_0_20_fsdp.yaml")
    ours = tmp_path / "ours.yaml"
    arguments = [f"--import={theirs}", f"--write={ours}", "--backend=native", *REST]
    assert explain.main(arguments) == 0
    text = capsys.readouterr().out
    assert re.search(rf"memory\.cpu_offload = true\s+# {re.escape(str(theirs))}:\d+: fsdp_offload_params: true\n", text)
    assert f"{theirs}: the launcher decides:" in text
    assert load_config(ours).memory.cpu_offload
    assert explain.main(arguments) == 2
    assert "expected a new file, found one" in capsys.readouterr().err
