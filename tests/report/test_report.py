"""`python -m portable_fsdp.report`: the page, the Markdown, and files that are damaged or missing."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from documented import ROOT, commands
from invented_run import write_run

from portable_fsdp.report.__main__ import main
from portable_fsdp.report.read import read_run

GOLDENS = Path(__file__).parent / "goldens"


class Page(HTMLParser):
    """The text that a reader sees, and the addresses that the page would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.addresses, self._hidden = "", list[str](), False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._hidden = tag in ("script", "style")
        self.addresses += [value or "" for name, value in attrs if name in ("src", "href")]

    def handle_endtag(self, tag: str) -> None:
        self._hidden = False

    def handle_data(self, data: str) -> None:
        self.text += "" if self._hidden else data


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


@pytest.mark.slow  # as each that draws a page: bokeh takes a second
def test_a_page_of_two_runs_that_opens_offline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Values of a run are text, and never markup."""
    attack = "</script><img src=x onerror=alert(1)>"
    first, second = write_run(tmp_path / "first"), tmp_path / "second"
    write_run(second, lr=0.002, model={"pretrained": attack})
    assert main([str(first), str(second)]) == 0
    assert capsys.readouterr().out == f"wrote {first}/report.html\n"
    content = (first / "report.html").read_text(encoding="utf-8")
    page = Page(content)
    assert page.addresses == []
    words = ("finished at step 40", "40 of 40", "xla, 2 x cpu", "optim.lr", "0.002", "step-00000040", "2.9.0")
    for word in (*words, "on host2", "Where the time went", "Newest checkpoints", attack):
        assert word in page.text, word
    assert "<img" not in content
    assert len(content) < 5_000_000


def test_markdown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], assert_golden: Callable[[Path, str], None]
) -> None:
    assert main([str(write_run(tmp_path / "a")), str(write_run(tmp_path / "b|c", lr=0.002)), "--markdown"]) == 0
    assert_golden(GOLDENS / "two_runs.md", capsys.readouterr().out)


@pytest.mark.slow  # one of them sends to a tracker, for which accelerate imports torch
def test_the_commands_of_the_page_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("demo", "other"):
        write_run(Path("runs", name))
    shown = [*commands((ROOT / "docs/watching.md").read_text(encoding="utf-8"), "watching.md")]
    assert len(shown) == 4
    for command in shown:
        assert command.words[:3] == ["python", "-m", "portable_fsdp.report"]
        assert main(command.words[3:]) == 0, command.where
    assert Path("runs/demo/report.html").is_file()
    assert Path("both.html").is_file()
    assert Path("runs/demo/trackers/tensorboard.json").is_file()


def test_damaged_lines_are_counted_and_the_newest_samples_kept(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 41, "loss"\n[1, 2]\n{"loss": 1}\n{"step": 42, "lo')  # torn
    with (run / "events.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\n")
    assert sum(read_run(run).skipped.values()) == 4
    assert main([str(run), "--markdown"]) == 0
    out = capsys.readouterr().out
    assert "4 damaged lines were left out: metrics.jsonl, events.jsonl" in out
    assert "40 of 40" in out
    (run / "samples.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(1000)), encoding="utf-8")
    assert [sample["step"] for sample in read_run(run).samples] == [*range(950, 1000)]


DAMAGE = {
    "metrics.jsonl": ['{"step": null, "seconds": 1}', '{"step": 41}', '{"step": 41, "seconds": null}'],
    "events.jsonl": [
        *('{"event": "start"}', '{"event": "start", "time": "2026-01-01T00:00:00+00:00"}'),
        '{"event": "evaluation", "step": 1, "loss": null, "time": "2026-01-01T00:00:00+00:00"}',
        '{"event": "straggler", "step": 1, "process": 1, "ratio": null, "time": "2026-01-01T00:00:00+00:00"}',
    ],
}


def test_lines_and_configs_that_no_run_wrote_are_left_out(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(run), "--markdown"]) == 0
    before = capsys.readouterr().out
    for name, lines in DAMAGE.items():
        whole = (run / name).read_text(encoding="utf-8")
        for line in lines:
            (run / name).write_text(f"{whole}{line}\n", encoding="utf-8")
            assert main([str(run), "--markdown"]) == 0
            assert capsys.readouterr().out == before + f"\n1 damaged line was left out: {name}\n", line
        (run / name).write_text(whole, encoding="utf-8")
    for text in (": [", "a: &a [*a]", "!!python/object/apply:os.getpid []", "\0"):
        (run / "config.yaml").write_text(text, encoding="utf-8")
        assert read_run(run).config == {}, text
        assert main([str(run), "--markdown"]) == 0
        assert capsys.readouterr().out.startswith("## run\n"), text


def test_runs_of_one_name_are_told_apart_and_names_are_printable(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = write_run(tmp_path / "first", run={"name": "quick\x1b[2Jstart"})
    assert main([str(first), "--markdown"]) == 0
    heading = capsys.readouterr().out.splitlines()[0]
    assert heading.isprintable()
    assert heading.endswith("start (first)")


@pytest.mark.slow
def test_a_run_under_way_without_a_step(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = (run / "events.jsonl").read_text(encoding="utf-8").splitlines()
    (run / "events.jsonl").write_text(events[0] + "\n", encoding="utf-8")
    (run / "metrics.jsonl").unlink()
    (run / "config.yaml").write_text(": [", encoding="utf-8")
    assert main([str(run), "--markdown"]) == 0
    assert "not finished: running, killed" in capsys.readouterr().out
    assert main([str(run)]) == 0


def test_bad_input(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for words, message in {
        f"{run}/none": f"{run}/none: this is no run's folder: it has no events.jsonl.",
        f"{run} --out={run}/none/page.html": f"--out: {run}/none/page.html can't be written: ",
        f"{run} --out={run}/page": f"--out: expected a file that ends in .html, found {run}/page.",
        f"{run} --markdown --out=a.html": "--out, --markdown and --track exclude each other",
        f"{run} --follow": "--follow needs --track",
        f"{run} --makdown": "unknown flag --makdown; nearest: --markdown",
        "": "the following arguments are required: RUN",
    }.items():
        assert main(words.split()) == 2, words
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_long_curve_keeps_its_ends_and_extremes() -> None:
    from portable_fsdp.report.page import thinned  # here: bokeh takes a second

    x = np.arange(100_000, dtype=np.float64)
    y = np.sin(x / 5000)
    y[[31_415, 70_000]] = 50, -50
    kept_x, kept_y = thinned(x, y)
    assert len(kept_x) <= 1500
    assert np.all(np.diff(kept_x) > 0)
    assert (kept_y.max(), kept_y.min()) == (50, -50)
    np.testing.assert_array_equal(y[kept_x.astype(int)], kept_y)


CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

GREETINGS = r"\[bokeh [\d.]+\] (setting log level|document idle)"
"""bokeh's own, without its warnings and errors; Chromium doesn't print a line's level."""


def opened(page: Path) -> tuple[list[str], int]:
    """The lines of the browser's console, and the number of colours below the tables, where the curves are."""
    from matplotlib.image import imread  # here: the other tests need none

    picture = page.with_suffix(".png")
    command = [str(CHROMIUM), "--headless=new", "--disable-gpu"]
    command += ["--window-size=1200,2400", "--virtual-time-budget=8000"]
    command += ["--no-sandbox"] * (os.geteuid() == 0)  # root has none
    command += ["--enable-logging=stderr", "--hide-scrollbars", f"--user-data-dir={page.parent / 'profile'}"]
    command += [f"--screenshot={picture}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    pixels = (imread(picture)[1200:, :, :3] * 255).astype(np.uint32) @ np.array([1, 256, 65536], np.uint32)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line and not re.search(GREETINGS, line)]
    return console, len(np.unique(pixels))


@pytest.mark.proof
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium")
def test_a_report_is_drawn_without_a_word_on_the_console(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / name, lr=lr)) for name, lr in (("first", 0.001), ("second", 0.002))]
    page = tmp_path / "page.html"
    assert main([*runs, f"--out={page}"]) == 0
    console, colours = opened(page)
    assert console == []
    assert colours > 50
