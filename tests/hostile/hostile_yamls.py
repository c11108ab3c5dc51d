"""YAML that means harm: bombs of aliases and merges, depth, length, odd tags and numbers, our keys with wrong values.

A third is read as a config, a third as an import, a third as an override.
"""

import itertools
import random
from collections.abc import Callable
from pathlib import Path

from portable_fsdp.config.describe import option_names
from portable_fsdp.convert.read import read_config

_FOREIGN_KEYS = (
    *("compute_environment", "distributed_type", "fsdp_config", "fsdp_offload_params", "learning_rate"),
    *("mixed_precision", "num_processes", "per_device_train_batch_size", "fsdp", "bf16", "report_to"),
)
_ODD_SCALARS = (
    *("0x_", "0x" + "f" * 5000, ":".join(["59"] * 3000), "1" * 5000, "1e999", ".nan", "-.inf", "~", "null", "yes"),
    *("!!python/object/apply:os.system [touch harm]", "!!bool x", "!!int ''", "!!binary " + "A" * 99, "!!timestamp x"),
    *(
        "2001-01-01",
        "!!float x",
        "'",
        '"\\e[31m\\u202e"',
        "\t",
        "\x00",
        "\x1b[2J",
        "\ufeff",
        "\ufdfd" * 300,
        "?",
        "- -",
    ),
    *("*undefined", "%YAML 9.9", "{[a]: 1}", "{{a: 1}: 2}", "<<", "<<: 1", "[*a, *a]", "|\n  x", "\ud7ff"),
    *("'" + "x" * 3000 + "'", "!!null 1"),
)


def case(seed: int, folder: Path) -> Callable[[], object]:
    draw = random.Random(seed)
    text = _document(draw)
    path = folder / "hostile.yaml"
    path.write_bytes(draw.choice((b"", b"", b"", b"\xef\xbb\xbf", b"\xff\xfe")) + text.encode(errors="surrogatepass"))
    ours = folder / "ours.yaml"
    ours.write_text("model: {pretrained: folder}\ntrain: {steps: 1}\n")
    match seed % 3:
        case 0:
            return lambda: read_config(path)
        case 1:
            return lambda: read_config(ours, (), [path])
        case _:
            option = draw.choice((*option_names(), "optim", "x", "a" * 5000, ".", "optim.lr.x", "\x1b[31m.x"))
            return lambda: read_config(ours, [f"{option}={text}"])


def _document(draw: random.Random) -> str:
    match draw.randrange(12):
        case 0 | 1 | 2 | 3:
            return "".join(_section(draw) for _ in range(draw.randint(1, 4)))
        case 4:
            return _bomb(draw)
        case 5:
            return draw.choice(("[", "{a: ", "- ", "? ", "[[], ")) * draw.choice((10, 60, 900, 3000, 50_000))
        case 6:
            return "".join("  " * depth + "a:\n" for depth in range(draw.choice((20, 60, 400))))
        case 7:
            return f"{_key(draw)}: " + draw.choice(("x", "x ", "\\", "'", "1", "#", " ")) * draw.choice(
                (9, 200_000, 10_000_000)
            )
        case 8:
            return "".join(
                f"{draw.choice('abc')}{number}: {_scalar(draw)}\n" for number in range(draw.choice((5, 300, 30_000)))
            )
        case 9:
            return "optim:\n" + "".join(f"  key{number}: 1\n" for number in range(draw.choice((3, 3000))))
        case 10:
            names = [f"a{number}" for number in range(draw.choice((3, 40, 400)))]
            chain = "".join(f"{name}: &{name} [*{before}]\n" for before, name in itertools.pairwise(names))
            return f"a0: &a0 {_scalar(draw)}\n{chain}"
        case _:
            return "".join(draw.choice("{}[],:&*!|>'\"%@`-?#~ \n\tab1.<") for _ in range(draw.randint(1, 200)))


def _bomb(draw: random.Random) -> str:
    """Each anchor holds the one before several times over: as a list, a mapping, or merged."""
    width, names = draw.choice((2, 9)), "abcdefghijklmnopqrstuvwxyz"[: draw.choice((3, 9, 26))]
    kind = draw.choice(("list", "mapping", "merge", "recursive"))
    lines = [f"a: &a {'{x: 1}' if kind == 'merge' else '[x]'}"]
    for before, name in itertools.pairwise(names):
        aliases = [f"*{name if kind == 'recursive' else before}"] * width
        match kind:
            case "mapping":
                body = "{" + ", ".join(f"k{number}: {alias}" for number, alias in enumerate(aliases)) + "}"
            case "merge":
                body = "{<<: [" + ", ".join(aliases) + "]}"
            case _:
                body = "[" + ", ".join(aliases) + "]"
        lines.append(f"{name}: &{name} {body}")
    return "\n".join(lines) + "\n"


def _section(draw: random.Random) -> str:
    section, _, key = draw.choice(option_names()).partition(".")
    if draw.random() < 0.3:
        return f"{_key(draw)}: {_value(draw)}\n"
    return f"{section}: {_value(draw)}\n" if draw.random() < 0.3 else f"{section}:\n  {key}: {_value(draw)}\n"


def _key(draw: random.Random) -> str:
    return draw.choice((*_FOREIGN_KEYS, "a", "train", '"\\e[2J"', "? [x]", "y" * 300, "1", "~", "<<", "*a", "[a, b]"))


def _value(draw: random.Random, depth: int = 0) -> str:
    if depth < 3 and draw.random() < 0.4:
        items = [_value(draw, depth + 1) for _ in range(draw.randint(0, 3))]
        if draw.random() < 0.5:
            return "[" + ", ".join(items) + "]"
        return "{" + ", ".join(f"{_key(draw)}: {item}" for item in items) + "}"
    return _scalar(draw)


def _scalar(draw: random.Random) -> str:
    plain = ("1", "-1", "0.5", "true", "auto", "text", "FULL_SHARD", "3e-4", "[]", "{}", "''", str(2**63), "1" * 99)
    return draw.choice(plain if draw.random() < 0.6 else _ODD_SCALARS)
