"""Text in columns."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], right: Sequence[int] = (), indent: str = "") -> str:
    """Columns as wide as their widest cell; those in `right` are aligned to the right."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    aligned = (
        [
            cell.rjust(width) if i in right else cell.ljust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    )
    return "\n".join(indent + "  ".join(cells).rstrip() for cells in aligned)
