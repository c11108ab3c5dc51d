"""YAML 1.1 with fewer traps, parsed into nodes that keep their lines, and its errors in words."""

import itertools
import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple, cast

import yaml
from yaml.composer import ComposerError
from yaml.events import AliasEvent, NodeEvent
from yaml.nodes import MappingNode, Node, ScalarNode

_FLOAT_TAG = "tag:yaml.org,2002:float"
_INT_TAG = "tag:yaml.org,2002:int"
MERGE_TAG = "tag:yaml.org,2002:merge"
NULL_TAG = "tag:yaml.org,2002:null"
_TAGS = {"!", *(f"tag:yaml.org,2002:{name}" for name in ("str", "int", "float", "bool", "null", "seq", "map"))}
_TIMESTAMP_TAG = "tag:yaml.org,2002:timestamp"
_FLOAT_WITH_EXPONENT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)[eE][-+]?[0-9]+$")


MAX_CHARACTERS = 1 << 18
MAX_NODES = 10_000
"""Of a document with all aliases expanded: nine anchors of nine aliases each would be a billion."""
MAX_DEPTH = 50
MAX_DIGITS = 100
"""Of a number; Python converts a long one in quadratic time."""

MAX_KEY = 200


class _Extent(NamedTuple):
    """Size of an anchored node with all its aliases expanded."""

    nodes: int
    depth: int


class Loader(yaml.SafeLoader):
    """YAML 1.1 with two changes: `3e-4` and `1.5e3` are numbers, in model.architecture too, and dates stay text.

    Bounds are checked while nodes are composed, before anything walks them.
    """

    def __init__(self, text: str) -> None:
        if len(text) > MAX_CHARACTERS:
            raise yaml.YAMLError(f"expected at most {MAX_CHARACTERS:,} characters, found {len(text):,}")
        super().__init__(text)
        self._nodes = 0
        self._depth = 0
        self._deepest = 0  # of the node that is composed
        self._anchored: dict[str, _Extent] = {}

    def compose_node(self, parent: Node | None, index: int) -> Node | None:
        event = self.peek_event()
        nodes_before, deepest_before = self._nodes, self._deepest
        self._nodes += 1
        self._depth += 1
        self._deepest = self._depth
        if isinstance(event, AliasEvent) and event.anchor in self.anchors:
            extent = self._anchored.get(event.anchor)
            if extent is None:
                raise ComposerError(
                    None, None, "expected a value, found an alias of what it stands in", event.start_mark
                )
            self._nodes += extent.nodes
            self._deepest += extent.depth
        self._require_bounded(event)
        tag = getattr(event, "tag", None)
        if tag is not None and tag not in _TAGS:
            raise ComposerError(None, None, f"expected a plain value, found the tag {tag!r:.80}", event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        if isinstance(event, NodeEvent) and event.anchor is not None and not isinstance(event, AliasEvent):
            self._anchored[event.anchor] = _Extent(self._nodes - nodes_before, self._deepest - self._depth)
        self._deepest = max(self._deepest, deepest_before)
        return node

    def _require_bounded(self, event: yaml.Event) -> None:
        if self._nodes > MAX_NODES:
            problem = f"expected at most {MAX_NODES:,} values with every alias written out, found more"
            raise ComposerError(None, None, problem, event.start_mark)
        if self._deepest > MAX_DEPTH:
            raise ComposerError(None, None, f"expected at most {MAX_DEPTH} levels, found more", event.start_mark)

    def compose_mapping_node(self, anchor: Any) -> MappingNode:
        node = super().compose_mapping_node(anchor)
        for key, _ in cast(list[tuple[Node, Node]], node.value):
            if isinstance(key, ScalarNode) and len(key.value) > MAX_KEY:
                problem = f"expected a key of at most {MAX_KEY} characters, found {len(key.value):,}"
                raise ComposerError(None, None, problem, key.start_mark)
        return node

    def compose_scalar_node(self, anchor: Any) -> ScalarNode:
        node = super().compose_scalar_node(anchor)
        if node.tag in (_FLOAT_TAG, _INT_TAG) and len(node.value) > MAX_DIGITS:
            problem = f"expected a number of at most {MAX_DIGITS} characters, found {len(node.value):,}"
            raise ComposerError(None, None, problem, node.start_mark)
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
        # Parsed twice, because building the value of a mapping with `<<` rewrites its nodes.
        return Loader(text).get_single_node(), yaml.load(text, Loader)
    except (ValueError, LookupError) as error:  # a malformed scalar: `0x_`, `!!bool x`
        raise yaml.YAMLError(f"a value that can't be read: {error}") from None


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
