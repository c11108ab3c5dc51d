"""How far `auto` is from the best point of a grid, by expected time: the configs of configs/ on their GPU targets.

    python benchmarks/gallery_ratio.py [NAME ...]        # writes results/gallery_ratio.md; no GPU needed

The grid: compile.enabled, the modes of recomputation that `auto` tries, micro batches up to 16 rows (or the config's
own, if it is larger), and sharding.strategy. Only points that leave 5 % of the memory free count. Left out is what
can't be better: more recomputation at equal rows, what needs more memory than a point that has no room, and eager
layers but at the best point. A minute or two for each target; plans are cached.
"""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, where the package isn't installed
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "launch"))
from gallery import GALLERY, Planner, Stated, override_words, planner_of, stated_plans

from portable_fsdp.layout import devices_per_row, micro_batches
from portable_fsdp.plan.result import Settings, Tried
from portable_fsdp.plan.search import COMPILE, FREE, MODES, ROWS, fastest_that_fits
from portable_fsdp.plan.target import parse_target
from portable_fsdp.runtime.child import Worker
from portable_fsdp.runtime.errors import PortableFSDPError

RESULT = Path(__file__).parent / "results/gallery_ratio.md"
STRATEGY = "sharding.strategy"
MOST_ROWS = 16
HEAD = """\
`python benchmarks/gallery_ratio.py`: the expected time of a step with what `auto` takes, over that of the best point of
a grid (compile.enabled, recomputation, train.micro_batch, sharding.strategy). Goal: 1.03.

| config | target | `auto` takes | s | best point | s | ratio | plans |
|---|---|---|---|---|---|---|---|
"""


def grid(planner: Planner) -> Iterator[Tried]:
    """Plan the compiled points; smaller micro batches and less recomputation first."""
    config, devices = planner.config, planner.target.devices
    stated = 1 if config.train.micro_batch == "auto" else config.train.micro_batch
    *_, share = all_sizes = micro_batches(config.train.global_batch, devices // devices_per_row(config))
    sizes = [size for size in all_sizes if size <= max(MOST_ROWS, stated)]

    def least(size: int) -> list[int]:
        """Rows that need no more memory; a single micro batch accumulates no gradients, and may need less."""
        return [n for n in sizes if n <= size and (n == size or size < share)]

    too_much = list[tuple[str, int, int]]()  # strategy, mode, rows
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] if devices > 1 else [config.sharding.strategy, "NO_SHARD"]
    for strategy in dict.fromkeys(strategies):
        for size in sizes:
            for number, mode in enumerate(MODES):
                if any(s in (strategy, "FULL_SHARD") and number <= m and n in least(size) for s, m, n in too_much):
                    continue
                tried = attempt(planner, {STRATEGY: strategy, **mode, ROWS: str(size), COMPILE: "true"})
                yield tried
                if has_room(tried):
                    break
                too_much.append((strategy, number, size))


def attempt(planner: Planner, settings: Settings) -> Tried:
    try:
        tried = Tried(settings=settings, plan=planner.plan_of(settings))
    except PortableFSDPError as error:
        tried = Tried(settings=settings, refusal=str(error))
    print(f"  {tried.line}, {seconds(tried):.4g} s", flush=True)
    return tried


def has_room(tried: Tried) -> bool:
    return tried.plan is not None and tried.plan.memory.peak_bytes <= (1 - FREE) * (tried.plan.memory.limit_bytes or 0)


def seconds(tried: Tried) -> float:
    return tried.plan.expected.seconds if tried.plan and tried.plan.expected else float("inf")


def row(config: Path, stated: Stated) -> str:
    """Plan one target; return its row of the table."""
    with Worker() as worker:
        planner = planner_of(config, stated, worker)
        chosen = fastest_that_fits(
            planner.config, planner.target, planner.plan_of, planner.count_programs, lambda line: print(f"  {line}")
        )
        points = list(grid(planner))
        best = min((*filter(has_room, points), chosen), key=seconds)
        points.append(attempt(planner, best.settings | {COMPILE: "false"}))
    best = min((point for point in (best, points[-1]) if has_room(point)), key=seconds)
    plan = chosen.plan
    assert plan is not None
    own = f"{plan.settings[STRATEGY]}, {plan.settings[ROWS]} rows"
    cells = [config.stem, stated.on, f"{short(chosen.settings)} ({own})", f"{seconds(chosen):.4g}"]
    cells += [short(best.settings) if best is not chosen else "the same", f"{seconds(best):.4g}"]
    return f"| {' | '.join(cells)} | {seconds(chosen) / seconds(best):.3f} | {len(points)} |"


def short(settings: Settings) -> str:
    words = " ".join(override_words(settings))
    return re.sub(r"\w+\.(?=\w+=)|gradient_checkpointing=|sharding\.strategy=", "", words)


def main(names: list[str]) -> None:
    lines = RESULT.read_text(encoding="utf-8").splitlines() if RESULT.exists() else []
    rows = {tuple(line.split(" | ")[:2]): line for line in lines if re.match(r"\| \w+ \| \w+\S*:\d+ ", line)}
    by_name = {config.stem: config for config in GALLERY}
    for name in names or by_name:
        for stated in stated_plans(by_name[name]).values():
            if parse_target(stated.on).hardware.kind == "cuda":
                print(f"{name} {stated.on}", flush=True)
                line = row(by_name[name], stated)
                rows[tuple(line.split(" | ")[:2])] = line
                print(line, flush=True)
                RESULT.write_text(HEAD + "".join(f"{rows[key]}\n" for key in sorted(rows)), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
