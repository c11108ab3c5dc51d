"""Name patterns, such as `*norm*` or `model.layers.0`: each matches modules or parameters, and all inside them."""

import difflib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase

from portable_fsdp.runtime.errors import ConfigError


def matches(pattern: str, name: str) -> bool:
    """Whether `pattern` matches `name` or a module that holds it; `*` matches any text, dots too."""
    return any(fnmatchcase(candidate, pattern) for candidate in _with_ancestors(name))


def matching(key: str, pattern: str, names: Iterable[str]) -> list[str]:
    """The names that `pattern` matches, in order. Raises ConfigError about `key` where it matches none."""
    names = list(names)
    matched = [name for name in names if matches(pattern, name)]
    if not matched:
        known = sorted({candidate for name in names for candidate in _with_ancestors(name)})
        text = pattern.strip("*.").lower()
        near = [name for name in known if text in name.lower()][:3] or difflib.get_close_matches(pattern, known, n=3)
        if not near:  # a last part alone
            last = difflib.get_close_matches(text, {name.rpartition(".")[2] for name in known}, n=1)
            near = [name for name in known if name.rpartition(".")[2] in last][:3]
        hint = f"nearest: {', '.join(near)}" if near else f"the first names: {', '.join(names[:3])}"
        raise ConfigError(
            f"{key}: expected a pattern that matches something in the model, found {pattern!r}, which matches "
            f"nothing.\n  {hint}."
        )
    return matched


def _with_ancestors(name: str) -> Iterator[str]:
    """`a.b.weight`, `a.b`, `a`."""
    while name:
        yield name
        name = name.rpartition(".")[0]
