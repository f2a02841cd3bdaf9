"""Which ids a revision's requests may hold and draw, and which manifests have rows for them."""

import pytest

from engine.messages import PackedManifest, PackedModule
from engine.vocabulary import Vocabulary

VOCABULARY = Vocabulary(rows=100, drawn=90, num_ids=120)


def manifest(num_tokens: int, *ends: tuple[str, int, tuple[int, ...]]) -> PackedManifest:
    return PackedManifest(
        rev="r",
        path="",
        layout="",
        num_blocks=1,
        true_bytes=0,
        max_rank=4,
        changes_kv=True,
        modules=tuple(PackedModule(2, f"{end}.rows", n, 1.0, tokens=ids) for end, n, ids in ends),
        num_tokens=num_tokens,
    )


def test_limits_are_the_bases_unless_a_revision_has_its_own() -> None:
    for one in (None, manifest(0)):
        assert (VOCABULARY.held(one), VOCABULARY.limit(one)) == (100, 90)
    for count in (80, 95, 110):
        assert VOCABULARY.held(manifest(count)) == VOCABULARY.limit(manifest(count)) == count


@pytest.mark.parametrize(
    ("given", "wrong"),
    [
        (manifest(0), ""),
        (manifest(100), ""),
        (manifest(121), "extra_vocab = 21"),
        (manifest(102), "embed_tokens.rows"),
        (manifest(102, ("embed_tokens", 2, (100, 101))), "lm_head.rows"),
        (manifest(102, ("embed_tokens", 2, (100, 101)), ("lm_head", 3, (4, 100, 101))), ""),
        (manifest(102, ("embed_tokens", 102, ()), ("lm_head", 110, ())), ""),
        (manifest(102, ("embed_tokens", 101, ()), ("lm_head", 102, ())), "embed_tokens.rows"),
        (manifest(102, ("embed_tokens", 2, (99, 101)), ("lm_head", 102, ())), "embed_tokens.rows"),
    ],
    ids=str,
)
def test_a_token_behind_the_bases_needs_a_row_at_both_ends(
    given: PackedManifest, wrong: str
) -> None:
    said = VOCABULARY.problem(given)
    assert wrong in said and bool(said) == bool(wrong)
