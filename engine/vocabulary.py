"""Vocabulary: which token ids there are, for the base's requests and for those of a revision.

Goes in: the base's sizes, and a revision's manifest.  Comes out: ids that a prompt may hold, and
why a manifest cannot be served.  Torch-free; knows no text.
"""

from bisect import bisect_left
from dataclasses import dataclass

from engine.messages import PackedManifest


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """Ids below `drawn` are of the base's tokenizer, and below `rows` the base's tables have rows;
    up to `num_ids` adapters may bring some of their own."""

    rows: int
    drawn: int
    num_ids: int

    def held(self, manifest: PackedManifest | None) -> int:
        """A prompt's ids are below; None = the base's."""
        return manifest.num_tokens if manifest is not None and manifest.num_tokens else self.rows

    def limit(self, manifest: PackedManifest | None) -> int:
        """What is drawn is below, or named by a request as what may be."""
        return manifest.num_tokens if manifest is not None and manifest.num_tokens else self.drawn

    def problem(self, manifest: PackedManifest) -> str:
        """Why no request could run on it, in one line; "" if they can.

        A token without a row would be read from beyond the base's tables.
        """
        wanted = manifest.num_tokens
        if wanted > self.num_ids:
            need = wanted - self.rows
            return f"{wanted} token ids, this engine has {self.num_ids}: extra_vocab = {need} holds"
        if wanted <= self.rows:
            return ""
        for end in ("embed_tokens.rows", "lm_head.rows"):
            module = next((m for m in manifest.modules if m.module == end), None)
            if module is None:
                held = 0
            elif module.tokens:
                first, last = (bisect_left(module.tokens, n) for n in (self.rows, wanted))
                held = last - first
            else:
                held = module.rank - self.rows
            if held < wanted - self.rows:
                return f"{wanted} token ids, and {end} lacks rows for some behind the base's"
        return ""
