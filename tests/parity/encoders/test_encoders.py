"""Random encoders of each family against transformers' own classes, in fp32."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine.errors import ModelUnsupported
from engine.kernels.ragged_attention import Ragged


def close(got: Tensor, expected: Tensor) -> None:
    """As near as two orders of fp32 sums are; hidden states are of about 4."""
    assert (got - expected).abs().max() < 1e-5
    cosine = torch.cosine_similarity(got, expected, dim=-1)
    assert cosine.min() > 0.9999


def test_a_packed_batch_equals_transformers_one_by_one(case: Any) -> None:
    for tokens, got in zip(case.batch, case.run(case.load(), case.batch), strict=True):
        close(got, case.theirs(tokens))


def test_the_longest_sequence_is_that_of_the_model(case: Any) -> None:
    encoder = case.load()
    longest = encoder.spec.max_length
    assert longest == (
        300 if encoder.spec.padding_id is None else 300 - encoder.spec.padding_id - 1
    )
    tokens = (case.batch[2] * 2)[:longest]
    close(case.run(encoder, [tokens])[0], case.theirs(tokens))


def test_deterministic_mode_gives_a_sequence_its_bits_in_any_batch(case: Any) -> None:
    encoder, batch = case.load(deterministic=True), case.batch
    together = case.run(encoder, batch)
    close(together[4], case.theirs(batch[4]))
    for order in ([3, 1, 0], [5, 4], [1]):
        got = case.run(encoder, [batch[i] for i in order])
        assert all(torch.equal(one, together[i]) for i, one in zip(order, got, strict=True))


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", ["bert", "roberta", "modernbert", "nomic"])
def test_what_a_query_is_filled_up_with_is_padding_to_transformers(
    make: Callable[..., Any], name: str, deterministic: bool
) -> None:
    """Whose rows are computed too: they see the others, and none sees them."""
    case = make(name)
    encoder, batch, seen = case.load(deterministic=deterministic), case.batch[1:], (4, 290, 7, 9, 3)
    lengths = tuple(map(len, batch))
    flat = torch.tensor([token for tokens in batch for token in tokens])
    positions = [p for tokens in batch for p in encoder.spec.position_ids(tokens)]
    ragged = Ragged(lengths, seen=seen)
    hidden = encoder(flat, torch.tensor(positions), None, ragged).split(lengths)
    for tokens, count, got in zip(batch, seen, hidden, strict=True):
        mask = torch.tensor([[1] * count + [0] * (len(tokens) - count)])
        with torch.no_grad():
            told = case.model(input_ids=torch.tensor([tokens]), attention_mask=mask)
        close(got, told.last_hidden_state[0])


@pytest.mark.parametrize("name", ["bert", "bert-of-another-activation", "nomic"])
def test_token_types_tell_two_texts_apart(make: Callable[..., Any], name: str) -> None:
    case = make(name)
    batch = case.batch
    types = [[int(i > len(tokens) // 3) for i in range(len(tokens))] for tokens in batch]
    encoder = case.load()
    for tokens, kinds, got, plain in zip(
        batch, types, case.run(encoder, batch, types), case.run(encoder, batch), strict=True
    ):
        close(got, case.theirs(tokens, kinds))
        assert len(tokens) == 1 or not torch.allclose(got, plain, atol=1e-3)


def test_a_padding_token_within_a_text_takes_no_position(make: Callable[..., Any]) -> None:
    case = make("xlm-roberta")
    tokens = [9, 3, 11, 3, 3, 40]  # 3 is its padding
    close(case.run(case.load(), [tokens])[0], case.theirs(tokens))


def test_a_window_reaches_half_of_local_attention_to_both_sides(make: Callable[..., Any]) -> None:
    case = make("modernbert", num_hidden_layers=2, layer_types=["sliding_attention"] * 2)
    encoder, tokens = case.load(), case.batch[2]
    assert encoder.spec.windows == (5, 5)
    other = list(tokens)
    other[150] = 4 if tokens[150] != 4 else 5
    moved = (case.run(encoder, [tokens])[0] - case.run(encoder, [other])[0]).abs().amax(-1) > 0
    assert moved.nonzero().flatten().tolist() == list(range(140, 161))


@pytest.mark.parametrize(
    ("name", "ending"),
    [
        ("bert", "ForMaskedLM"),
        ("roberta", "ForMaskedLM"),
        ("modernbert", "ForMaskedLM"),
        ("nomic", "ForMaskedLM"),
        ("bert", "ForSequenceClassification"),
        ("modernbert-biased", "ForSequenceClassification"),
    ],
)
def test_the_encoder_of_a_model_for_other_work_is_the_same(
    make: Callable[..., Any], name: str, ending: str
) -> None:
    case = make(name, ending)
    tokens = case.batch[4]
    with torch.no_grad():
        theirs = case.model.base_model(input_ids=torch.tensor([tokens])).last_hidden_state[0]
    close(case.run(case.load(), [tokens])[0], theirs)


def renamed(case: Any, folder: Path, names: Callable[[str], str], **config: Any) -> Any:
    """The same model with other tensor names and other fields; None takes a field away."""
    shutil.copytree(case.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({names(name): value for name, value in tensors.items()}, folder / "model.safetensors")
    values = json.loads((folder / "config.json").read_text()) | config
    values = {name: value for name, value in values.items() if value is not None}
    (folder / "config.json").write_text(json.dumps(values))
    return type(case)(case.name, folder, case.model)


def test_names_of_old_checkpoints_are_read(make: Callable[..., Any], tmp_path: Path) -> None:
    case = make("bert")

    def old(name: str) -> str:
        name = f"bert.{name}"
        if "LayerNorm" in name:
            return name.replace(".weight", ".gamma").replace(".bias", ".beta")
        return name

    again = renamed(case, tmp_path / "old", old, position_embedding_type="absolute")
    assert torch.equal(again.run(again.load(), case.batch)[1], case.run(case.load(), case.batch)[1])


def test_modernbert_in_the_old_dialect_is_the_same(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    case = make("modernbert")
    old = {
        "layer_types": None,
        "rope_parameters": None,
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "position_embedding_type": "absolute",
        "reference_compile": False,
    }
    again = renamed(case, tmp_path / "old", lambda name: f"model.{name}", **old)
    assert again.load().spec == case.load().spec
    assert torch.equal(again.run(again.load(), case.batch)[2], case.run(case.load(), case.batch)[2])


#: NomicBERT's first config.json, in what concerns the forward pass.
FIRST_NOMIC = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "auto_map": {"AutoModel": "modeling_hf_nomic_bert.NomicBertModel"},
    "activation_function": "swiglu",
    "causal": False,
    "layer_norm_epsilon": 1e-12,
    "max_trained_positions": 300,
    "mlp_fc1_bias": False,
    "n_embd": 48,
    "n_head": 4,
    "n_inner": 88,
    "n_layer": 4,
    "n_positions": 1200,
    "prenorm": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_scaling_factor": None,
    "type_vocab_size": 2,
    "use_flash_attn": True,
    "vocab_size": 97,
}


def test_nomic_in_its_first_dialect_is_the_same(make: Callable[..., Any], tmp_path: Path) -> None:
    case = make("nomic")
    again = renamed(case, tmp_path / "first", lambda name: name)
    (again.folder / "config.json").write_text(json.dumps(FIRST_NOMIC))
    assert again.load().spec == case.load().spec
    assert torch.equal(again.run(again.load(), case.batch)[2], case.run(case.load(), case.batch)[2])
    (again.folder / "config.json").write_text(json.dumps(FIRST_NOMIC | {"prenorm": True}))
    with pytest.raises(ModelUnsupported, match="prenorm"):
        again.load()


def test_nomic_with_modules_of_their_own_is_the_same(
    make: Callable[..., Any], tmp_path: Path
) -> None:
    """transformers' names, of which its own files have the first ones."""
    case = make("nomic")
    folder = tmp_path / "apart"
    shutil.copytree(case.folder, folder)
    tensors = {name: value.contiguous() for name, value in case.model.state_dict().items()}
    save_file({n: v for n, v in tensors.items() if "_ids" not in n}, folder / "model.safetensors")
    again = type(case)(case.name, folder, case.model)
    assert torch.equal(again.run(again.load(), case.batch)[1], case.run(case.load(), case.batch)[1])
