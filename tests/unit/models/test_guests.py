"""Room behind a model's weights for prompts' adapters: how much, and that it changes no weight."""

from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from engine import guests
from engine.config import EngineConfig
from engine.measuring import weight_bytes
from engine.models.decoder import Decoder, Layer
from engine.models.layers import Build
from engine.models.spec import read_spec

Folder = Callable[..., Path]
CARD = EngineConfig(
    model="m", device="cuda", dtype="bfloat16", max_rank=64, slots=8, max_batch_tokens=2048
)


def test_the_room_is_as_wide_as_a_hundredth_of_the_card_allows(folder: Folder) -> None:
    spec = read_spec(folder())
    for columns in (64, 32, 16):
        need = guests.bytes_of(spec, columns)
        assert guests.room_for(CARD, spec, 100 * need) == columns
        assert guests.room_for(CARD, spec, 100 * need - 100) < columns


def test_there_is_none_where_no_step_has_guests(folder: Folder) -> None:
    spec = read_spec(folder())
    assert guests.room_for(CARD, spec, 1 << 40) == 64
    for without in (
        {"device": "cpu"},
        {"dtype": "float16"},
        {"dtype": "float32"},
        {"deterministic": True},
        {"max_batch_tokens": 1024},
    ):
        assert guests.room_for(replace(CARD, **without), spec, 1 << 40) == 0


def test_weights_with_room_have_the_same_places_and_count_all_of_their_bytes(
    folder: Folder,
) -> None:
    spec, device = read_spec(folder()), torch.device("cpu")
    bare, roomy = (
        Decoder(spec, Build(device, torch.bfloat16, False, room=room)) for room in (0, 32)
    )
    assert weight_bytes(roomy) - weight_bytes(bare) == guests.bytes_of(spec, 32)
    for name, place in roomy.places().items():
        assert place.shape == bare.places()[name].shape
    layer = roomy.layers[0]
    assert isinstance(layer, Layer)
    layer.down.roomy.fill_(7.0)
    roomy.places()["layers.0.mlp.down_proj.weight"].fill_(2.0)
    assert (layer.down.weight == 2.0).all()
    assert (layer.down.roomy[:, layer.down.weight.shape[1] :] == 7.0).all()
