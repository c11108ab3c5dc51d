"""Command `python -m portable_fsdp.report RUN [RUN2 ...]`: writes report.html into the first run's folder, or --out."""

import argparse
import gc
import sys
from pathlib import Path

from portable_fsdp.observe.trackers import PACKAGES, require_installed
from portable_fsdp.report.read import markdown, read_run
from portable_fsdp.report.track import track
from portable_fsdp.runtime.command import CommandParser, run_command, to_stdout
from portable_fsdp.runtime.errors import EXIT_FINISHED, UsageError
from portable_fsdp.runtime.files import write_text_atomically
from portable_fsdp.runtime.host import pip_install

DESCRIPTION = """Report on one run or compare several: losses, speed, memory, restarts, where the time went.

Works during a run too. The page opens offline."""


def _parser() -> CommandParser:
    parser = CommandParser("report", DESCRIPTION)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder (run.dir)")
    parser.add_argument(
        "--out", type=Path, metavar="FILE", help="the HTML file (default: report.html in the first RUN)"
    )
    parser.add_argument("--track", metavar="NAME", help=f"send metrics to a tracker instead: {', '.join(PACKAGES)}")
    parser.switch("--follow", "with --track: keep sending until standard input closes, as a run does")
    parser.switch("--markdown", "print the figures as Markdown instead, for a terminal or a pull request")
    return parser


def main(argv: list[str]) -> int:
    """Run with the arguments after the program's name; return the exit code."""
    return run_command(_parser(), argv, _report)


def _report(options: argparse.Namespace) -> int:
    chosen = [flag for flag in ("track", "markdown", "out") if getattr(options, flag) not in (None, False)]
    if len(chosen) > 1 or (options.follow and not options.track):
        raise UsageError("--out, --markdown and --track exclude each other, and --follow needs --track.")
    if options.out is not None and options.out.suffix not in (".html", ".htm"):
        raise UsageError(f"--out: expected a file that ends in .html, found {options.out}.")
    if options.track is not None:
        if options.track not in PACKAGES:
            raise UsageError(f"--track: expected one of {', '.join(PACKAGES)}, found {options.track}.")
        require_installed([options.track], "--track", "send to another tracker: metrics.jsonl holds the same rows")
        for run in options.runs:
            to_stdout(f"{run}: sent up to step {track(run, options.track, follow=options.follow)}")
        return EXIT_FINISHED
    runs = [read_run(folder) for folder in options.runs]
    gc.freeze()  # else every garbage collection while drawing traverses all rows
    if options.markdown:
        to_stdout(markdown(runs).rstrip())
        return EXIT_FINISHED
    try:
        from portable_fsdp.report.page import page
    except ModuleNotFoundError as error:
        raise UsageError(f"report: {error.name} is not installed: {pip_install('report')}, or add --markdown") from None
    target: Path = options.out or options.runs[0] / "report.html"
    try:
        write_text_atomically(target, page(runs).encode(errors="replace").decode())  # a lone surrogate has no bytes
    except OSError as error:
        raise UsageError(f"--out: {target} can't be written: {error.strerror}") from None
    to_stdout(f"wrote {target}")
    return EXIT_FINISHED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
