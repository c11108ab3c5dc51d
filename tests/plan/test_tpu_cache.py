"""The cache of compiled plans: equal content, damage, and its size."""

import os
from pathlib import Path

import pytest

from portable_fsdp.plan.tpu_compiler import key_of
from portable_fsdp.plan.tpu_compiler import load_entry as load
from portable_fsdp.plan.tpu_compiler import save_entry as save
from portable_fsdp.runtime.files import cache_folder

TEXTS = {"program": "ENTRY é" * 1000, "buffers": "allocation 0: size 4"}


def test_an_entry_comes_back_as_it_was_by_akey_of_its_parts(tmp_path: Path) -> None:
    assert key_of(b"ab", b"c") == key_of(b"ab", b"c")
    assert len({key_of(b"ab", b"c"), key_of(b"a", b"bc"), key_of(b"abc"), key_of(b"abc", b"")}) == 4
    assert load(tmp_path, "a") is None
    save(tmp_path / "new", "a", TEXTS)
    assert load(tmp_path / "new", "a") == TEXTS
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.gz"]
    (tmp_path / "file").write_text("")  # no folder, so nothing is kept there
    save(tmp_path / "file", "a", TEXTS)
    assert load(tmp_path / "file", "a") is None


@pytest.mark.parametrize("damage", ["cut", "flipped", "empty"])
def test_a_damaged_entry_counts_as_none(tmp_path: Path, damage: str) -> None:
    save(tmp_path, "a", TEXTS)
    path = tmp_path / "a.gz"
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[60] ^= 0xFF  # in the first text
    path.write_bytes({"cut": whole[: len(whole) // 2], "flipped": bytes(flipped), "empty": b""}[damage])
    assert load(tmp_path, "a") is None


def test_the_longest_unused_go_first(tmp_path: Path) -> None:
    for number, key in enumerate("abc"):
        save(tmp_path, key, {"program": os.urandom(1000).hex()})
        os.utime(tmp_path / f"{key}.gz", (number, number))
    assert load(tmp_path, "a") is not None  # used now
    save(tmp_path, "d", {"program": os.urandom(1000).hex()}, largest_bytes=3000)
    assert sorted(path.stem for path in tmp_path.iterdir()) == ["a", "d"]


def test_it_lies_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert cache_folder({"XDG_CACHE_HOME": "/var/cache"}) == Path("/var/cache/portable_fsdp")
    expected = Path("/home/someone/.cache/portable_fsdp")
    assert cache_folder({}) == cache_folder({"XDG_CACHE_HOME": ""}) == cache_folder({"XDG_CACHE_HOME": "x"}) == expected
