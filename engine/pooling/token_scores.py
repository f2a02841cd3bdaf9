"""Scores out of an output head: the logit of one word, such as "yes", over that of another.

Goes in: hidden states, and what an adapter has on the head.  Comes out: one logit each, in fp32,
whose sigmoid is the share of the first word beside the second.  Of the head only these rows are
there: the whole has as many as the vocabulary.  Knows no requests and no text.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import ModelUnsupported
from engine.kernels.elementwise import cap_logits
from engine.kernels.gemm import linear
from engine.kernels.lora_ends import add_head_at, rows_at
from engine.kernels.lora_meta import LoraRows
from engine.models.base_files import BaseFiles
from engine.models.spec import ModelSpec

Pairs = Mapping[tuple[int, str], LoraRows]
_HEAD = "lm_head.weight"


class TokenScores:
    """`tokens` are the word that scores and, if there is one, the word that it is held against;
    `rows` (tokens, hidden) are theirs of the head."""

    def __init__(
        self, spec: ModelSpec, tokens: Sequence[int], rows: Tensor, *, deterministic: bool = False
    ) -> None:
        self.tokens = tuple(tokens)
        self._spec, self._rows, self._deterministic = spec, rows, deterministic
        self._ids = torch.tensor(self.tokens, device=rows.device)

    @torch.no_grad()
    def logits(self, sequences: Sequence[Tensor], pairs: Pairs) -> Tensor:
        """(length, hidden) of each sequence, all of them of one adapter -> (n, 1) fp32.

        `pairs` are what the adapter has behind the layers.
        """
        x = torch.stack([rows[-1] for rows in sequences])  # (n, hidden)
        fixed, end, vocab = self._deterministic, self._spec.num_layers, self._spec.num_ids
        weight = self._rows
        if own := pairs.get((end, "lm_head.rows")):
            theirs, mine = rows_at(own, self._ids, x.shape[1])
            weight = theirs if mine is None else torch.where(mine[:, None], theirs, weight)
        y = torch.empty(len(x), len(self.tokens), dtype=torch.float32, device=x.device)
        linear(x, weight.to(x.dtype), None, deterministic=fixed, out=y)
        if pair := pairs.get((end, "lm_head")):
            add_head_at(y, x, pair, self._ids, vocab, deterministic=fixed)
        if cap := self._spec.logit_softcap:
            y = cap_logits(y, cap, None, deterministic=fixed)
        return y[:, :1] - y[:, 1:] if len(self.tokens) > 1 else y


def head_rows(folder: Path, spec: ModelSpec, embedding: Tensor, tokens: Sequence[int]) -> Tensor:
    """Rows of the base's head for `tokens`, as its embedding (vocab, hidden) is kept.

    Raises ModelUnsupported for a base without a head of its own that is not tied either.
    """
    if spec.tied:
        return embedding[list(tokens)].clone()
    with BaseFiles(folder) as files:
        if _HEAD not in files.tensors:
            raise ModelUnsupported(
                f"{folder} has no {_HEAD}, and a score of words is made of it",
                hint='tasks = ["embed"], or a checkpoint that generates',
            )
        rows = [torch.from_numpy(files.rows(_HEAD, token, token + 1)) for token in tokens]
    return torch.cat(rows).to(embedding)
