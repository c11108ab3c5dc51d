"""YAML 1.1 with fewer traps, parsed into nodes that keep their lines, and its errors in words."""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, cast

import yaml
from yaml.composer import ComposerError
from yaml.nodes import MappingNode, Node, ScalarNode, SequenceNode

_FLOAT_TAG = "tag:yaml.org,2002:float"
_INT_TAG = "tag:yaml.org,2002:int"
MERGE_TAG = "tag:yaml.org,2002:merge"
NULL_TAG = "tag:yaml.org,2002:null"
_PLAIN = ("str", "int", "float", "bool", "null", "seq", "map", "merge", "value")
_TAGS = {f"tag:yaml.org,2002:{name}" for name in _PLAIN}
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_FLOAT_WITH_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")


MAX_CHARACTERS = 1 << 18
MAX_NODES = 10_000
"""Of a document with all aliases expanded: nine anchors of nine aliases each would be a billion."""
MAX_DEPTH = 40
MAX_DIGITS = 100
"""Of a number; Python converts a long one in quadratic time."""
MAX_KEY = 200
_TOO_MANY = f"expected at most {MAX_NODES:,} values with every alias written out, found more"
_TOO_DEEP = f"expected at most {MAX_DEPTH} levels, found more"


class Loader(yaml.SafeLoader):
    """YAML 1.1 with two changes: `3e-4` and `1.5e3` are numbers, in model.architecture too, and dates stay text.

    Bounds what is composed; `parse` bounds the values with all aliases written out.
    """

    _composed = _depth = 0

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        self._composed += 1
        self._depth += 1
        if self._composed > MAX_NODES or self._depth > MAX_DEPTH:
            problem = _TOO_MANY if self._composed > MAX_NODES else _TOO_DEEP
            raise ComposerError(None, None, problem, self.peek_event().start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node


class Dumper(yaml.SafeDumper):
    """Quotes text that `Loader` would read as a number."""


def _without_timestamps(resolvers: Mapping[str, list[Any]]) -> dict[str, list[Any]]:
    return {first: [entry for entry in rest if entry[0] != _TIMESTAMP_TAG] for first, rest in resolvers.items()}


Loader.yaml_implicit_resolvers = _without_timestamps(yaml.SafeLoader.yaml_implicit_resolvers)
yaml.add_implicit_resolver(_FLOAT_TAG, _FLOAT_WITH_EXPONENT, list("-+.0123456789"), Loader, Dumper)


def parse(text: str) -> tuple[Node | None, Any]:
    """The node tree of one YAML document and its value; (None, None) for an empty one. Raises yaml.YAMLError."""
    try:
        if len(text) > MAX_CHARACTERS:
            raise yaml.YAMLError(f"expected at most {MAX_CHARACTERS:,} characters, found {len(text):,}")
        node = Loader(text).get_single_node()
        if node is not None:
            _require_bounded(node)
        # Parsed twice, because building the value of a mapping with `<<` rewrites its nodes.
        return node, yaml.load(text, Loader)
    except (ValueError, LookupError) as error:  # a malformed scalar: `0x_`, `!!bool x`
        raise yaml.YAMLError(f"a value that can't be read: {error}") from None


def _require_bounded(root: Node) -> None:
    """Raise ComposerError for other values than plain ones, and for aliases that make the document deep or large."""
    nodes = [(root, 1, False)]
    for node, depth, is_key in nodes:  # which grow
        if isinstance(node, SequenceNode):
            nodes += [(item, depth + 1, False) for item in cast(list[Node], node.value)]
        elif isinstance(node, MappingNode):
            pairs = cast(list[tuple[Node, Node]], node.value)
            nodes += [(part, depth + 1, n == 0) for pair in pairs for n, part in enumerate(pair)]
        if len(nodes) > MAX_NODES:
            problem = _TOO_MANY
        elif depth > MAX_DEPTH:
            problem = _TOO_DEEP
        elif node.tag not in _TAGS:
            problem = f"expected a plain value, found the tag {node.tag!r:.80}"
        elif node.tag in (_FLOAT_TAG, _INT_TAG) and len(node.value) > MAX_DIGITS:
            problem = f"expected a number of at most {MAX_DIGITS} characters, found {len(node.value):,}"
        elif is_key and len(node.value) > MAX_KEY:
            problem = f"expected a key of at most {MAX_KEY} characters, found {len(node.value):,}"
        else:
            continue
        raise ComposerError(None, None, problem, node.start_mark)


def first_comment(text: str) -> str | None:
    """The first comment in a valid YAML text; nodes and tokens don't carry comments."""
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
