"""LoRA at the model's ends: rows of the embedding, and logits, of one adapter corrected.

Goes in: rows of one slot, its pair, and what the base made of the rows: embeddings, or logits in
fp32 before any cap.  Comes out: the same, corrected in place.  Plain torch, on a card too: few
adapters have such pairs, and they are applied ahead of the graph, or behind it, where only sampled
rows are left.  Everything is in fp32.  Adapters with a few rows of their own are not few, so that
these have kernels, for all of a step's rows at once (`lora_own.py`).

One factor is as long as the vocabulary, so it is taken piece by piece as it lies in the arena: no
copy of it in fp32 is larger than a block.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from engine.kernels.gemm import by_tiles
from engine.kernels.lora_meta import LoraRows, OwnRows


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


def add_head_at(
    y: Tensor, x: Tensor, pair: LoraRows, tokens: Tensor, vocab: int, *, deterministic: bool
) -> None:
    """The same for the columns of `tokens` (n,) alone: y (N, n) fp32."""
    columns = _columns(pair.b, tokens, vocab).float()  # (n, rows of the run)
    a, b = unfolded(pair.a, x.shape[1]).float().t(), columns[:, : pair.rank].t()

    def product(rows: Tensor) -> Tensor:
        return (rows @ a).mul_(pair.scaling) @ b

    y += by_tiles(x.float(), product) if deterministic else product(x.float())
    if pair.bias:
        y += pair.scaling * columns[:, pair.rank]
    if pair.gain:
        y *= columns[:, -2:].sum(1)


def add_embedding(
    x: Tensor, tokens: Tensor, pair: LoraRows, vocab: int, scale: float, *, deterministic: bool
) -> None:
    """x (T, hidden) += scale * scaling * A[:, tokens]ᵀ B, rounded once; A is (rank, vocab).

    `scale` is what the family multiplies its embeddings by, which x has behind it.
    """
    h = _columns(pair.a, tokens, vocab).float().mul_(scale * pair.scaling)  # (T, rank)
    b = unfolded(pair.b, x.shape[1]).float()
    delta = by_tiles(h, lambda tile: tile @ b) if deterministic else h @ b
    x.copy_(delta.add_(x.float()))


def replace_embedding(x: Tensor, tokens: Tensor, rows: LoraRows, scale: float) -> None:
    """x (T, hidden) = scale * the adapter's own row, for the tokens that it has one of."""
    own, mine = rows_at(rows, tokens, x.shape[1])
    if scale != 1.0:
        own = own * scale
    x.copy_(own if mine is None else torch.where(mine[:, None], own, x))


def look_up(tokens: Tensor, base: Tensor, own: OwnRows, scale: float) -> Tensor:
    """scale * the row of each of tokens (T,): its adapter's own where it has one, or the base's."""
    from engine.kernels import lora_own

    return lora_own.look_up(tokens, base, own, scale)


def replace_embeddings(x: Tensor, tokens: Tensor, own: OwnRows, scale: float) -> None:
    """The same for all of a step's rows that `own` speaks of, in one launch."""
    from engine.kernels import lora_own

    lora_own.replace_embeddings(x, tokens, own, scale)


def replace_logits(y: Tensor, x: Tensor, own: OwnRows, cap: float) -> None:
    """`replace_head` for all of a step's rows that `own` speaks of, and the cap, in one launch."""
    from engine.kernels import lora_own

    lora_own.replace_logits(y, x, own, cap)


def rows_at(rows: LoraRows, tokens: Tensor, width: int) -> tuple[Tensor, Tensor | None]:
    """The adapter's own rows (T, width) of `tokens` (T,), and which it has (T,); None = all.

    Ids are searched: a table of 2,048 tokens by 60,000 of them would be 123 MB.
    """
    assert rows.places is not None
    last = len(rows.places) - 1
    if rows.ids is None:
        at, mine = tokens.clamp(max=last), None
    else:
        at = torch.searchsorted(rows.ids, tokens).clamp_(max=last)
        mine = rows.ids[at] == tokens
    piece = rows.a[0]
    numbers = rows.places[at][:, None] + torch.arange(width, device=tokens.device)
    flat = piece.as_strided((piece.untyped_storage().nbytes() // piece.element_size(),), (1,), 0)
    return flat[numbers], mine


def replace_head(y: Tensor, x: Tensor, rows: LoraRows, *, deterministic: bool) -> None:
    """y (N, num_ids) fp32 = x Wᵀ where W has rows of the adapter's own; x is (N, hidden)."""
    x = x.float()
    first = 0
    for piece in rows.a:
        w = piece.float().t()
        own = by_tiles(x, w.__rmatmul__) if deterministic else x @ w
        if rows.ids is None:
            y[:, first : first + len(piece)] = own
        else:
            y[:, rows.ids[first : first + len(piece)]] = own
        first += len(piece)


def _columns(pieces: Sequence[Tensor], tokens: Tensor, vocab: int) -> Tensor:
    """(T, rank): of every row of the run its numbers at `tokens`."""
    folds, width = _folds(pieces, vocab), pieces[0].shape[1]
    columns = tokens if folds == 1 else tokens % width
    found = torch.cat([piece.index_select(1, columns) for piece in pieces])  # (rank * folds, T)
    if folds == 1:
        return found.t()
    fold = (tokens // width)[None, None, :].expand(len(found) // folds, 1, -1)
    return found.view(-1, folds, len(tokens)).gather(1, fold)[:, 0].t()


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
