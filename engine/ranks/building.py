"""A machine for one model, with the other ranks of it where there are any.

Goes in: a configuration with its `auto` values.  Comes out: the machine of rank 0, and the crew
that has the other parts.  Nothing is left of either if one cannot be had.
"""

from collections.abc import Callable

from engine.assembly import Progress
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.ranks.crew import Crew
from engine.ranks.joint_copier import JointCopier
from engine.startup import Machine, build


def build_all(
    config: EngineConfig,
    *,
    progress: Progress,
    wake: Callable[[], None],
    lookahead: bool | None,
    on_death: Callable[[EngineError], None] | None,
) -> tuple[Machine, Crew | None]:
    """The others are told what there is to copy.  None: this process has all of the model."""
    if config.tensor_parallel == 1:
        return build(config, progress=progress, wake=wake), None
    crew = Crew(config, lookahead=lookahead, wake=wake, on_death=on_death)
    try:
        machine = build(
            config,
            progress=progress,
            wake=wake,
            ranks=crew.ranks,
            memory=crew.memory,
            share=lambda own, host: JointCopier(own, crew, host),
        )
    except BaseException:
        crew.abandon()
        raise
    return machine, crew
