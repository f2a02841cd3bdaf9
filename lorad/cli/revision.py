"""One revision as `loractl show` prints it.

Goes in: a wire.Revision.  Comes out: rows of a table.  Asks nobody.
"""

from lorad import wire
from lorad.cli.output import human_bytes


def revision_rows(r: wire.Revision) -> list[tuple[str, str]]:
    """(heading, words) in the order of the table; a heading only where it says something."""
    ranks = " ".join(f"{module}:{rank}" for module, rank in sorted(r.ranks.items()))
    replaced = ", ".join(t.removesuffix(".rows") for t in r.targets if t.endswith(".rows"))
    rows = [
        ("  rev", r.rev),
        *([("  kind", _kind(r))] if r.kinds else []),
        ("  rank", f"{r.rank}  ({ranks})"),
        *([("  replaces", f"rows of {replaced}")] if replaced else []),
        ("  scaling", _scaling(r)),
        ("  layers", str(r.num_layers)),
        ("  dtype", r.dtype),
        ("  size", f"{human_bytes(r.file_bytes)} file, {human_bytes(r.packed_bytes)} packed"),
        ("  cache", _cache(r)),
    ]
    return rows + [("  warning", text) for text in r.warnings]


def _kind(r: wire.Revision) -> str:
    invoked = ", invoked by tokens " + " ".join(map(str, r.alora_tokens))
    return ", ".join(kind + (invoked if kind == "aLoRA" else "") for kind in r.kinds)


def _scaling(r: wire.Revision) -> str:
    if r.alpha is None:  # MLX states the number itself
        return "scale " + " ".join(f"{scale:g}" for scale in r.scalings)
    return f"{'alpha/sqrt(r)' if r.rslora else 'alpha/r'}, alpha {r.alpha:g}"


def _cache(r: wire.Revision) -> str:
    if not r.changes_kv:
        return "shares the base model's prefixes"
    if r.alora_tokens:
        return "the base model's prefixes up to its invocation, its own from there on"
    return "its own prefixes"
