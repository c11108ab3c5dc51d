"""YAML 1.1 with fewer traps, parsed into nodes that keep their lines, and its errors as text."""

import itertools
import re
from collections.abc import Iterable
from typing import Any, ClassVar, cast

import yaml
from yaml.composer import ComposerError
from yaml.nodes import MappingNode, Node, SequenceNode

_TAG = "tag:yaml.org,2002:"
MERGE_TAG = f"{_TAG}merge"
NULL_TAG = f"{_TAG}null"
_PLAIN = ("str", "int", "float", "bool", "null", "seq", "map", "merge", "value")
_FLOAT_WITH_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")

MAX_CHARACTERS = 1 << 18
MAX_NODES = 10_000
"""Limit with all aliases expanded: nine anchors of nine aliases each would be a billion."""
_IN_OUR_WORDS = {
    "mapping values are not allowed here": "unexpected `key:`: indented further than the key above it, or a second "
    "key in its line, or text with `: ` that needs quotes",
    "could not find expected ':'": "a key without `:` and a space after it",
    "'\\t' that cannot start": "a tab; YAML indents with spaces",
    "found unexpected end of stream": "a quote that isn't closed",
    "did not find expected key": "a key that isn't indented like those beside it",
    "expected <block end>": "a key or item that isn't indented like those beside it",
    "expected ',' or ']'": "a list without `]`, or without a comma between two items",
    "expected ',' or '}'": "a mapping without `}`, or without a comma between two keys",
}
"""PyYAML's problem -> ours."""


class Loader(yaml.SafeLoader):
    """YAML 1.1 with two changes: `3e-4` and `1.5e3` are numbers, also in model.architecture, and dates stay text."""

    yaml_implicit_resolvers: ClassVar = {
        first: [entry for entry in entries if entry[0] != f"{_TAG}timestamp"]
        for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


class Dumper(yaml.SafeDumper):
    """YAML dumper that quotes text which `Loader` would read as a number."""


yaml.add_implicit_resolver(f"{_TAG}float", _FLOAT_WITH_EXPONENT, list("-+.0123456789"), Loader, Dumper)


def parse(text: str) -> tuple[Node | None, Any]:
    """Return the node tree and the value of one YAML document; (None, None) if empty. Raises yaml.YAMLError."""
    try:
        if len(text) > MAX_CHARACTERS:
            raise yaml.YAMLError(f"expected at most {MAX_CHARACTERS:,} characters, found {len(text):,}")
        node = Loader(text).get_single_node()
        if node is not None:
            _require_bounded(node)
        # Parse twice: constructing a mapping with `<<` rewrites its nodes.
        return node, yaml.load(text, Loader)
    except (ValueError, LookupError) as error:  # a malformed scalar: `0x_`, `!!bool x`
        raise yaml.YAMLError(f"malformed value: {error}") from None


def _require_bounded(root: Node) -> None:
    """Raise ComposerError for values that aren't plain, and for aliases that make the document large."""
    nodes = [root]
    for node in nodes:  # the loop appends to it
        if isinstance(node, SequenceNode):
            nodes += cast(list[Node], node.value)
        elif isinstance(node, MappingNode):
            nodes += itertools.chain.from_iterable(cast(list[tuple[Node, Node]], node.value))
        if len(nodes) > MAX_NODES:
            problem = f"more than {MAX_NODES:,} values with all aliases expanded"
        elif node.tag.removeprefix(_TAG) not in _PLAIN:
            problem = f"expected a plain value, found the tag {node.tag!r:.80}"
        else:
            continue
        raise ComposerError(None, None, problem, node.start_mark)


def first_comment(text: str) -> str | None:
    """Return the first comment in valid YAML text; nodes and tokens don't keep comments."""
    tokens = list(cast(Iterable[yaml.Token], yaml.scan(text, Loader)))
    for before, after in itertools.pairwise(tokens):
        between = text[before.end_mark.index : after.start_mark.index]  # white space and comments only
        if "#" in between:
            return between[between.index("#") :].splitlines()[0].rstrip()
    return None


def problem_of(error: yaml.YAMLError) -> str:
    text = cast(str | None, getattr(error, "problem", None)) or str(error).splitlines()[0]
    return next((ours for theirs, ours in _IN_OUR_WORDS.items() if theirs in text), text)
