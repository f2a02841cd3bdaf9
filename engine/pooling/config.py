"""PoolingConfig: every setting of one pooling engine; and what becomes of it.  Torch-free."""

from typing import Literal

from msgspec import Struct

from engine.config import MIB, Device, DTypeName, EvictionPolicy, VerifyOnLoad
from engine.errors import ConfigError
from engine.messages import Purpose
from engine.pooling.spec import PoolingKind
from engine.pooling_messages import PoolingInfo

__all__ = ["PoolingConfig", "PoolingInfo", "Switch"]

Switch = Literal["auto", "on", "off"]


class PoolingConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of one pooling engine.  Zero means `auto` for sizes.  Raises ConfigError."""

    model: str  # folder with config.json or modules.json, *.safetensors
    device: Device = "auto"
    dtype: DTypeName = "auto"  # auto: fp32 on CPU, the checkpoint's own on CUDA
    max_length: int = 0  # tokens of an input; 0 = as the model's files say
    truncate: bool = False  # longer inputs are cut, unless a request says otherwise
    pooling: Literal["", PoolingKind] = ""  # in place of what the model's files say
    #: Ids of the words that a decoder scores by, in place of what its files say.
    score_tokens: tuple[int, ...] = ()
    prefix_cache: Switch = "auto"  # "on" is refused where it is not served, with the reason
    chunked_prefill: Switch = "auto"
    generates_too: bool = False  # its inputs share steps with those who wait for a token
    max_batch_tokens: int = 0  # rows a step, but for a longer input alone; 0 = by the device
    max_num_seqs: int = 256  # inputs a step
    graph_tokens: int = 512  # rows of an encoder's largest step that replays a graph; 0 = none does
    adapter_pool: int = 256 * MIB  # bytes of adapters on the device
    slots: int = 256
    max_rank: int = 512
    ram_cache: int = 256 * MIB  # bytes of packed adapters in host memory
    eviction: EvictionPolicy = "cost"
    starve_after: float = 2.0  # seconds
    thrash_window: float = 60.0  # seconds
    load_bytes_in_flight: int = 256 * MIB
    verify_on_load: VerifyOnLoad = "off"
    deterministic: bool = False
    threads: int = 0  # CPU threads for torch; 0 = its default

    @property
    def purpose(self) -> Purpose:
        """What its base is for."""
        return "both" if self.generates_too else "pool"

    def __post_init__(self) -> None:
        def need(ok: bool, name: str, rule: str) -> None:
            if not ok:
                raise ConfigError(f"{name} = {getattr(self, name)!r}: must be {rule}")

        need(bool(self.model), "model", "a folder")
        need(self.max_length >= 0, "max_length", "0 (the model's) or more")
        ids = all(token >= 0 for token in self.score_tokens) and len(self.score_tokens) <= 2
        need(ids, "score_tokens", "a token id, or two: for a text and against it")
        need(self.max_batch_tokens >= 0, "max_batch_tokens", "0 (auto) or more")
        need(self.max_num_seqs >= 1, "max_num_seqs", "1 or more")
        need(0 <= self.graph_tokens <= 1024, "graph_tokens", "0 (no graphs) to 1024")
        need(self.adapter_pool >= MIB, "adapter_pool", "1 MiB or more")
        need(1 <= self.slots <= 65536, "slots", "1 to 65536")
        need(1 <= self.max_rank <= 4096, "max_rank", "1 to 4096")
        need(self.ram_cache >= 0, "ram_cache", "0 or more bytes")
        need(self.starve_after > 0, "starve_after", "above 0 seconds")
        need(self.thrash_window >= 0, "thrash_window", "0 or more seconds")
        need(self.load_bytes_in_flight > 0, "load_bytes_in_flight", "above 0 bytes")
        need(self.threads >= 0, "threads", "0 (auto) or more")
