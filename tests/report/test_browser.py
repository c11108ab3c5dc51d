"""A page of `report` in a real browser: nothing on its console, and something drawn."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from invented_run import write_run
from matplotlib.image import imread

from portable_fsdp.report.__main__ import main

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")

GREETINGS = r"\[bokeh [\d.]+\] (setting log level|document idle)"
"""bokeh's own, without its warnings and errors; Chromium doesn't print a line's level."""

pytestmark = [
    pytest.mark.proof,
    pytest.mark.skipif(CHROMIUM is None, reason="no chromium on PATH: apt-get install chromium"),
]


def opened(page: Path) -> tuple[list[str], int]:
    """The lines of the browser's console, and the number of colours below the tables, where the curves are."""
    picture = page.with_suffix(".png")
    command = [
        str(CHROMIUM),
        "--headless=new",
        "--disable-gpu",
        "--window-size=1200,2400",
        "--virtual-time-budget=8000",
    ]
    command += ["--no-sandbox"] * (os.geteuid() == 0)  # root has none
    command += ["--enable-logging=stderr", "--hide-scrollbars", f"--user-data-dir={page.parent / 'profile'}"]
    command += [f"--screenshot={picture}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    pixels = (imread(picture)[1200:, :, :3] * 255).astype(np.uint32) @ np.array([1, 256, 65536], np.uint32)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line and not re.search(GREETINGS, line)]
    return console, len(np.unique(pixels))


def test_a_report_is_drawn_without_a_word_on_the_console(tmp_path: Path) -> None:
    runs = [str(write_run(tmp_path / name, lr=lr)) for name, lr in (("first", 0.001), ("second", 0.002))]
    page = tmp_path / "page.html"
    assert main([*runs, f"--out={page}"]) == 0
    console, colours = opened(page)
    assert console == []
    assert colours > 50
