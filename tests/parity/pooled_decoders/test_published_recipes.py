"""What model cards do with transformers, on texts and padded batches, against our answers."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from engine.pooling.files import read_pooling
from lorad.text.pair_prompt import qwen3_reranker
from lorad.text.pooling import Fit, PoolingText
from lorad.text.tokenizer import Tokenizer
from tests.fakes.tiny_qwen3 import END, LENGTH, NO, YES, write_qwen3

QUERIES = ("what is it?", "wörds", "a")
DOCUMENTS = ("that", "yes and no, and more of it", "x" * 300)
#: What is before and behind a pair's own words, as Qwen3-Reranker's card has it.
AHEAD = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and"
    ' the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
    "<|im_start|>user\n"
)
BEHIND = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
TASK = "Given a web search query, retrieve relevant passages that answer the query"


def padded(rows: list[list[int]], side: str) -> tuple[Tensor, Tensor]:
    """ids and mask (n, longest)."""
    longest = max(map(len, rows))
    ids, mask = [], []
    for row in rows:
        gap = longest - len(row)
        left, right = (gap, 0) if side == "left" else (0, gap)
        ids.append([END] * left + row + [END] * right)
        mask.append([0] * left + [1] * len(row) + [0] * right)
    return torch.tensor(ids), torch.tensor(mask)


def last_rows(hidden: Tensor, mask: Tensor) -> Tensor:
    """Of each sequence its last token's, on whichever side it is padded."""
    places = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)
    return hidden[torch.arange(len(hidden)), places]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("embedder"), embeds=True)


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen3(tmp_path_factory.mktemp("reranker"))


@pytest.mark.parametrize("side", ["left", "right"])
def test_embeddings_of_queries_with_their_instruction_and_of_bare_documents(
    embedder: Path, engines: Callable[..., Any], side: str
) -> None:
    import tokenizers
    from transformers import Qwen3Model

    theirs = tokenizers.Tokenizer.from_file(str(embedder / "tokenizer.json"))
    told = [f"Instruct: Find it\nQuery:{query}" for query in QUERIES]
    rows = [theirs.encode(text).ids for text in (*told, *DOCUMENTS)]
    ids, mask = padded(rows, side)
    model = Qwen3Model.from_pretrained(embedder, dtype=torch.float32).eval()
    with torch.no_grad():
        hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    wanted = F.normalize(last_rows(hidden, mask), dim=1).numpy()

    text = PoolingText(Tokenizer.load(embedder), read_pooling(embedder))
    fit = Fit(LENGTH)
    ours = [text.one(query, fit, text.prompt(role="query")) for query in QUERIES]
    ours += [text.one(one, fit, text.prompt(role="document")) for one in DOCUMENTS]
    assert [one.tokens for one in ours] == rows and all(row[-1] == END for row in rows)
    got = np.array(engines(embedder).embed([one.tokens for one in ours]))
    assert np.abs(got - wanted).max() < 1e-5


@pytest.mark.parametrize("task", ["", "Find it"])
def test_a_rerankers_score_is_the_softmax_of_yes_over_no(
    reranker: Path, engines: Callable[..., Any], task: str
) -> None:
    import tokenizers
    from transformers import Qwen3ForCausalLM

    theirs = tokenizers.Tokenizer.from_file(str(reranker / "tokenizer.json"))
    ahead, behind = (theirs.encode(part, add_special_tokens=False).ids for part in (AHEAD, BEHIND))
    pairs = list(zip(QUERIES, DOCUMENTS, strict=True))
    rows = []
    for query, document in pairs:
        told = f"<Instruct>: {task or TASK}\n<Query>: {query}\n<Document>: {document}"
        rows.append([*ahead, *theirs.encode(told, add_special_tokens=False).ids, *behind])
    ids, mask = padded(rows, "left")
    model = Qwen3ForCausalLM.from_pretrained(reranker, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=mask).logits[:, -1, :]
    assert (theirs.token_to_id("no"), theirs.token_to_id("yes")) == (NO, YES)
    wanted = torch.log_softmax(logits[:, [NO, YES]], dim=1)[:, 1].exp().numpy()

    text = PoolingText(Tokenizer.load(reranker), read_pooling(reranker), asks=qwen3_reranker())
    ours = [text.pair(query, document, Fit(LENGTH), task).tokens for query, document in pairs]
    assert ours == rows
    got = engines(reranker, score_tokens=(YES, NO)).classify(ours)
    assert np.abs(np.array([one.values[0] for one in got]) - wanted).max() < 1e-5


def test_bf16_vectors_are_as_near_to_the_exact_ones_as_transformers_are(
    make: Callable[..., Any], engines: Callable[..., Any]
) -> None:
    from transformers import AutoModel

    for name in ("llama", "qwen3"):
        case = make(name)
        model = AutoModel.from_pretrained(case.folder, dtype=torch.bfloat16).eval()
        ours, theirs = [], []
        for got, tokens in zip(
            engines(case.folder, dtype="bfloat16").embed(case.batch), case.batch, strict=True
        ):
            with torch.no_grad():
                hidden = model(input_ids=torch.tensor([tokens])).last_hidden_state
            exact = case.hidden(tokens)[-1]
            ours.append(cosine(got, exact))
            theirs.append(cosine(hidden[0, -1].float().numpy(), exact))
        assert min(ours) > 0.999 and 1 - np.mean(ours) < 2 * (1 - np.mean(theirs))


def cosine(one: Any, other: Any) -> float:
    return float(one @ other / np.linalg.norm(one) / np.linalg.norm(other))
