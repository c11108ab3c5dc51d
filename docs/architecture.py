"""Draws docs/architecture.svg, the way from a config to a checkpoint: `python docs/architecture.py`."""

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 330
BOX = (140, 64)

# Name, second line, column and row.
BOXES = [
    ("config", "one YAML", 0, 0),
    ("preflight", "all problems, one error", 1, 0),
    ("engine", "native | xla | xla_fsdp1", 2, 0),
    ("layout", "mesh axes, regions", 3, 0),
    ("model", "on the meta device", 1, 1),
    ("shard", "units; fill own slices", 2, 1),
    ("step", "loss, backward, update", 3, 1),
    ("data", "rows in one order", 4, 1),
    ("observe", "metrics, one step late", 2, 2),
    ("checkpoint", "pieces with their place", 3, 2),
]
ARROWS = [
    ("config", "preflight"),
    ("preflight", "engine"),
    ("layout", "engine"),
    ("preflight", "model"),
    ("model", "shard"),
    ("engine", "shard"),
    ("shard", "step"),
    ("data", "step"),
    ("step", "observe"),
    ("step", "checkpoint"),
]


def center(column: int, row: int) -> tuple[int, int]:
    return 90 + 170 * column, 50 + 110 * row


def edge(start: tuple[int, int], end: tuple[int, int]) -> tuple[float, float]:
    """The point of the box around `end` where a line from `start` enters."""
    dx, dy = start[0] - end[0], start[1] - end[1]
    scale = min(BOX[0] / 2 / abs(dx) if dx else 9, BOX[1] / 2 / abs(dy) if dy else 9)
    return end[0] + dx * scale, end[1] + dy * scale


def svg() -> str:
    """The picture: boxes and arrows, in a font of the system, readable on light and dark pages."""
    places = {name: center(column, row) for name, _, column, row in BOXES}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'text-anchor="middle">',
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#57606a"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="8" fill="#f6f8fa"/>',
    ]
    for start, end in ARROWS:
        ends = (*edge(places[end], places[start]), *edge(places[start], places[end]))
        line = " ".join(f"{number:.0f}" for number in ends)
        parts.append(f'<path d="M{line}" stroke="#57606a" stroke-width="1.5" marker-end="url(#tip)"/>')
    for name, text, column, row in BOXES:
        x, y = center(column, row)
        parts.append(
            f'<rect x="{x - BOX[0] // 2}" y="{y - BOX[1] // 2}" width="{BOX[0]}" height="{BOX[1]}" rx="6" fill="#fff" '
            f'stroke="#0969da"/><text x="{x}" y="{y - 4}" font-size="15" font-weight="bold">{name}</text>'
            f'<text x="{x}" y="{y + 16}" font-size="11" fill="#57606a">{escape(text)}</text>'
        )
    return "\n".join([*parts, "</svg>\n"])


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(svg(), encoding="utf-8")
