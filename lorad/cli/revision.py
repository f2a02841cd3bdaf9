"""One revision as `loractl show` prints it, and how its model pools.

Goes in: a wire.Revision.  Comes out: rows of a table.  Asks nobody.
"""

from lorad import wire, wire_status
from lorad.cli.output import human_bytes, plain


def revision_rows(r: wire.Revision) -> list[tuple[str, str]]:
    """(heading, words) in the order of the table; a heading only where it says something."""
    ranks = " ".join(f"{module}:{rank}" for module, rank in sorted(r.ranks.items()))
    replaced = [t.removesuffix(".rows") for t in r.targets if t.endswith(".rows")]
    head = [t for t in replaced if t.startswith(("head.", "score."))]
    told = f"rows of {', '.join(replaced)}" if not head else ", ".join(head)
    rows = [
        ("  rev", r.rev),
        *([("  kind", _kind(r))] if r.kinds else []),
        ("  rank", f"{r.rank}  ({ranks})"),
        *([("  replaces", told)] if replaced else []),
        *([("  vocabulary", _vocabulary(r))] if r.num_tokens else []),
        ("  scaling", _scaling(r)),
        ("  layers", str(r.num_layers)),
        ("  dtype", r.dtype),
        ("  size", f"{human_bytes(r.file_bytes)} file, {human_bytes(r.packed_bytes)} packed"),
        *([("  cache", _cache(r))] if r.keeps_kv else []),
    ]
    return rows + [("  warning", text) for text in r.warnings]


def pooling_words(p: wire_status.PoolingPicture) -> str:
    """How vectors are made, and of what classes there are scores."""
    told = f"{' + '.join(p.kinds) or 'each token'} ({plain(p.origin)}), {p.width} numbers"
    told += ", of length 1" if p.normalizes else ""
    if p.score_tokens:
        told += f"; scores by token {' against '.join(map(str, p.score_tokens))}"
    told += f"; asks in {plain(p.asks)}" if p.asks else ""
    return told + (f"; labels {', '.join(map(plain, p.labels))}" if p.labels else "")


def _kind(r: wire.Revision) -> str:
    invoked = ", invoked by tokens " + " ".join(map(str, r.alora_tokens))
    return ", ".join(kind + (invoked if kind == "aLoRA" else "") for kind in r.kinds)


def _vocabulary(r: wire.Revision) -> str:
    whose = "its own" if r.own_tokenizer else "the base model's"
    behind = f" ({r.extra_tokens:,} behind the base model's)" if r.extra_tokens else ""
    return f"{r.num_tokens:,} tokens{behind}, {whose} tokenizer"


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
