"""Conjunctions: how many expressions one text has to match at once, before anything is compiled.

Goes in: a JSON schema, or a Lark text.  Comes out: whether they are more than can be followed.
llguidance follows ten patterns of an `allOf` side by side and says so when that becomes too much;
with thirty it is in one mask for ever, takes memory all the while, and that may be far into an
answer, where nobody can end it.  What it cannot read is left to it.  Torch-free, imports nothing.
"""

import re
from collections.abc import Iterable, Iterator
from typing import Any, TypeGuard

#: Ten are followed in 0.2 s at the worst that was found, twelve in 4 s, fourteen without end.
MOST = 8
#: Nodes that are looked at; a schema of 64 KiB has some thousands.
_VISITS = 20_000
_QUOTED = re.compile(r'"(?:[^"\\\n]|\\.)*"|/(?:[^/\\\n]|\\.)+/|//[^\n]*')


def lark_is_too_much(text: str) -> bool:
    """More `&` and `~` than can be followed."""
    return len(re.findall("[&~]", _QUOTED.sub("", text))) > MOST


def schema_is_too_much(schema: object) -> bool:
    """More patterns on one value than can be followed, through `allOf`, `$ref` and siblings."""
    try:
        _Look(schema).at([schema])
    except _TooMuch:
        return True
    return False


class _TooMuch(Exception):
    pass


class _Look:
    def __init__(self, root: object) -> None:
        self._root, self._left = root, _VISITS
        self._seen: set[frozenset[int]] = set()

    def at(self, group: Iterable[object]) -> None:
        """All of `group` have to hold of one value."""
        waiting = [[*group]]
        while waiting:
            nodes = {id(n): n for one in waiting.pop() for n in self._together(one, frozenset())}
            if frozenset(nodes) in self._seen:
                continue
            self._seen.add(frozenset(nodes))
            if sum("pattern" in node for node in nodes.values()) > MOST:
                raise _TooMuch
            waiting.extend(_below([*nodes.values()]))

    def _together(self, node: object, within: frozenset[int]) -> list[dict[str, Any]]:
        """The node and what has to hold beside it; of alternatives the one with most patterns."""
        self._left -= 1
        if self._left < 0:
            raise _TooMuch
        if not isinstance(node, dict) or id(node) in within:
            return []
        within |= {id(node)}
        found = [node]
        for part in _list(node.get("allOf")):
            found += self._together(part, within)
        found += self._together(self._target(node.get("$ref")), within)
        for key in ("anyOf", "oneOf"):
            ways = [self._together(way, within) for way in _list(node.get(key))]
            found += max(ways, key=lambda way: sum("pattern" in n for n in way), default=[])
        return found

    def _target(self, ref: object) -> object:
        if not isinstance(ref, str) or not ref.startswith("#"):
            return None
        here = self._root
        for part in filter(None, ref[1:].split("/")):
            here = here.get(part.replace("~1", "/").replace("~0", "~")) if _table(here) else None
        return here


def _below(nodes: list[dict[str, Any]]) -> Iterator[list[object]]:
    """What has to hold of each value within; alternatives also by themselves."""
    for key in ("properties", "patternProperties"):
        tables = [table for table in (node.get(key) for node in nodes) if _table(table)]
        for name in {name for table in tables for name in table}:
            yield [table[name] for table in tables if name in table]
    for key in ("items", "additionalProperties"):
        yield [node[key] for node in nodes if key in node]
    for node in nodes:
        for key in ("anyOf", "oneOf", "prefixItems"):
            yield from ([way] for way in _list(node.get(key)))


def _list(value: object) -> list[object]:
    return value if isinstance(value, list) else []


def _table(value: object) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)
