"""An engine that pools, as a test steers it, and a tokenizer that puts marks around texts.

A token is a byte; a vector counts the bytes of each remainder by 8, a score how many bytes of the
second text are in the first.  So that whoever is like whom can be seen in the texts.
"""

import asyncio
from typing import Any

import numpy as np
import tokenizers
from tokenizers import AddedToken, models, pre_tokenizers, processors

from engine.pooling.config import PoolingInfo
from engine.pooling.requests import PoolRequest, PoolResult
from engine.pooling.spec import PoolingSpec
from lorad.errors import LoradError
from lorad.service.pooling import Facts
from lorad.text.pooling import PoolingText
from lorad.text.token_bytes import byte_alphabet
from lorad.text.tokenizer import Tokenizer

WIDTH = 8
CLS, SEP = 256, 257
LENGTH = 64


def marked_tokenizer() -> Tokenizer:
    """The 256 bytes, with BERT's marks around a text, and around two, of two types."""
    inner = tokenizers.Tokenizer(models.BPE(vocab=byte_alphabet(), merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    inner.add_special_tokens([AddedToken(t, special=True) for t in ("[CLS]", "[SEP]")])
    inner.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    return Tokenizer(inner, specials={})


def info(**changed: Any) -> PoolingInfo:
    told: dict[str, Any] = {
        "device": "cpu",
        "dtype": "float32",
        "layout": "fake",
        "base": "fake",
        "block_bytes": 1024,
        "max_length": LENGTH,
        "max_batch_tokens": 512,
        "width": WIDTH,
        "kinds": ("mean",),
        "pooling_origin": "fake",
        "normalizes": True,
        "num_labels": 1,
        "labels": ("LABEL_0",),
        "weight_bytes": 1,
        "adapter_bytes": 1,
    }
    return PoolingInfo(**told | changed)


class FakePool:
    """`facts` is what the model can do, None for one that generates; `gate`, when set, is awaited
    before an answer; `errors` has what inputs whose tokens hold a byte end in."""

    def __init__(self) -> None:
        self.tokenizer = marked_tokenizer()
        self.reset()

    def reset(self) -> None:
        self.requests: list[PoolRequest] = []
        self.aborted: list[str] = []
        self.gate: asyncio.Event | None = None
        self.errors: dict[int, LoradError] = {}
        self.not_ready: LoradError | None = None
        self.facts: Facts | None = None
        self.become()

    def become(
        self,
        spec: PoolingSpec | None = None,
        truncate: bool = False,
        tasks: tuple[str, ...] = ("embed", "rerank", "classify"),
        **told: Any,
    ) -> None:
        """From now on a model of these."""
        text = PoolingText(self.tokenizer, spec or PoolingSpec(), num_types=2)
        self.facts = Facts(info(**told), text, tasks, truncate)

    def check(self) -> None:
        if self.not_ready is not None:
            raise self.not_ready

    async def pool(self, request: PoolRequest) -> PoolResult:
        self.requests.append(request)
        try:
            await (self.gate.wait() if self.gate else asyncio.sleep(0))
        except asyncio.CancelledError:
            self.aborted.append(request.request_id)
            raise
        for byte, error in self.errors.items():
            if byte in request.tokens:
                raise error
        logits = scores = None
        if request.task == "classify":
            assert self.facts is not None
            logits = classes(request, self.facts.info.num_labels)
            scores = 1 / (1 + np.exp(-logits))
        elif request.task == "tokens":
            rows = np.zeros((len(request.tokens), WIDTH), np.float32)
            rows[range(len(request.tokens)), np.array(request.tokens) % WIDTH] = 1
            scores = rows[:, : request.dimensions]
        else:
            counts = np.bincount(np.array(request.tokens) % WIDTH, minlength=WIDTH)
            cut = counts.astype(np.float32)[: request.dimensions]
            scores = cut if request.normalize is False else cut / np.linalg.norm(cut)
        return PoolResult(
            request.request_id, len(request.tokens), values=scores.astype(np.float32), logits=logits
        )


def classes(request: PoolRequest, count: int) -> Any:
    """One: how many bytes of the second text are in the first.  Several: by the first byte."""
    if count > 1:
        return np.array([float(request.tokens[1] % count == i) for i in range(count)], np.float32)
    types = request.types or [0] * len(request.tokens)
    one = {t for t, kind in zip(request.tokens, types, strict=True) if not kind and t < CLS}
    two = [t for t, kind in zip(request.tokens, types, strict=True) if kind and t < CLS]
    return np.array([float(sum(t in one for t in two))], np.float32)
