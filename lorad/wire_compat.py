"""vLLM's bodies for adapters at run time, as msgspec Structs: what routers and operators of its
fleets send.

Goes in: JSON of `POST /v1/load_lora_adapter` and `/v1/unload_lora_adapter`.  Their answers are
lines of text, as vLLM's are.  Keys that mean something to vLLM alone (`lora_int_id`,
`base_model_name`) are ignored.
"""

from msgspec import Struct


class LoadAdapter(Struct, frozen=True, kw_only=True):
    """`lora_path`: a folder on the daemon's machine, in the inbox or in `[lora] allowed_roots`;
    `load_inplace`: it may replace what the name means now."""

    lora_name: str
    lora_path: str
    load_inplace: bool = False


class UnloadAdapter(Struct, frozen=True, kw_only=True):
    """The name is taken away; its requests in flight end on what they have."""

    lora_name: str
