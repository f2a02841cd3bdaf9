"""What is asked of several engines at once, as one load."""

from lorad.board.traffic import Traffic
from lorad.service.meter import Meter


def test_what_is_generated_and_what_is_pooled_are_told_apart(told) -> None:
    traffic, begun = Traffic(Meter(), lambda: 0), told.snapshot()
    traffic.tick(0.0, begun, begun)
    writes = told.snapshot(generated_tokens=100, prompt_tokens=400, query=60, hit=30)
    embeds = told.snapshot(prompt_tokens=5000, pooled_tokens=5000)
    traffic.tick(10.0, writes, embeds)
    load = traffic.load()
    assert (load.tokens_per_second, load.pooled_tokens_per_second) == (10.0, 500.0)
    assert load.prompt_tokens_per_second == 540.0
    assert (load.query_tokens, load.hit_tokens) == (60, 30)
    traffic.tick(20.0, writes, None)  # its engine went away, and counts anew when it is back
    traffic.tick(30.0, writes, told.snapshot(prompt_tokens=1000, pooled_tokens=1000))
    assert traffic.load().pooled_tokens_per_second == 200.0
