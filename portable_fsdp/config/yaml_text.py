"""YAML as configs are written: 1.1 with fewer traps, read into nodes that keep their lines, and its errors in words."""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import yaml
from yaml.nodes import Node, ScalarNode

_FLOAT_TAG = "tag:yaml.org,2002:float"
MERGE_TAG = "tag:yaml.org,2002:merge"
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_FLOAT_WITH_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")


class Loader(yaml.SafeLoader):
    """YAML 1.1 with two changes: `3e-4` and `1.5e3` are numbers, in model.architecture too, and dates stay text."""


class Dumper(yaml.SafeDumper):
    """Quotes the text that `Loader` would read as a number."""


def _without_timestamps(resolvers: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {first: [entry for entry in rest if entry[0] != _TIMESTAMP_TAG] for first, rest in resolvers.items()}


Loader.yaml_implicit_resolvers = _without_timestamps(yaml.SafeLoader.yaml_implicit_resolvers)
yaml.add_implicit_resolver(_FLOAT_TAG, _FLOAT_WITH_EXPONENT, list("-+.0123456789"), Loader, Dumper)


def parse(text: str) -> tuple[Node | None, Any]:
    """The node tree of one YAML document and its value; (None, None) for an empty one. Raises yaml.YAMLError."""
    try:
        # Parsed twice, because building the value of a mapping with `<<` rewrites its nodes.
        return Loader(text).get_single_node(), yaml.load(text, Loader)
    except ValueError as error:  # a scalar that looks like a number and is none: `0x_`
        raise yaml.YAMLError(str(error)) from None


def first_comment(text: str) -> str | None:
    """The first comment in a YAML text that parses, of which no node and no token tells; None where there is none."""
    tokens = list(cast(Iterable[yaml.Token], yaml.scan(text, Loader)))
    for before, after in itertools.pairwise(tokens):
        between = text[before.end_mark.index : after.start_mark.index]  # white space, but for comments
        if "#" in between:
            return between[between.index("#") :].splitlines()[0].rstrip()
    return None


def scalar_text(node: Node | None) -> str | None:
    return str(node.value) if isinstance(node, ScalarNode) else None


def line_of(error: yaml.YAMLError) -> str:
    mark = getattr(error, "problem_mark", None)
    return f":{mark.line + 1}" if mark else ""


def problem_of(error: yaml.YAMLError) -> str:
    text = cast(str | None, getattr(error, "problem", None)) or str(error).splitlines()[0]
    return text + (" (YAML indents with spaces)" if "'\\t'" in text else "")
