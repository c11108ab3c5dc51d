"""How far `auto` is from the best point of a grid, by expected time: the configs of configs/ on their GPU targets.

    python benchmarks/gallery_ratio.py [NAME ...]        # writes results/gallery_ratio.md; no GPU needed

The grid: compile.enabled, the modes of recomputation that `auto` tries, micro batches up to 16 rows (or the config's
own, if it is larger), and sharding.strategy. Only points that leave 5 % of the memory free count. Left out is what
can't be better: more recomputation at equal rows; what needs more memory than a point without room; a mode whose
products and attention leave too little time for the rest; eager layers, but at the best point. Each target takes
minutes, with experts or Gemma's layers more; plans are cached.
"""

import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the checkout, where the package isn't installed
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "launch"))
from gallery import GALLERY, Planner, Stated, override_words, planner_of, stated_plans

from portable_fsdp.layout import devices_per_row, micro_batches
from portable_fsdp.plan.planner import COMPILE, FREE, MODES, ROWS, fastest_that_fits
from portable_fsdp.plan.result import Settings, Tried
from portable_fsdp.plan.target import parse_target
from portable_fsdp.runtime.child import Worker
from portable_fsdp.runtime.errors import PortableFSDPError

RESULT = Path(__file__).parent / "results/gallery_ratio.md"
STRATEGY = "sharding.strategy"
MOST_ROWS = 16
SHARE = 0.9  # of the least elementwise time so far: other points may copy less
HEAD = """\
`python benchmarks/gallery_ratio.py`: the expected time of a step with what `auto` takes, over that of the best point of
a grid (compile.enabled, recomputation, train.micro_batch, sharding.strategy). Goal: 1.03.

| config | target | `auto` takes | s | best point | s | ratio | plans |
|---|---|---|---|---|---|---|---|
"""


def grid(planner: Planner, chosen: Tried) -> Iterator[Tried]:
    """Plan the points, compiled where that isn't refused; smaller micro batches and less recomputation first."""
    config, devices = planner.config, planner.target.devices
    stated = 1 if config.train.micro_batch == "auto" else config.train.micro_batch
    *_, share = all_sizes = micro_batches(config.train.global_batch, devices // devices_per_row(config))
    sizes = [size for size in all_sizes if size <= max(MOST_ROWS, stated)]
    strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] if devices > 1 else [config.sharding.strategy]
    best_s, elementwise_s = seconds(chosen), SHARE * part(chosen, "elementwise")
    products_s = {mode: products(chosen) for mode, keys in enumerate(MODES) if keys.items() <= chosen.settings.items()}
    too_large = list[tuple[str, int, int, bool]]()  # strategy, mode, rows, and whether it is without sums of gradients
    done = set[tuple[str, int]]()

    def is_left_out(strategy: str, mode: int, size: int) -> bool:
        return (
            (strategy, size) in done
            or products_s.get(mode, 0) + elementwise_s >= best_s
            or any(
                large in (strategy, "FULL_SHARD") and mode <= m and rows <= size and (size < share or without_sums)
                for large, m, rows, without_sums in too_large
            )
        )

    for strategy, size, mode in itertools.product(strategies, sizes, range(len(MODES))):
        if is_left_out(strategy, mode, size):
            continue
        settings = {STRATEGY: strategy, **MODES[mode], ROWS: str(size)}
        tried = attempt(planner, settings | {COMPILE: "true"})
        if tried.plan is None:  # with dropout, compiled layers keep all or nothing
            tried = attempt(planner, settings | {COMPILE: "false"})
        if tried.plan is None:
            done |= {(strategy, rows) for rows in sizes}
            continue
        yield tried
        elementwise_s = min(elementwise_s, SHARE * part(tried, "elementwise"))
        products_s[mode] = min(products(tried), products_s.get(mode, float("inf")))
        if has_room(tried):
            best_s = min(best_s, seconds(tried))
            done.add((strategy, size))
            continue
        memory, room = tried.plan.memory, (1 - FREE) * (tried.plan.memory.limit_bytes or 0)
        without_sums = size == share or memory.peak_bytes - memory.parts["gradients"] > room
        too_large.append((strategy, mode, size, without_sums))
        if sum(memory.parts[name] for name in ("weights", "gradients", "optimizer")) > room:
            done |= {(strategy, rows) for rows in sizes}


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


def part(tried: Tried, name: str) -> float:
    return tried.plan.expected.parts.get(name, 0.0) if tried.plan and tried.plan.expected else 0.0


def products(tried: Tried) -> float:
    return part(tried, "products") + part(tried, "attention")


def row(config: Path, stated: Stated) -> str:
    """Plan one target; return its row of the table."""
    with Worker() as worker:
        planner = planner_of(config, stated, worker)
        chosen = fastest_that_fits(
            planner.config, planner.target, planner.plan_of, planner.worker, lambda line: print(f"  {line}")
        )
        if chosen.plan is None or chosen.plan.expected is None:
            return f"| {config.stem} | {stated.on} | {short(chosen.settings)} | none expected | - | - | - | - |"
        points = list(grid(planner, chosen))
        best = min((*filter(has_room, points), chosen), key=seconds)
        points.append(attempt(planner, best.settings | {COMPILE: "false"}))
    best = min((point for point in (best, points[-1]) if has_room(point)), key=seconds)
    plan = chosen.plan
    assert plan is not None
    given = {STRATEGY: f"{plan.settings[STRATEGY]}", ROWS: f"{plan.settings[ROWS]}"}
    cells = [config.stem, stated.on, short(given | chosen.settings), f"{seconds(chosen):.4g}"]
    cells += [short(best.settings) if best is not chosen else "the same", f"{seconds(best):.4g}"]
    return f"| {' | '.join(cells)} | {seconds(chosen) / seconds(best):.3f} | {len(points)} |"


def short(settings: Settings) -> str:
    words = (
        " ".join(override_words(settings)).replace(f"{COMPILE}=true", "compiled").replace(f"{COMPILE}=false", "eager")
    )
    return re.sub(r"memory.gradient_checkpointing=|sharding.strategy=|memory.save_ops=|train\.", "", words)


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
