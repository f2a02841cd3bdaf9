"""A real daemon in a private directory, a tiny random Llama, and adapters made of numpy."""

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx
import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from lorad import wire
from lorad.client import ApiError, LoradClient, Unreachable
from lorad.registry.registry import Registry

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, VOCAB = 64, 128, 4, 2, 16, 2, 260
DIMS = {
    "self_attn.q_proj": (HIDDEN, HEADS * HEAD_DIM),
    "self_attn.k_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.v_proj": (HIDDEN, KV_HEADS * HEAD_DIM),
    "self_attn.o_proj": (HEADS * HEAD_DIM, HIDDEN),
    "mlp.gate_proj": (HIDDEN, FFN),
    "mlp.up_proj": (HIDDEN, FFN),
    "mlp.down_proj": (FFN, HIDDEN),
}
#: Three whole blocks and a little: enough for a stale prefix to be found, were there one.
PROMPT = "Once upon a time, in a machine that was far too small,"
#: What nothing here ever takes.
PATIENCE = 180.0


def until(condition, what, patience=PATIENCE, every=0.02):
    """Poll until `condition()` is true; returns its value."""
    deadline = time.monotonic() + patience
    pause = threading.Event()
    while not (value := condition()):
        if time.monotonic() > deadline:
            pytest.fail(f"timed out waiting for {what() if callable(what) else what}")
        pause.wait(every)
    return value


@functools.cache
def empty_registry():
    """What the first start makes of nothing."""
    with tempfile.TemporaryDirectory() as folder:
        state = Path(folder)
        Registry.open(state).close()
        return (state / "registry.db").read_bytes()


@pytest.fixture(scope="session")
def base(tmp_path_factory):
    """A two-layer Llama with weights large enough for its greedy tokens to wander."""
    folder = tmp_path_factory.mktemp("base") / "tiny-llama"
    folder.mkdir()
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 256,
        "eos_token_id": 257,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(7)

    def weight(*shape):
        return (rng.standard_normal(shape) * 0.2).astype(np.float32)

    tensors = {
        "model.embed_tokens.weight": weight(VOCAB, HIDDEN),
        "lm_head.weight": weight(VOCAB, HIDDEN),
        "model.norm.weight": np.ones(HIDDEN, np.float32),
    }
    for layer in range(LAYERS):
        at = f"model.layers.{layer}"
        for module, (d_in, d_out) in DIMS.items():
            tensors[f"{at}.{module}.weight"] = weight(d_out, d_in)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = np.ones(HIDDEN, np.float32)
    save_file(tensors, folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: number for number, text in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"bos_token": "<s>", "eos_token": "</s>", "chat_template": template})
    )
    return folder


def write_adapter(folder, seed, rank=4, config=None, **options):
    """A PEFT folder of random pairs; `config` adds fields, `options` become its lorad.toml."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(seed)
    tensors = {}
    for layer in range(LAYERS):
        for module, (d_in, d_out) in DIMS.items():
            at = f"base_model.model.model.layers.{layer}.{module}"
            a, b = rng.standard_normal((rank, d_in)), rng.standard_normal((d_out, rank))
            tensors[f"{at}.lora_A.weight"] = (a * 0.3).astype(np.float32)
            tensors[f"{at}.lora_B.weight"] = (b * 0.3).astype(np.float32)
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2 * rank,
        "target_modules": sorted(module.partition(".")[2] for module in DIMS),
        "bias": "none",
    } | (config or {})
    (folder / "adapter_config.json").write_text(json.dumps(config))
    if options:
        lines = [f"{key} = {json.dumps(value)}" for key, value in options.items()]
        (folder / "lorad.toml").write_text("\n".join(lines))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


class Daemon:
    """One state directory; `start` and end it as often as wanted."""

    def __init__(self, root, base):
        self.root, self.base = root, base
        self.inbox = root / "state" / "inbox"
        self.log = root / "log"
        self.config = root / "lorad.toml"
        self.inference, self.admin = root / "run/inference.sock", root / "run/admin.sock"
        self.process = None
        self.configure()

    def configure(self, extra=""):
        self.config.write_text(
            f"""
[[models]]
base = "{self.base}"
name = "tiny"
device = "cpu"
cpu_pool = "32MiB"
max_model_len = 4096
max_batch_tokens = 256
threads = 1
deterministic = true

[lora]
slots = 8
ram_cache = "16MiB"

[watch]
settle = "100ms"

[shutdown]
drain_timeout = "20s"
{extra}"""
        )

    @property
    def env(self):
        places = {
            f"{kind}_DIRECTORY": str(self.root / name)
            for kind, name in (
                ("STATE", "state"),
                ("RUNTIME", "run"),
                ("CACHE", "cache"),
                ("CONFIGURATION", "etc"),
            )
        }
        clean = {k: v for k, v in os.environ.items() if not k.startswith("LORAD_")}
        return {**clean, **places, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}

    def command(self, *arguments):
        return [sys.executable, "-m", "lorad.cli.serve", "--config", str(self.config), *arguments]

    def start(self, ready=True):
        self.spare_migrations()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                self.command(), stdout=log, stderr=log, stdin=subprocess.DEVNULL, env=self.env
            )
        if ready:
            self.wait_ready()
        return self

    def spare_migrations(self):
        """They would take a tenth of every first start; other tests look at them."""
        state = self.root / "state"
        if not (state / "registry.db").exists():
            state.mkdir(mode=0o750, exist_ok=True)
            (state / "registry.db").write_bytes(empty_registry())

    def start_under_systemd(self, notify, inference, admin):
        """With both sockets passed in by name, as a .socket unit does, and notified at `notify`."""
        moved = (inference.fileno(), admin.fileno())
        script = f'export LISTEN_PID=$$; exec "$@" 3<&{moved[0]} 4<&{moved[1]}'
        env = {"LISTEN_FDS": "2", "LISTEN_FDNAMES": "inference:admin", "NOTIFY_SOCKET": notify}
        env |= {"WATCHDOG_USEC": "400000"}
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                ["bash", "-c", script, "lorad", *self.command()],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self.env | env,
                pass_fds=moved,
            )

    def wait_ready(self):
        until(self.is_ready, lambda: f"the daemon to be ready:\n{self.tail()}", every=0.05)

    def wait_engines(self):
        """Of a model with replicas one is enough to be ready: until all of them are."""

        def ready():
            with self.client() as client:
                models = client.status().models
            return all(one.state == "ready" for each in models for one in each.replicas)

        until(ready, lambda: f"every engine to be ready:\n{self.tail()}")

    def is_ready(self):
        assert self.process.poll() is None, self.tail()
        try:
            with self.client() as client:
                return client.ready() == ""
        except (Unreachable, ApiError):
            return False

    def refused(self, *arguments):
        """Run it to its end: (exit status, stderr)."""
        done = subprocess.run(
            self.command(*arguments), capture_output=True, text=True, env=self.env, timeout=PATIENCE
        )
        assert "Traceback" not in done.stderr, done.stderr
        return done.returncode, done.stderr

    def stop(self, number=signal.SIGTERM):
        """Signal it and return its exit status."""
        if self.process is None:
            return None
        if self.process.poll() is None:
            self.process.send_signal(number)
        return self.process.wait(PATIENCE)

    def kill(self):
        self.process.kill()
        self.process.wait(PATIENCE)

    def tail(self):
        return self.log.read_text(errors="replace")[-4000:]

    # ------------------------------------------------------------- what tests ask of it
    def client(self):
        return LoradClient(f"unix://{self.admin}")

    def drop(self, name, seed, **options):
        """Into the inbox in one move, replacing what is there."""
        fresh = write_adapter(self.root / f".in-{seed}", seed, **options)
        target = self.inbox / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.exists():
            aside = self.root / f".out-{time.monotonic_ns()}"
            target.rename(aside)
            shutil.rmtree(aside)
        fresh.rename(target)

    def upload(self, name, seed, **start):
        folder = write_adapter(self.root / f".up-{seed}-{name.replace('/', '-')}", seed)
        try:
            with self.client() as client:
                return client.upload(folder, wire.UploadStart(name=name, **start))
        finally:
            shutil.rmtree(folder)

    def adapter(self, name):
        """Its row, or None."""
        with self.client() as client:
            try:
                return client.adapter(name).adapter
            except ApiError as error:
                assert error.status == 404, error.message
                return None

    def wait_state(self, name, *states):
        def there():
            row = self.adapter(name)
            return row if row is not None and row.state in states else None

        return until(there, lambda: f"{name} to be {states}:\n{self.tail()}")

    def http(self, timeout=PATIENCE):
        transport = httpx.HTTPTransport(uds=str(self.inference), verify=False)
        return httpx.Client(transport=transport, base_url="http://lorad", timeout=timeout)

    def ask(self, model, max_tokens=16, **more):
        """A greedy completion: the HTTP response."""
        with self.http() as http:
            return http.post("/v1/completions", json=self.body(model, max_tokens, **more))

    def body(self, model, max_tokens, **more):
        """A greedy completion that does not stop by itself."""
        return {
            "model": model,
            "prompt": PROMPT,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            **more,
        }

    def text(self, model, max_tokens=16):
        answer = self.ask(model, max_tokens)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["text"]

    def events(self):
        with self.client() as client:
            return client.recent_events(limit=1000).items


@pytest.fixture(scope="module")
def make_daemon(base):
    """make_daemon() in a directory with a short path, whose fsync costs nothing where possible."""
    shm = Path("/dev/shm")
    made = []

    def make():
        root = Path(tempfile.mkdtemp(prefix="lorad-", dir=shm if shm.is_dir() else None))
        made.append(Daemon(root, base))
        return made[-1]

    yield make
    for daemon in made:
        if daemon.process is not None and daemon.process.poll() is None:
            daemon.kill()
        shutil.rmtree(daemon.root, ignore_errors=True)


@pytest.fixture
def poll():
    return until


@pytest.fixture(scope="session")
def make_adapter():
    """make_adapter(folder, seed): the files of an adapter."""
    return write_adapter
