"""What a core is put through between two requests: steps, aborts, evictions, loads, by chance."""

from engine.messages import Abort, Evict, Load

#: Answers to these commands are nobody's.
NOBODYS = 10**6


def disturb(driver, draw, adapters) -> None:
    """Some of it, drawn from `draw` (random.Random); the scheduler's invariants are checked."""
    for _ in range(draw.randrange(5)):
        driver.step()
    rev = draw.choice(adapters).rev
    if draw.random() < 0.3:
        driver.core.take(Abort(f"r{draw.randrange(len(driver.stories))}"))
    if draw.random() < 0.3:
        abort = draw.random() < 0.3
        driver.core.take(Evict(command_id=NOBODYS, rev=rev, abort_running=abort))
    if draw.random() < 0.3:
        driver.core.take(Load(command_id=NOBODYS, rev=rev))
    driver.core.scheduler.check()
