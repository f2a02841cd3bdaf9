"""Room behind a model's weights for prompts' adapters: how much, and that it changes no weight."""

from collections.abc import Callable
from pathlib import Path

import torch
from msgspec.structs import replace

from engine import guests
from engine.config import EngineConfig
from engine.layout import room_of
from engine.measuring import weight_bytes
from engine.models.decoder import Decoder, Layer
from engine.models.layers import Build
from engine.models.spec import read_spec

Folder = Callable[..., Path]
CARD = EngineConfig(
    model="m", device="cuda", dtype="bfloat16", max_rank=64, slots=8, max_batch_tokens=2048
)


def test_the_room_is_as_wide_as_a_fiftieth_of_what_the_weights_leave(folder: Folder) -> None:
    spec = read_spec(folder())
    weights = guests.weight_bytes(spec)
    for columns in (64, 32, 16):
        card = weights + 50 * guests.bytes_of(spec, columns)
        assert guests.room_for(CARD, spec, card) == columns
        assert guests.room_for(CARD, spec, card - 50) < columns
    assert guests.room_for(CARD, spec, weights // 2) == 0


def test_rows_of_weights_begin_at_128_bytes_with_any_room() -> None:
    rooms = [room_of(columns, modules) for columns in (16, 32, 64) for modules in (1, 2, 3)]
    assert rooms == [64, 64, 64, 64, 64, 128, 64, 128, 192]
    assert room_of(0, 3) == 0


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
