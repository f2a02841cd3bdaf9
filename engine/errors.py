"""The engine's exceptions.

    EngineError          code                the caller's fault?
    ├── ConfigError      invalid_config      yes, at start
    │   └── NoDevice     no_device           yes: `device = "cuda"` without a card that works
    ├── ModelUnsupported model_unsupported   yes, at start
    ├── AdapterInvalid   adapter_invalid     yes: carries an E_ code of adapters/peft.py
    ├── RequestInvalid   invalid_value       yes
    │   ├── TooLong      context_length_exceeded  yes: an input to pool that may not be cut
    │   ├── NotInvoked   invocation_missing  yes: an aLoRA whose tokens the prompt lacks
    │   └── GrammarInvalid invalid_value     yes: a grammar that no answer can follow
    ├── GuidesMissing    unsupported_parameter  no: llguidance is not installed
    ├── UnknownRevision  model_not_found     yes
    ├── NoRoom           no_room             no: the pool cannot hold it
    ├── LoadFailed       load_failed         no: its packed file is unreadable
    │   └── Damaged      adapter_damaged     no: its packed file is not what was packed
    └── EngineDied       engine_restarting   no: the process is gone

Goes in: nothing.  Comes out: exception classes with a stable `code`.  Knows no HTTP status: the
border that does is `lorad/errors.py`.
"""

#: Next steps for a base whose files are not whole, are in another form, or are another model's.
FETCH_AGAIN = "fetch the model again, whole; its files are not as they were published"
OTHER_FILES = "name the folder of the model as it was published, in float32, bfloat16 or float16"
OTHER_BASE = "another base: what would not be computed exactly is refused, never guessed"


class EngineError(Exception):
    """Base of every error that the engine raises on purpose; `code` is stable and snake_case."""

    code = "internal_error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(EngineError):
    """A setting is unknown, out of range or contradicts another."""

    code = "invalid_config"


class NoDevice(ConfigError):
    """The configured device is not there."""

    code = "no_device"


class ModelUnsupported(EngineError):
    """The base model uses a feature that the engine does not compute exactly."""

    code = "model_unsupported"


class AdapterInvalid(EngineError):
    """An adapter folder is refused; `reason` is one of the E_ codes of `adapters/peft.py`."""

    code = "adapter_invalid"

    def __init__(self, reason: str, message: str, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.reason = reason


class RequestInvalid(EngineError):
    """A request asks for something impossible, for example more tokens than the context holds."""

    code = "invalid_value"


class TooLong(RequestInvalid):
    """An input to pool has more tokens than the model takes, and may not be cut."""

    code = "context_length_exceeded"


class NotInvoked(RequestInvalid):
    """A prompt for an activated LoRA does not hold its invocation tokens."""

    code = "invocation_missing"


class GrammarInvalid(RequestInvalid):
    """No answer can follow this grammar; the message names the construct."""


class GuidesMissing(EngineError):
    """Answers cannot be guided: llguidance is not installed."""

    code = "unsupported_parameter"


class UnknownRevision(EngineError):
    """A command names a revision that was never added, or was removed."""

    code = "model_not_found"


class NoRoom(EngineError):
    """The pool cannot hold what is asked, even with everything evictable gone."""

    code = "no_room"


class LoadFailed(EngineError):
    """A packed file is missing, short, or of another layout."""

    code = "load_failed"


class Damaged(LoadFailed):
    """A packed file has the right length, and other bytes than were packed."""

    code = "adapter_damaged"


class EngineDied(EngineError):
    """The engine process ended while an answer was still owed."""

    code = "engine_restarting"


def error_of(code: str, message: str) -> EngineError:
    """The exception whose code this is, for who is told of an error by an event."""
    for kind in list(globals().values()):
        if isinstance(kind, type) and issubclass(kind, EngineError) and kind.code == code:
            if kind in (EngineError, AdapterInvalid):
                continue
            return kind(message)
    error = EngineError(message)
    error.code = code
    return error
