"""How a decoder is asked whether two texts fit: what it reads, and which words of its answer count.

Goes in: Settings, the base's tokenizer and template.  Comes out: a `PairForm`, and the engine's
configuration with the words as token ids; or BadConfig for what a start cannot decide.  An encoder
reads its tokenizer's own form of a pair, and so does a classifier whose files name no other.
"""

from dataclasses import dataclass
from pathlib import Path

import msgspec

from engine.client import EncoderSpec, read_model, scores_by_words
from engine.config import EngineConfig
from engine.pooling.config import PoolingConfig
from engine.pooling.fit import RERANK
from engine.pooling.spec import PoolingSpec
from lorad.config import Settings, model_key
from lorad.errors import BadConfig
from lorad.service.text import RevisionText
from lorad.text import pair_prompt
from lorad.text.late import LateText
from lorad.text.pair_prompt import PairPrompt
from lorad.text.tokenizer import TextError, Tokenizer

AUTO, TOKENIZER = "auto", "tokenizer"


@dataclass(frozen=True, slots=True)
class PairForm:
    """`words` are the token ids that the engine is told, () where its files have them or nothing is
    scored so; `asks` None: pairs have the tokenizer's own form."""

    words: tuple[int, ...] = ()
    asks: PairPrompt | None = None


def pair_form(settings: Settings, text: RevisionText, index: int = 0) -> PairForm:
    """Of one of the models, whose own words `text` has.  Raises BadConfig."""
    model = settings.models[index]
    if not (model.pools or model.pools_too):
        return PairForm()
    config = settings.pooling_config(index)
    _, spec, pooling = read_model(config)
    unnamed = RERANK in model.tasks and scores_by_words(config)
    words = _ids(settings, text.tokenizer, index) if unnamed else ()
    if isinstance(spec, EncoderSpec):
        _check_late(settings, text, pooling, index)
        if model.pair_template not in (AUTO, TOKENIZER):
            raise _bad(settings, index, "an encoder reads its tokenizer's own form of a pair")
        return PairForm()
    by_words = unnamed or bool(pooling.score_tokens)
    try:
        prompt = _prompt(settings, text, spec.model_type, index, by_words=by_words)
        return PairForm(words, prompt)
    except TextError as error:
        raise _bad(settings, index, str(error)) from error


def _check_late(settings: Settings, text: RevisionText, pooling: PoolingSpec, index: int) -> None:
    """Whether the vocabulary has what a model of late interaction marks its texts with."""
    if pooling.late is None:
        return
    try:
        LateText(text.tokenizer, pooling.late)
    except TextError as error:
        raise BadConfig(
            f"{model_key(index, 'base')}: {error}",
            hint="fetch the model again, whole: its tokenizer belongs to it",
        ) from error


def engine_config(
    settings: Settings, form: PairForm, index: int = 0
) -> EngineConfig | PoolingConfig:
    """What the engine process of a model is told.  Raises BadConfig."""
    config = settings.process_config(index)
    replace = msgspec.structs.replace
    if isinstance(config, PoolingConfig):
        return replace(config, score_tokens=form.words) if form.words else config
    if config.pools is None:
        return config
    pools = replace(config.pools, score_tokens=form.words) if form.words else config.pools
    folder = read_model(settings.pooling_config(index))[0]
    return replace(config, model=str(folder), pools=pools)


def _ids(settings: Settings, tokenizer: Tokenizer, index: int) -> tuple[int, ...]:
    found = []
    for word in settings.models[index].score_words:
        ids = tokenizer.encode(word, add_special=False)
        if len(ids) != 1:
            raise BadConfig(
                f"{model_key(index, 'score_words')}: {word!r} is {len(ids)} tokens of this model, "
                "and one scores",
                hint='name the words that it was trained to answer with, such as ["yes", "no"]',
            )
        found.append(ids[0])
    return tuple(found)


def _prompt(
    settings: Settings, text: RevisionText, model_type: str, index: int, *, by_words: bool
) -> PairPrompt | None:
    """Raises TextError for a template that cannot be used."""
    wish = settings.models[index].pair_template
    if wish == TOKENIZER:
        return None
    if wish == pair_prompt.QWEN3:
        return pair_prompt.qwen3_reranker()
    if wish != AUTO:
        return pair_prompt.from_file(Path(wish).expanduser())
    if text.template is not None and pair_prompt.takes_pairs(text.template):
        return pair_prompt.of_template(text.template, "the form of the model's own template")
    if not by_words:
        return None
    if model_type == "qwen3" and pair_prompt.has_qwen3_marks(text.tokenizer.token_id):
        return pair_prompt.qwen3_reranker()
    roles = "a Jinja file for messages with the roles query and document"
    key = model_key(index, "pair_template")
    raise BadConfig(
        f"{key}: nothing says in which words this model is asked about two texts",
        hint=f'{roles}, or "{pair_prompt.QWEN3}"',
    )


def _bad(settings: Settings, index: int, why: str) -> BadConfig:
    key = model_key(index, "pair_template")
    where = settings.origins.get(key)
    return BadConfig(
        f"{key}: {why}" + (f" ({where})" if where else ""),
        hint='a Jinja file that this model was trained with, or "qwen3-reranker"',
    )
