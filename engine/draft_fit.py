"""What a model that drafts has to be: of the served one's vocabulary, no larger, as long.

Goes in: an EngineConfig and the served model's spec.  Comes out: the draft model's spec, or
ConfigError in one line.  Torch-free: a start asks it, and whoever wants to know beforehand.
"""

import json
from pathlib import Path

from engine.config import EngineConfig
from engine.errors import ConfigError, ModelUnsupported
from engine.models.spec import ModelSpec, read_spec, tokenizer_size

#: A guess costs that share of a step which the draft's weights are of the served model's.  Right 7
#: times of 10, as every draft is taken to be at first (`speculation.py`), it is worth none above.
MOST_SHARE = 0.4


def read_draft(config: EngineConfig, spec: ModelSpec) -> ModelSpec | None:
    """The spec of `config.draft_model`; None where no model drafts.

    Raises ConfigError for one that cannot draft for the served model, of `spec`.
    """
    if not config.draft_model:
        return None
    folder = Path(config.draft_model)
    try:
        draft = read_spec(folder)
    except (ConfigError, ModelUnsupported) as error:
        raise _refusal(config, error.message, error.hint) from error
    own, other = num_weights(draft), num_weights(spec)
    if own > other:
        size = f"it has {own:,} weights and the model that it drafts for {other:,}"
        raise _refusal(config, size, "name a smaller model; it pays from about a tenth down")
    wrong = _other_vocabulary(folder, draft, Path(config.model), spec)
    if wrong:
        hint = "a draft is token ids: name a model that shares the tokenizer"
        raise _refusal(config, f"another vocabulary: {wrong}", hint)
    return draft


def doubt(draft: ModelSpec, spec: ModelSpec) -> str:
    """Why a model that may draft for the served one, of `spec`, will hardly be asked; "" if it will
    be."""
    own, other = num_weights(draft), num_weights(spec)
    if own <= MOST_SHARE * other:
        return ""
    return (
        f"{own / 1e6:,.1f} M weights, {own / other:.0%} of the {other / 1e6:,.1f} M that it drafts "
        "for: a guess of it costs more than it saves, and hardly any is asked for; a tenth pays"
    )


def check_reach(config: EngineConfig, draft: ModelSpec | None) -> None:
    """Raises ConfigError for sequences, `max_model_len` long, that outgrow `draft`."""
    if draft is None or config.max_model_len <= draft.default_length:
        return
    length, longest = config.max_model_len, draft.default_length
    text = f"it reaches {longest} tokens, and sequences may have {length}"
    raise _refusal(config, text, f"set max_model_len = {longest}, or name another draft_model")


def draft_block_bytes(config: EngineConfig, draft: ModelSpec | None) -> int:
    """Its share of a block; `dtype` is known."""
    return 0 if draft is None else draft.kv_block_bytes(config.block_size, config.dtype)


def num_weights(spec: ModelSpec) -> int:
    """All of a decoder's, but for norms and biases."""
    layer = sum(d_in * d_out for d_in, d_out in spec.shapes.dims)
    tables = spec.vocab_size * spec.hidden_size * (1 if spec.tied else 2)
    return spec.num_layers * layer + tables


def _refusal(config: EngineConfig, why: str, hint: str) -> ConfigError:
    return ConfigError(f"draft_model = {config.draft_model!r}: {why}", hint=hint)


def _other_vocabulary(folder: Path, draft: ModelSpec, base: Path, spec: ModelSpec) -> str:
    """In which way; "" if it is the same.  Embeddings may be padded to different sizes, and added
    tokens be called otherwise: a release of a family renames some."""
    own, other = (_words(each / "tokenizer.json") for each in (folder, base))
    if own is None or other is None:
        return _other_size(draft, spec.vocab_size, exact=True)
    if own.keys() == other.keys():
        wrong = min((number for word, number in other.items() if own[word] != number), default=None)
        if wrong is not None:
            return f"token {wrong} is another"
        return _other_size(draft, tokenizer_size(base), exact=False)
    if len(own) != len(other):
        return f"{len(own)} words, and not {len(other)}"
    return f"it has no word {min(other.keys() - own.keys())!r}"


def _other_size(draft: ModelSpec, size: int, *, exact: bool) -> str:
    if draft.vocab_size == size or (draft.vocab_size > size and not exact):
        return ""
    return f"{draft.vocab_size} tokens, and not {size}"


def _words(path: Path) -> dict[str, int] | None:
    """Word -> id; None if there is no file, or one that lists its words in another way."""
    try:
        words = json.loads(path.read_bytes())["model"]["vocab"]
        if isinstance(words, list):
            return {word: number for number, (word, _) in enumerate(words)}
        return dict(words)
    except (OSError, ValueError, KeyError, TypeError):
        return None
