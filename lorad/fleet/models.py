"""`/v1/models` of a cluster: the bases that members serve, and every name of the catalog.

Goes in: what a member says to the same caller, and the table.  Comes out: the list.  Whom a member
lets in, and which names are for whom, is the member's to say.
"""

from collections.abc import Collection
from datetime import datetime

from lorad.fleet.table import Entry, Table
from lorad.wire_openai import ModelCard, ModelFacts, ModelList


def listed(said: ModelList, table: Table, *, private: bool) -> ModelList:
    """`said`: a member's list.  `private`: callers may not know of each other's adapters, so that
    only names that the member tells are listed."""
    bases = [card for card in said.data if card.parent is None]
    told = {card.id: card for card in said.data}
    most = bases[0].max_model_len if bases else 0
    taken = {card.id for card in bases}
    names = [n for n in sorted(table.entries) if n not in taken and (n in told or not private)]
    return ModelList(data=[*bases, *(card(table.entries[n], told.get(n), most) for n in names)])


def card(entry: Entry, told: ModelCard | None, most: int) -> ModelCard:
    if told is not None and told.root == entry.rev:
        return told
    created = int(datetime.fromisoformat(entry.created_at).timestamp()) if entry.created_at else 0
    return ModelCard(
        id=entry.name,
        created=created,
        root=entry.rev,
        parent=entry.model or None,
        max_model_len=most,
        lorad=ModelFacts(
            state="registered",
            rank=entry.rank,
            pinned=entry.pin,
            priority=50 if entry.priority is None else entry.priority,
        ),
    )


def bases_of(said: Collection[tuple[str, ...]]) -> frozenset[str]:
    return frozenset(name for names in said for name in names)
