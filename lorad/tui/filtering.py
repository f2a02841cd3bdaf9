"""The filter of a table: `word`, `!word`, `state:idle`, several apart from each other by spaces.

Goes in: what was typed, and of each row its fields.  Comes out: whether all of it holds.  A word is
looked for in the name; upper and lower case are alike.  A half-typed `state:` asks for nothing yet.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Term:
    """One word: `field` "" is the name."""

    field: str
    text: str
    negative: bool


@dataclass(frozen=True, slots=True)
class Filter:
    """All terms hold, or the row is not shown."""

    terms: tuple[Term, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.terms)

    def matches(self, name: str, fields: Mapping[str, str]) -> bool:
        return all(self._holds(term, name, fields) for term in self.terms)

    @staticmethod
    def _holds(term: Term, name: str, fields: Mapping[str, str]) -> bool:
        if term.field and term.field in fields:
            found = fields[term.field].lower().startswith(term.text)
        else:
            whole = f"{term.field}:{term.text}" if term.field else term.text
            found = whole in name.lower()
        return found is not term.negative


def parse(text: str) -> Filter:
    """Never fails: what is no field is looked for in the name."""
    terms = []
    for word in text.lower().split():
        negative = word.startswith("!")
        field, colon, value = word.removeprefix("!").partition(":")
        if not colon:
            field, value = "", field
        if value:
            terms.append(Term(field, value, negative))
    return Filter(tuple(terms))
