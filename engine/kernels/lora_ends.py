"""LoRA on the output head: logits of some rows corrected, segment by segment.

Goes in: logits (N, vocab) in fp32 before any cap, the normed hidden states (N, hidden) that they
were made of, and which rows belong to which slot.  Comes out: the logits, corrected in place; rows
of no segment keep their bits.  Plain torch, on a card too: few adapters have a head, and it is
reached by the sampled rows alone, behind the graph.  Everything is in fp32.

B is as large as the vocabulary, so it is taken piece by piece as it lies in the arena: no copy of
it in fp32 is larger than a block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.gemm import by_tiles
from engine.kernels.lora_meta import LoraRows


def add_head(y: Tensor, x: Tensor, pair: LoraRows, *, deterministic: bool) -> None:
    """y (N, vocab) fp32 += scaling * (x Aᵀ) B, or with bias and gain as `PackedModule` says.

    x is (N, hidden).  No family that is served has a bias on its head.
    """
    if deterministic:
        y += by_tiles(
            x.float(), lambda tile: _product(tile, pair, y.new_zeros(len(tile), y.shape[1]))
        )
    else:
        _product(x.float(), pair, y)
    more = _behind(pair, y.shape[1])
    if pair.bias:
        y += pair.scaling * more[0]
    if pair.gain:
        y *= more[-2:].sum(0)


def _product(x: Tensor, pair: LoraRows, y: Tensor) -> Tensor:
    """y += scaling * (x Aᵀ) B; returns y."""
    h = (x @ unfolded(pair.a, x.shape[1]).float().t()).mul_(pair.scaling)  # (N, rank)
    folds, first = _folds(pair.b, y.shape[1]), 0
    for piece in pair.b:
        for fold in range(folds):  # of the piece's rows, those that hold this part of a row
            part = piece[(fold - first) % folds :: folds]
            rank = (first + (fold - first) % folds) // folds
            part = part[: max(pair.rank - rank, 0)]
            columns = slice(fold * piece.shape[1], (fold + 1) * piece.shape[1])
            out = y[:, columns]
            out.addmm_(h[:, rank : rank + len(part)], part[:, : out.shape[1]].float())
        first += len(piece)
    return y


def _behind(pair: LoraRows, width: int) -> Tensor:
    """The rows behind B's own, (rows, width) fp32."""
    skipped, behind = pair.rank * _folds(pair.b, width), []
    for piece in pair.b:
        behind.append(piece[skipped:])
        skipped = max(skipped - len(piece), 0)
    return unfolded(behind, width).float()


def unfolded(pieces: Sequence[Tensor], width: int) -> Tensor:
    """Pieces of a run as one matrix of rows of `width`; without a copy where it is one piece."""
    whole = pieces[0] if len(pieces) == 1 else torch.cat(tuple(pieces))
    folds = _folds(pieces, width)
    return whole if folds == 1 else whole.reshape(-1, folds * whole.shape[1])[:, :width]


def _folds(pieces: Sequence[Tensor], width: int) -> int:
    """How many rows of the pieces are one row of `width`."""
    return -(-width // pieces[0].shape[1])
