"""What `loractl show` says of a revision, and of how its model pools."""

from lorad import wire, wire_status
from lorad.cli.revision import pooling_words, revision_rows


def revision(**fields):
    usual = {
        "rev": "r" * 64,
        "rank": 4,
        "ranks": {"q_proj": 4},
        "alpha": 8.0,
        "rslora": False,
        "targets": ("q_proj",),
        "num_layers": 2,
        "dtype": "float32",
        "file_bytes": 10,
        "packed_bytes": 20,
        "num_blocks": 1,
        "changes_kv": True,
    }
    return dict(revision_rows(wire.Revision(**usual | fields)))


def test_prefixes_are_told_of_where_there_are_any():
    assert revision()["  cache"] == "its own prefixes"
    assert revision(changes_kv=False)["  cache"] == "shares the base model's prefixes"
    assert "  cache" not in revision(keeps_kv=False)


def test_what_it_replaces_is_rows_of_a_matrix_or_parts_of_a_classifier():
    assert "  replaces" not in revision()
    assert revision(targets=("lm_head.rows",))["  replaces"] == "rows of lm_head"
    head = ("q_proj", "score.weight.rows", "score.bias.rows")
    assert revision(targets=head)["  replaces"] == "score.weight, score.bias"


def test_a_vocabulary_of_its_own_is_told():
    assert "  vocabulary" not in revision()
    own = revision(num_tokens=49154, own_tokenizer=True, kinds=("rows", "tokenizer"))
    assert own["  vocabulary"] == "49,154 tokens, its own tokenizer"
    assert own["  kind"] == "rows, tokenizer"
    more = revision(num_tokens=49154, own_tokenizer=True, extra_tokens=2)["  vocabulary"]
    assert more == "49,154 tokens (2 behind the base model's), its own tokenizer"
    fewer = revision(num_tokens=49152)
    assert fewer["  vocabulary"] == "49,152 tokens, the base model's tokenizer"


def test_how_a_model_pools_is_one_line():
    plain = wire_status.PoolingPicture(kinds=("mean",), origin="a file", width=8, normalizes=False)
    assert pooling_words(plain) == "mean (a file), 8 numbers"
    asked = wire_status.PoolingPicture(
        kinds=("last",),
        origin="f",
        width=8,
        normalizes=False,
        score_tokens=(9, 4),
        asks="the form of somebody",
    )
    told = "last (f), 8 numbers; scores by token 9 against 4; asks in the form of somebody"
    assert pooling_words(asked) == told
    both = wire_status.PoolingPicture(
        kinds=("cls", "max"), origin="f", width=16, normalizes=True, labels=("no", "y\x1bes")
    )
    assert pooling_words(both) == "cls + max (f), 16 numbers, of length 1; labels no, y?es"
