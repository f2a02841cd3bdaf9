"""Activated LoRA in adapter_config.json: the token ids from which the adapter acts.

Goes in: the config.  Comes out: its invocation tokens, or a refusal.  What they do to a prompt is
the scheduler's (`admission.invoke`).
"""

from typing import Any

from engine.adapters.reasons import refuse, shown, shown_list

FIELD = "alora_invocation_tokens"
#: A prompt is searched for them between two steps.
MAX_TOKENS = 256


def read_invocation(config: dict[str, Any]) -> tuple[int, ...]:
    """() for an adapter that acts everywhere.  Raises AdapterInvalid.

    An empty list too is refused: PEFT makes an aLoRA of it, and fails on its first prompt.
    """
    value = config.get(FIELD)
    if value is None:
        return ()
    ids = isinstance(value, list) and all(type(each) is int and each >= 0 for each in value)
    if not ids or not 0 < len(value) <= MAX_TOKENS:
        raise _refuse(f"{FIELD} is {shown(value)}, wanted are 1 to {MAX_TOKENS} token ids")
    if config.get("use_dora"):  # PEFT refuses the pair too
        raise _refuse(f"both {FIELD} and use_dora are set")
    return tuple(value)


def check_invocation(tokens: tuple[int, ...], vocab_size: int, *, generates: bool) -> None:
    """No prompt could hold an id that the base lacks, and no turn begins in an input that is
    pooled.  Raises AdapterInvalid."""
    if tokens and not generates:
        raise refuse(
            "E_ALORA",
            "it acts from its invocation on, and this base makes vectors and scores",
            "serve it on the base as one that generates",
        )
    beyond = [token for token in tokens if token >= vocab_size]
    if beyond:
        said = f"{FIELD} holds {shown_list(beyond)}, and the base has {vocab_size} token ids"
        raise _refuse(said)


def _refuse(said: str) -> Exception:
    return refuse("E_ALORA", said, f"set {FIELD} to the ids used in training; null for plain LoRA")
