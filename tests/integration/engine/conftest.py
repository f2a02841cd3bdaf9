"""A two-layer Llama with random weights, random packed adapters, and a way to drive a core."""

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.core import EngineCore
from engine.layout import MODULES, RowRun, place, stream_id, stream_order
from engine.messages import (
    AdapterEvent,
    AddRevision,
    Answer,
    Command,
    PackedManifest,
    PackedModule,
    SamplingParams,
    SequenceDelta,
    StepFrame,
    Submit,
    TokenLogprobs,
)
from engine.models.base_files import base_id
from engine.models.spec import read_spec
from engine.status_messages import RevisionStatus

BLOCK_SIZE = 16
DEADLINE = 180.0  # seconds: what no test ever needs, on the interpreter and busy cores either

WEIGHT_NAMES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "o_proj"), "self_attn"),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), "mlp"),
}


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama whose weights are large enough for its greedy tokens to wander."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(7)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        initializer_range=0.2,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)
    return folder


@pytest.fixture(scope="session")
def worded_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same model with a tokenizer of 256 ids: three specials, every byte that UTF-8 has, and a
    few longer words."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("worded-llama")
    for file in model_dir.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    absent = {chr(byte) for byte in (0xC0, 0xC1, *range(0xF5, 0x100))}  # written as themselves
    letters = sorted(set(alphabet) - absent)
    merges = [("{", '"'), ('"', ":"), ('":', "Ġ"), ("t", "r"), ("tr", "u"), ("l", "s"), ("}", "}")]
    words = ["<unk>", "<s>", "</s>", *letters, *(a + b for a, b in merges)]
    vocab = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@dataclass(frozen=True)
class Adapter:
    """A packed adapter and the matrices that went into it."""

    manifest: PackedManifest
    tensors: Mapping[tuple[int, str], tuple[torch.Tensor, torch.Tensor]]  # (r, d_in), (d_out, r)

    @property
    def rev(self) -> str:
        return self.manifest.rev


MakeAdapter = Callable[..., Adapter]


@pytest.fixture(scope="session")
def make_adapter(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> MakeAdapter:
    """make_adapter("name", rank=4, modules=(...), layers=(...), seed=1) writes a packed file."""
    base = read_spec(model_dir)
    folder = tmp_path_factory.mktemp("packed")

    def make(
        name: str,
        *,
        rank: int = 4,
        modules: Sequence[str] = MODULES,
        layers: Sequence[int] = (0, 1),
        ends: Sequence[str] = (),
        rows: Mapping[str, tuple[int, ...]] = MappingProxyType({}),
        seed: int = 0,
        strength: float = 0.4,
        draft_bytes: int = 0,
        extra_vocab: int = 0,
        num_tokens: int = 0,
        tokenizer: str = "",
    ) -> Adapter:
        spec = dataclasses.replace(base, extra_vocab=extra_vocab)
        layout = spec.block_layout(block_size=BLOCK_SIZE, dtype="float32", draft_bytes=draft_bytes)
        generator = torch.Generator().manual_seed(seed)
        tensors = {}
        where = [(layer, module) for layer in layers for module in modules]
        for layer, module in where + [(spec.num_layers, module) for module in ends]:
            d_in, d_out = spec.shapes.of(module)
            a = torch.randn(rank, d_in, generator=generator) * strength
            b = torch.randn(d_out, rank, generator=generator) * strength
            tensors[layer, module] = (a, b)
        pairs = [PackedModule(la, mo, rank, 2.0 / rank) for la, mo in tensors]
        for end, ids in rows.items():  # () = a row for every token
            count = len(ids) or max(spec.vocab_size, num_tokens)
            own = torch.randn(count, spec.hidden_size, generator=generator) * strength
            module = PackedModule(spec.num_layers, f"{end}.rows", count, 1.0, tokens=ids)
            tensors[module.layer, module.module] = (own, torch.empty(0, 0))
            pairs.append(module)
        packed = stream_order(pairs)
        placement = place(packed, layout)
        stream = torch.zeros(placement.num_blocks, layout.block_bytes, dtype=torch.uint8)
        for m in placement.modules:
            a, b = tensors[m.layer, m.module]
            _write(stream, m.a, a)
            _write(stream, m.b, b.T.contiguous())
        rev = (name.encode().hex() + "0" * 64)[:64]
        path = folder / f"{rev}-{layout.id}.bin"
        path.write_bytes(stream.numpy().tobytes())
        manifest = PackedManifest(
            rev=rev,
            path=str(path),
            layout=stream_id(layout.id, base_id(model_dir), packed),
            num_blocks=placement.num_blocks,
            true_bytes=placement.true_bytes,
            max_rank=rank,
            changes_kv=True,
            modules=packed,
            num_tokens=num_tokens,
            tokenizer=tokenizer,
        )
        return Adapter(manifest, tensors)

    return make


def _write(stream: torch.Tensor, run: RowRun, rows: torch.Tensor) -> None:
    assert run.folds == 1
    for piece in run.pieces:
        for j in range(piece.rows):
            raw = rows[piece.first + j].contiguous().view(torch.uint8)
            start = piece.offset + j * run.stride
            stream[piece.block, start : start + raw.numel()] = raw


@pytest.fixture(scope="session")
def adapters(make_adapter: MakeAdapter) -> list[Adapter]:
    """Four that differ in rank, modules and layers."""
    return _four(make_adapter)


@pytest.fixture(scope="session")
def adapters_beside(make_adapter: MakeAdapter) -> Callable[[int], list[Adapter]]:
    """The same four for blocks of which so many bytes are a draft model's."""
    return lambda draft_bytes: _four(make_adapter, draft_bytes=draft_bytes)


def _four(make: MakeAdapter, **more: int) -> list[Adapter]:
    return [
        make("all", rank=4, seed=1, **more),
        make("attention", rank=8, modules=("q_proj", "k_proj", "v_proj", "o_proj"), seed=2, **more),
        make("mlp", rank=2, modules=("gate_proj", "up_proj", "down_proj"), seed=3, **more),
        make("late", rank=5, layers=(1,), seed=4, **more),
    ]


@pytest.fixture(scope="session")
def merge(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[Adapter], Path]:
    """A copy of the model whose weights are W + scaling * B A."""

    def merged(adapter: Adapter) -> Path:
        folder = tmp_path_factory.mktemp("merged")
        for file in model_dir.iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
        weights = load_file(folder / "model.safetensors")
        scaling = {(m.layer, m.module): m.scaling for m in adapter.manifest.modules}
        for (layer, module), (a, b) in adapter.tensors.items():
            name = f"model.layers.{layer}.{WEIGHT_NAMES[module]}.{module}.weight"
            weights[name] += scaling[layer, module] * (b @ a)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        return folder

    return merged


@dataclass
class Story:
    """All that a core said about one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: tuple[TokenLogprobs | None, ...] = ()
    cached: int | None = None
    finish: str | None = None
    code: str = ""
    message: str = ""
    steps: list[int] = field(default_factory=list)  # in which step each token came

    def add(self, delta: SequenceDelta, step: int) -> None:
        assert self.finish is None, "a delta after the last one"
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs
        self.prompt_logprobs = delta.prompt_logprobs or self.prompt_logprobs
        self.cached = delta.cached_tokens if self.cached is None else self.cached
        self.finish, self.code = delta.finish_reason, delta.code
        self.message = delta.message
        self.steps += [step] * len(delta.tokens)


class Driver:
    """Steps one core and sorts what it says."""

    def __init__(self, core: EngineCore) -> None:
        self.core = core
        self.stories: dict[str, Story] = {}
        self.answers: dict[int, Answer] = {}
        self.events: list[AdapterEvent] = []
        self._ids = iter(range(1, 1 << 30))

    def submit(
        self,
        request_id: str,
        prompt: Sequence[int],
        rev: str | None = None,
        **sampling: object,
    ) -> Story:
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 12, **sampling})
        return self.follow(
            Submit(request_id=request_id, prompt=list(prompt), sampling=params, rev=rev)
        )

    def follow(self, submit: Submit) -> Story:
        """Send it; what is said about it from now on."""
        self.core.take(submit)
        return self.stories.setdefault(submit.request_id, Story())

    def step(self) -> StepFrame:
        frame = self.core.step()
        for delta in frame.deltas:
            self.stories.setdefault(delta.request_id, Story()).add(delta, frame.step)
        self.answers |= {answer.command_id: answer for answer in frame.answers}
        self.events += frame.adapters
        return frame

    def until(self, done: Callable[[], bool]) -> None:
        limit = time.monotonic() + DEADLINE
        while not done():
            assert time.monotonic() < limit, "the engine did not get there"
            self.step()

    def finish(self) -> None:
        """Step until every request has had its last delta."""
        self.until(lambda: all(story.finish for story in self.stories.values()))

    def call(self, make: Callable[[int], Command]) -> Answer:
        """Carry out a command that is answered; `make` gets its id."""
        command_id = next(self._ids)
        self.core.take(make(command_id))
        self.until(lambda: command_id in self.answers)
        return self.answers[command_id]

    def status(self, rev: str) -> RevisionStatus:
        return next(r for r in self.core.snapshot().revisions if r.rev == rev)

    def add(self, *adapters: Adapter, pinned: bool = False) -> None:
        for adapter in adapters:
            answer = self.call(
                lambda i, a=adapter: AddRevision(command_id=i, manifest=a.manifest, pinned=pinned)
            )
            assert answer.code == "", answer.message


StartCore = Callable[..., Driver]


@pytest.fixture
def start_core(model_dir: Path) -> Iterator[StartCore]:
    """start_core(num_blocks=40, ...) builds a core on the tiny model; all are closed at the end."""
    cores = []

    def start(model: Path = model_dir, lookahead: bool | None = None, **settings: object) -> Driver:
        config = EngineConfig(
            **{
                "model": str(model),
                "device": "cpu",
                "block_size": BLOCK_SIZE,
                "num_blocks": 512,
                "max_num_seqs": 8,
                "slots": 16,
                "ram_cache": 1 << 20,
                "deterministic": True,
                **settings,
            }
        )
        core = EngineCore(config, lookahead=lookahead)
        cores.append(core)
        return Driver(core)

    yield start
    for core in cores:
        core.close()


@pytest.fixture
def on_card_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cores that are started from now on take a card's way; the file has asked for the interpreter
    ahead of its imports."""
    from tests.fakes import card_path

    card_path.take(monkeypatch)


@pytest.fixture(scope="session")
def prompt() -> Callable[..., list[int]]:
    """prompt(length, seed) is a list of ids that never holds an end token."""

    def make(length: int, seed: int = 0) -> list[int]:
        generator = torch.Generator().manual_seed(1000 + seed)
        return torch.randint(3, 256, (length,), generator=generator).tolist()

    return make
