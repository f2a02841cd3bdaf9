"""What a start would refuse is found beforehand, with the exit status that it would end with."""

import socket

import msgspec
import pytest

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.fit import check_fit, check_floors
from lorad import checks
from lorad.config import Settings
from lorad.config_sections import Admin, Inference, Lora, Metrics, Model, Tcp, Watch
from lorad.config_sections import RegistrySection as Registry
from lorad.config_sections import StoreSection as Store
from lorad.errors import BadConfig, CannotBind, RegistryUnusable, StartError


class Spec:
    """Of a model, as far as memory is concerned: one block is 1 KiB."""

    max_position = default_length = 256
    shapes = type("Shapes", (), {"dims": ((8, 8),), "num_layers": 1})

    def block_layout(self, *, block_size, dtype):
        fields = {"block_bytes": 1024, "shapes": self.shapes, "itemsize": 4, "shards": 1}
        return type("Layout", (), fields)


@pytest.fixture
def fine(tmp_path, monkeypatch):
    """fine(**sections): settings that a start takes, but for these sections."""
    monkeypatch.setattr(checks, "check_files", lambda settings: None)
    monkeypatch.setattr(checks, "spec_of", lambda settings, index: Spec())
    usual = {
        "models": (Model(base="/models/tiny", name="tiny", device="cpu"),),
        "watch": Watch(dir=str(tmp_path / "state/inbox")),
        "inference": Inference(socket=str(tmp_path / "run/inference.sock")),
        "admin": Admin(socket=str(tmp_path / "run/admin.sock")),
        "registry": Registry(dir=str(tmp_path / "state")),
        "store": Store(dir=str(tmp_path / "state/store")),
    }
    return lambda **sections: Settings(**usual | sections)


def test_what_a_start_takes_is_not_refused_and_nothing_is_made(fine, tmp_path):
    checks.check_start(fine())
    assert list(tmp_path.iterdir()) == []


def test_it_may_be_asked_beside_a_daemon_that_runs(fine, tmp_path):
    (tmp_path / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as live, socket.socket() as tcp:
        live.bind(str(tmp_path / "run/admin.sock"))
        live.listen()
        tcp.bind(("127.0.0.1", 0))
        tcp.listen()
        metrics = Metrics(tcp=f"127.0.0.1:{tcp.getsockname()[1]}")
        checks.check_start(fine(metrics=metrics))


@pytest.mark.parametrize(
    ("sections", "error", "words"),
    [
        ({"inference": Inference(socket="{}/" + "x" * 110)}, CannotBind, "107 are possible"),
        ({"admin": Admin(socket="{}/file")}, CannotBind, "is not a socket"),
        ({"admin": Admin(socket="{}/file/a.sock")}, CannotBind, "file is not a directory"),
        ({"admin": Admin(socket="{}/a", group="no-such")}, CannotBind, "no group no-such"),
        ({"metrics": Metrics(tcp="192.0.2.1:0")}, CannotBind, r"192\.0\.2\.1:0"),
        ({"tcp": Tcp(enabled=True, bind="192.0.2.1:0")}, CannotBind, r"192\.0\.2\.1:0"),
        ({"registry": Registry(dir="{}/file")}, RegistryUnusable, "registry.dir"),
        ({"store": Store(dir="{}/file/store")}, RegistryUnusable, "store.dir"),
        ({"watch": Watch(dir="{}/file")}, BadConfig, "watch.dir"),
        ({"lora": Lora(adapter_floor=1 << 40)}, BadConfig, "lora.adapter_floor"),
        ({"tcp": Tcp(enabled=True, api_keys_file="{}/none")}, BadConfig, "tcp.api_keys_file"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_is_refused_as_a_start_refuses_it(fine, tmp_path, sections, error, words):
    (tmp_path / "file").write_text("")
    placed = msgspec.json.decode(msgspec.json.encode(sections).replace(b"{}", bytes(tmp_path)))
    given = {name: msgspec.convert(placed[name], type(value)) for name, value in sections.items()}
    with pytest.raises(StartError, match=words) as refused:
        checks.check_start(fine(**given))
    assert type(refused.value) is error


def test_arenas_of_replicas_on_the_cpu_have_to_fit_together(fine):
    most = checks.psutil.virtual_memory().total
    model = Model(base="/models/tiny", name="tiny", device="cpu", cpu_pool=most // 2 + 1)
    checks.check_start(fine(models=(model,)))
    with pytest.raises(BadConfig, match="for 2 engines, and the machine has"):
        checks.check_start(fine(models=(msgspec.structs.replace(model, replicas=2),)))


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"max_model_len": 257}, "above the model's 256 positions"),
        ({"max_model_len": 200, "device": "cpu", "num_blocks": 4}, "the arena's 64 tokens"),
        ({"max_model_len": 200, "num_blocks": 4}, "the arena's 64 tokens"),
        ({"num_blocks": 2}, "the arena would hold 2 blocks"),
        ({"device": "cpu", "num_blocks": 9, "adapter_floor": 8 << 10}, "adapter_floor = 8192"),
        ({"device": "cpu", "num_blocks": 9, "kv_floor": 9217}, "kv_floor = 9217"),
        (
            {"device": "cpu", "num_blocks": 9, "kv_floor": 4097, "adapter_floor": 5 << 10},
            "adapter_floor = 5120: kv_floor and adapter_floor are 5 and 5 blocks, and the arena",
        ),
    ],
)
def test_what_does_not_fit_the_model_or_the_arena_is_refused(asked, words):
    with pytest.raises(ConfigError, match=words):
        check_fit(EngineConfig(model="m", **asked), Spec())


@pytest.mark.parametrize(
    "asked",
    [
        {"max_model_len": 256},
        {"max_model_len": 256, "device": "cuda"},  # how much a card holds, nobody knows yet
        {"adapter_floor": 1 << 40, "device": "cuda"},
        {"device": "cpu", "num_blocks": 9, "kv_floor": 4 << 10, "adapter_floor": 5 << 10},
    ],
)
def test_what_fits_or_cannot_be_known_yet_is_not_refused(asked):
    check_fit(EngineConfig(model="m", **asked), Spec())


def test_floors_are_held_against_the_arena_that_there_is():
    layout = Spec().block_layout(block_size=16, dtype="float32")
    config = EngineConfig(model="m", num_blocks=100, adapter_floor=99 << 10)
    with pytest.raises(ConfigError, match="the arena has 100"):
        check_floors(config, layout)
