"""What the models of a daemon do, in the words that figures of them are headed by.

Goes in: a Status.  Comes out: whether any generates, and a word for what else they make.
"""

from lorad.wire_status import Status

GENERATE = "generate"


def generates(s: Status) -> bool:
    """Also before the daemon says what its models are for."""
    tasks = _tasks(s)
    return GENERATE in tasks or not tasks


def pools(s: Status) -> str:
    """`embed` or the like, if that is all that is made beside text; `pooled` of several; ""."""
    others = [task for task in _tasks(s) if task != GENERATE]
    return "pooled" if len(others) > 1 else "".join(others)


def _tasks(s: Status) -> dict[str, None]:
    """Each once, in the order of the models."""
    return dict.fromkeys(task for model in s.models for task in model.tasks)
