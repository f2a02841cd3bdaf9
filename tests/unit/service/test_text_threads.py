"""TextThreads: requests that bring much text have threads of their own."""

import asyncio
import json
import threading

from lorad.api import parse
from lorad.config_sections import Limits
from lorad.service import text_threads
from lorad.service.pool_ask import Input, PoolAsk, Wish
from lorad.service.text_threads import LONG, TextThreads, num_characters


def test_who_brings_little_does_not_wait_for_who_brings_much() -> None:
    held = threading.Event()

    async def scenario() -> str:
        threads = TextThreads()
        many = text_threads.THREADS + text_threads.LONG_THREADS + 1
        slow = [asyncio.ensure_future(threads.run(LONG, held.wait)) for _ in range(many)]
        await asyncio.sleep(0)  # all are in a pool
        try:
            return await asyncio.wait_for(threads.run(LONG - 1, lambda: "ids"), 30)
        finally:
            held.set()
            await asyncio.gather(*slow)
            threads.close()

    assert asyncio.run(scenario()) == "ids"


def test_all_texts_of_a_request_count_and_token_ids_do_not() -> None:
    call = {
        "type": "function",
        "id": "c",
        "function": {"name": "f", "arguments": json.dumps({"x": "x" * 490})},
    }
    told = [{"role": "user", "content": "y" * 1000}, {"role": "assistant", "tool_calls": [call]}]
    chat, _ = parse.chat(json.dumps({"model": "m", "messages": told}).encode(), Limits())
    assert 1500 < chat.num_characters < 1600
    for prompt, count in (["ab", "c"], 3), ([[1, 2, 3]], 0), ("abc", 3):
        body = json.dumps({"model": "m", "prompt": prompt}).encode()
        assert parse.completion(body, Limits())[0].num_characters == count
    inputs = (Input("ab", second="cde"), Input((1, 2, 3)), Input("f"))
    pooled = PoolAsk(wish=Wish(model="m", endpoint="score"), task="score", inputs=inputs)
    assert pooled.num_characters == 6
    assert num_characters(None) == 0
