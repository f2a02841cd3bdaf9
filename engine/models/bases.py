"""The two kinds of bases that adapters are for, told apart by config.json.  Torch-free.

Goes in: a Hugging Face folder.  Comes out: a ModelSpec or an EncoderSpec, and what its tensors are
called in the engine.
"""

from collections.abc import Callable
from pathlib import Path

from engine.messages import Purpose
from engine.models.encoder_families import is_encoder
from engine.models.encoder_spec import EncoderSpec, read_encoder_spec
from engine.models.hf_config import read_json, text_name
from engine.models.spec import ModelSpec, read_spec

BaseSpec = ModelSpec | EncoderSpec


def read_base(folder: Path, purpose: Purpose = "generate", *, extra_vocab: int = 0) -> BaseSpec:
    """What is in `folder`, and is to be used for `purpose`; encoders always pool.  `extra_vocab`:
    token ids behind the base's that adapters may bring, of a base that generates.
    Raises as `read_spec` and `read_encoder_spec` do."""
    if is_encoder(read_json(folder / "config.json", required=True)):
        return read_encoder_spec(folder)
    pools, generates = purpose != "generate", purpose != "pool"
    return read_spec(folder, pools=pools, generates=generates, extra_vocab=extra_vocab)


def namer(spec: BaseSpec) -> Callable[[str], str]:
    """Published tensor name -> what the engine calls it."""
    return spec.engine_name if isinstance(spec, EncoderSpec) else text_name
