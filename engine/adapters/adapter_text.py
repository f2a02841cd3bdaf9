"""The tokenizer files of an adapter folder: do their ids fit the base's embedding?

Goes in: an open folder and the base's vocabulary size (rows of its embedding).  Comes out: the
names of the text files that lorad will read, or AdapterInvalid.  A chat template of its own is
normal and not looked into here.  Knows no tokenizer library: only ids are read.
"""

import msgspec

from engine.adapters.adapter_folder import AdapterFolder
from engine.adapters.manifest import TEXT_FILES, Limits
from engine.adapters.reasons import refuse


class _Added(msgspec.Struct):
    id: int


class _Model(msgspec.Struct):
    vocab: msgspec.Raw = msgspec.Raw(b"{}")


class _Tokenizer(msgspec.Struct):
    """Of tokenizer.json, what carries ids.  The vocabulary stays raw until its size is bounded."""

    model: _Model
    added_tokens: list[_Added] = []


class _TokenizerConfig(msgspec.Struct):
    added_tokens_decoder: dict[str, msgspec.Raw] = {}


def check_text_files(folder: AdapterFolder, vocab_size: int, limits: Limits) -> tuple[str, ...]:
    """The names of TEXT_FILES that are there.  Raises AdapterInvalid."""
    there = tuple(name for name in TEXT_FILES if folder.has(name))
    for name in there:
        data = folder.read(name, limits.max_text)
        try:
            highest = _HIGHEST[name](data, vocab_size) if name in _HIGHEST else -1
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise refuse(
                "E_TOKENIZER_INVALID",
                f"{name} cannot be read: {str(error)[:100]}",
                f"copy {name} again, or remove the tokenizer files to use the base's",
            ) from None
        if highest >= vocab_size:
            raise refuse(
                "E_TOKENIZER_TOO_LARGE",
                f"{name} has token ids up to {highest}, the base's embedding has {vocab_size} rows",
                "remove the tokenizer files to use the base's, or serve the resized model as base",
            )
    return there


def _in_added_tokens(data: bytes, vocab_size: int) -> int:
    if too_many := _too_many(data, b'":', vocab_size):
        return too_many
    return max(msgspec.json.decode(data, type=dict[str, int]).values(), default=-1)


def _in_tokenizer_config(data: bytes, vocab_size: int) -> int:
    if too_many := _too_many(data, b'"content"', vocab_size):
        return too_many
    decoder = msgspec.json.decode(data, type=_TokenizerConfig).added_tokens_decoder
    return max((int(key) for key in decoder), default=-1)


def _in_tokenizer(data: bytes, vocab_size: int) -> int:
    if too_many := _too_many(data, b'"id"', vocab_size):
        return too_many
    tokenizer = msgspec.json.decode(data, type=_Tokenizer)
    added = max((token.id for token in tokenizer.added_tokens), default=-1)
    raw = bytes(tokenizer.model.vocab)
    if raw.startswith(b"["):  # Unigram: the id is the place in the list
        if too_many := _too_many(raw, b"[", vocab_size):
            return too_many
        return max(added, len(msgspec.json.decode(raw, type=list[msgspec.Raw])) - 1)
    if too_many := _too_many(raw, b'":', vocab_size):
        return too_many
    return max(added, max(msgspec.json.decode(raw, type=dict[str, int]).values(), default=-1))


def _too_many(data: bytes, mark: bytes, vocab_size: int) -> int:
    """Entries counted by their mark, if clearly more than the base has; else 0.  Comes before the
    parser, as a file of 64 MiB can hold millions of entries."""
    entries = data.count(mark)
    return entries if entries > 4 * vocab_size + 4096 else 0


_HIGHEST = {
    "added_tokens.json": _in_added_tokens,
    "tokenizer.json": _in_tokenizer,
    "tokenizer_config.json": _in_tokenizer_config,
}
