"""The routes for vectors and scores, over the socket, on a model that a test shapes."""

import asyncio
import base64
import json
import struct

import msgspec
import pytest

from engine.pooling.spec import PoolingSpec
from lorad.config_sections import Limits
from lorad.errors import LoradError

CLS, SEP = 256, 257
TEI = ("/rerank", "/embed", "/similarity", "/")


@pytest.fixture
def ask(api, call):
    """`ask("/v1/embeddings", input="x")`: the answer; of "tiny" unless it says otherwise."""

    def one(path, headers="", **body):
        named = {} if path.partition("?")[0] in TEI else {"model": "tiny"}
        return call(api.inference, "POST", path, named | body, headers)

    return one


def vectors(answer):
    assert answer.status == 200, answer.body
    return [item["embedding"] for item in answer.json["data"]]


# ----------------------------------------------------------------- embeddings
def test_a_text_and_texts_have_openais_shape(api, ask):
    answer = ask("/v1/embeddings", input=["ab", "c"], user="me", encoding_format="float")
    one, two = vectors(answer)
    assert len(one) == len(two) == 8 and one != two
    assert answer.json["object"] == "list" and answer.json["model"] == "tiny"
    assert [(d["object"], d["index"]) for d in answer.json["data"]] == [
        ("embedding", 0),
        ("embedding", 1),
    ]
    assert answer.json["usage"] == {"prompt_tokens": 7, "total_tokens": 7}
    assert vectors(ask("/v1/embeddings", input="ab")) == [one]
    assert answer.headers["x-lorad-rev"] == "base"


def test_base64_is_the_same_numbers_as_little_endian_fp32(ask):
    [plain] = vectors(ask("/v1/embeddings", input="hello"))
    [coded] = vectors(ask("/v1/embeddings", input="hello", encoding_format="base64"))
    assert list(struct.unpack("<8f", base64.b64decode(coded))) == plain


@pytest.mark.parametrize("given", [[97, 98], [[97, 98]], [[CLS, 97], [98]]])
def test_token_ids_are_taken_as_they_are(api, ask, given):
    assert ask("/v1/embeddings", input=given).status == 200
    expected = [given] if isinstance(given[0], int) else given
    assert [r.tokens for r in api.pool.requests] == expected


def test_dimensions_and_normalising_reach_the_model(api, ask):
    [short] = vectors(ask("/v1/embeddings", input="abc", dimensions=3, normalize=False))
    assert len(short) == 3
    assert (api.pool.requests[0].dimensions, api.pool.requests[0].normalize) == (3, False)
    for wrong in (0, 9):
        answer = ask("/v1/embeddings", input="abc", dimensions=wrong)
        assert (answer.status, answer.json["error"]["param"]) == (400, "dimensions")


def test_dimensions_that_nobody_trained_are_refused_with_those_that_somebody_did(api, ask):
    api.pool.become(PoolingSpec(dimensions=(2, 4)))
    assert ask("/v1/embeddings", input="x", dimensions=4).status == 200
    told = ask("/v1/embeddings", input="x", dimensions=3).json["error"]
    assert (told["param"], told["code"]) == ("dimensions", "invalid_value")
    assert "2, 4" in told["message"]


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ("", "input"),
        ([], "input"),
        (["a", ""], "input[1]"),
        ([[97], []], "input[1]"),
        (["a", 5], "input"),
        ([97, 300], "input"),
        ([-1], "input"),
        (["\ud800"], None),
    ],
)
def test_what_is_no_input_is_a_400_that_says_which(api, ask, given, param):
    answer = ask("/v1/embeddings", input=given)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)
    assert not api.pool.requests


@pytest.mark.parametrize("text", ["\0", "\u202e\u2066x", "a\u0301" * 9, "👩‍👩‍👧", " ", "\ufeff"])
def test_odd_text_is_text(api, ask, text):
    assert ask("/v1/embeddings", input=text).status == 200
    assert bytes(api.pool.requests[0].tokens[1:-1]).decode() == text


def test_exactly_as_long_as_the_model_takes_is_served_and_one_more_is_not(api, ask):
    room = 64 - 2
    assert ask("/v1/embeddings", input="x" * room).status == 200
    answer = ask("/v1/embeddings", input=["y", "x" * (room + 1)])
    assert (answer.status, answer.code) == (400, "context_length_exceeded")
    assert answer.json["error"]["param"] == "input[1]" and "65" in answer.json["error"]["message"]


@pytest.mark.parametrize(
    ("wish", "length"),
    [
        ({"truncate": True}, 64),
        ({"truncate_prompt_tokens": -1}, 64),
        ({"truncate_prompt_tokens": 10}, 10),
        ({"truncate_prompt_tokens": 1000}, 64),
    ],
)
def test_what_is_too_long_is_cut_ahead_of_its_last_mark(api, ask, wish, length):
    assert ask("/v1/embeddings", input="x" * 100, **wish).status == 200
    [request] = api.pool.requests
    assert request.tokens == [CLS, *b"x" * (length - 2), SEP] and request.truncate is False


def test_a_model_may_be_set_to_cut(api, ask):
    api.pool.become(truncate=True)
    assert ask("/v1/embeddings", input="x" * 100).status == 200
    assert ask("/v1/embeddings", input="x" * 100, truncate=False).status == 400


def test_prompts_are_put_ahead_by_name_by_role_or_by_default(api, ask):
    prompts = {"query": "q: ", "passage": "p: ", "own": "o: "}
    api.pool.become(PoolingSpec(prompts=prompts, default_prompt="own"))
    for wish in (
        {"input_type": "search_query"},
        {"input_type": "document"},
        {"prompt_name": "own"},
    ):
        assert ask("/v1/embeddings", input="x", **wish).status == 200
    assert ask("/v1/embeddings", input="x").status == 200
    read = [bytes(r.tokens[1:-1]).decode() for r in api.pool.requests]
    assert read == ["q: x", "p: x", "o: x", "o: x"]
    told = ask("/v1/embeddings", input="x", prompt_name="none").json["error"]
    assert told["param"] == "prompt_name" and "query, passage, own" in told["message"]


@pytest.mark.parametrize("wish", [{"prompt_name": "own"}, {"input_type": "query"}])
def test_token_ids_have_no_prompt(api, ask, wish):
    api.pool.become(PoolingSpec(prompts={"own": "o: "}, default_prompt="own"))
    assert ask("/v1/embeddings", input=[97]).status == 200
    answer = ask("/v1/embeddings", input=[97], **wish)
    assert (answer.status, answer.json["error"]["param"]) == (400, next(iter(wish)))


def test_an_instruction_goes_where_the_models_prompt_has_a_place_for_it(api, ask):
    api.pool.become(PoolingSpec(prompts={"query": "Instruct: find it\nQuery:"}))
    wish = {"input": "x", "input_type": "query", "instruction": "find cats"}
    assert ask("/v1/embeddings", **wish).status == 200
    assert bytes(api.pool.requests[0].tokens[1:-1]) == b"Instruct: find cats\nQuery:x"
    api.pool.become(PoolingSpec(prompts={"query": "q: "}))
    answer = ask("/v1/embeddings", **wish)
    assert (answer.code, answer.json["error"]["param"]) == ("unsupported_parameter", "instruction")


def test_the_tokens_of_a_prompt_that_is_left_out_are_counted(api, ask):
    api.pool.become(PoolingSpec(prompts={"query": "q: "}, include_prompt=False))
    assert ask("/v1/embeddings", input="x", input_type="query").status == 200
    assert api.pool.requests[0].prompt_tokens == 4  # with [CLS], without [SEP]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"input": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/v1/embeddings", {"input": "x", "embedding_types": ["int8"]}),
        ("/v1/rerank", {"query": "x", "documents": ["y"], "max_chunks_per_doc": 3}),
        ("/v1/score", {"text_1": "x", "text_2": "y", "use_activation": False}),
        ("/classify", {"input": "x", "activation": False}),
    ],
)
def test_what_is_known_and_not_served_is_refused_by_name(api, ask, path, body):
    answer = ask(path, **body)
    assert (answer.status, answer.code) == (400, "unsupported_parameter")
    assert answer.json["error"]["param"] == list(body)[-1]
    assert not api.pool.requests


# ----------------------------------------------------------------- rerank
def test_a_rerank_has_coheres_and_jinas_shape(api, ask):
    for version in ("1", "2"):
        answer = ask(f"/v{version}/rerank", query="abc", documents=["zzz", "abc", {"text": "ab"}])
        assert answer.status == 200, answer.body
        assert [r["index"] for r in answer.json["results"]] == [1, 2, 0]
        scores = [r["relevance_score"] for r in answer.json["results"]]
        assert scores == sorted(scores, reverse=True) and all(0 <= s <= 1 for s in scores)
        assert answer.json["meta"] == {
            "api_version": {"version": version},
            "billed_units": {"search_units": 1},
        }
        total = sum(len(r.tokens) for r in api.pool.requests[-3:])
        assert answer.json["usage"] == {"prompt_tokens": total, "total_tokens": total}
        assert answer.json["id"] and answer.json["model"] == "tiny"
        assert "document" not in answer.json["results"][0]


def test_the_best_few_with_their_documents(ask):
    body = {"query": "abc", "documents": ["zzz", {"text": "abc"}], "top_n": 1}
    answer = ask("/v1/rerank", **body, return_documents=True)
    [best] = answer.json["results"]
    assert (best["index"], best["document"]) == (1, {"text": "abc"})


def test_without_a_model_the_one_that_is_served_ranks(api, call):
    answer = call(api.inference, "POST", "/v2/rerank", {"query": "a", "documents": ["a"]})
    assert (answer.status, answer.json["model"]) == (200, "tiny")


def test_a_pair_is_the_tokenizers_own_and_a_long_document_is_cut_but_never_the_query(api, ask):
    query = "q" * 20
    assert ask("/v1/rerank", query=query, documents=["d" * 100]).status == 200
    [request] = api.pool.requests
    assert request.tokens == [CLS, *query.encode(), SEP, *b"d" * 41, SEP]
    assert request.types == [0] * 22 + [1] * 42
    answer = ask("/v1/rerank", query="q" * 100, documents=["d"])
    assert (answer.status, answer.code) == (400, "context_length_exceeded")


@pytest.mark.parametrize("key", ["truncate", "truncation"])
def test_who_wants_nothing_cut_hears_which_document_is_too_long(ask, key):
    answer = ask("/v1/rerank", query="q", documents=["d", "d" * 100], **{key: False})
    told = answer.json["error"]
    assert (told["code"], told["param"]) == ("context_length_exceeded", "documents[1]")


def test_documents_are_cut_to_so_many_tokens(api, ask):
    assert ask("/v2/rerank", query="q", documents=["d" * 30], max_tokens_per_doc=5).status == 200
    assert bytes(t for t in api.pool.requests[0].tokens if t < CLS) == b"qddddd"


def test_equal_scores_keep_the_documents_order(ask):
    answer = ask("/v1/rerank", query="a", documents=["b", "c", "d"])
    assert [r["index"] for r in answer.json["results"]] == [0, 1, 2]


def test_a_saturated_score_does_not_hide_the_order(ask):
    """A sigmoid of 40 and one of 41 are both 1.0 as fp32: what they are made of is sorted."""
    answer = ask("/v1/rerank", query="a", documents=["a" * 40, "a" * 41])
    one, two = answer.json["results"]
    assert one["relevance_score"] == two["relevance_score"] == 1.0
    assert [one["index"], two["index"]] == [1, 0]


def test_a_model_of_vectors_ranks_by_cosine_with_its_prompts(api, ask):
    api.pool.become(PoolingSpec(prompts={"query": "q", "document": "d"}), num_labels=0, labels=())
    answer = ask("/v1/rerank", query="abc", documents=["xyz", "abc"])
    assert [r["index"] for r in answer.json["results"]] == [1, 0]
    assert {r.task for r in api.pool.requests} == {"embed"}
    read = [bytes(r.tokens[1:-1]).decode() for r in api.pool.requests]
    assert read == ["qabc", "dxyz", "dabc"]


def test_a_model_that_names_maxsim_ranks_by_it(api, ask):
    api.pool.become(PoolingSpec(similarity="MaxSim"), num_labels=0, labels=())
    answer = ask("/v1/rerank", query="ab", documents=["a", "ab"])
    found = {r["index"]: r["relevance_score"] for r in answer.json["results"]}
    assert found == {1: 4.0, 0: 3.0}  # each of [CLS] a b [SEP] that is there; "b" is not in "a"
    assert {(r.task, r.normalize) for r in api.pool.requests} == {("tokens", True)}


def test_what_compares_two_texts_can_be_asked_for_by_name(api, ask):
    for scoring, task in (("cosine", "embed"), ("maxsim", "tokens")):
        assert ask("/v1/rerank", query="a", documents=["a"], scoring=scoring).status == 200
        assert api.pool.requests[-1].task == task
    assert ask("/v1/rerank", query="a", documents=["a"], scoring="other").status == 400


def test_a_head_of_several_classes_ranks_nothing_and_says_what_does(api, ask):
    api.pool.become(num_labels=3, labels=("no", "maybe", "yes"))
    answer = ask("/v1/rerank", query="a", documents=["b"])
    told = answer.json["error"]
    assert (answer.status, told["code"], told["param"]) == (400, "unsupported_parameter", "model")
    assert "no, maybe, yes" in told["message"] and "/classify" in told["details"]["hint"]
    assert ask("/v1/rerank", query="a", documents=["b"], scoring="cosine").status == 200


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"query": "", "documents": ["a"]}, "query"),
        ({"query": "a", "documents": []}, "documents"),
        ({"query": "a", "documents": ["a"], "top_n": 0}, "top_n"),
        ({"query": "a", "documents": [{"image": "x"}]}, "documents[0].text"),
        ({"query": "a"}, "documents"),
    ],
)
def test_what_is_no_rerank_is_a_400_that_says_why(ask, body, param):
    answer = ask("/v1/rerank", **body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


def test_a_cross_encoder_makes_no_vectors_unless_it_is_served_for_them(api, ask):
    api.pool.become(tasks=("rerank", "classify"))
    assert ask("/v1/rerank", query="a", documents=["b"]).status == 200
    for path, param, body in (
        ("/v1/embeddings", "model", {"input": "x"}),
        ("/pooling", "model", {"input": "x"}),
        ("/v1/rerank", "scoring", {"query": "a", "documents": ["b"], "scoring": "cosine"}),
    ):
        told = ask(path, **body).json["error"]
        assert (told["code"], told["param"]) == ("unsupported_parameter", param)
        assert "served to rerank and classify" in told["message"]


def test_what_is_served_for_vectors_alone_ranks_by_them_whatever_head_it_has(api, ask):
    api.pool.become(tasks=("embed",))
    assert ask("/v1/rerank", query="a", documents=["b"]).status == 200
    assert api.pool.requests[0].task == "embed"
    assert ask("/classify", input="x").code == "unsupported_parameter"


# ----------------------------------------------------------------- TEI
def test_tei_gets_a_bare_list_with_the_best_first(api, ask):
    answer = ask("/rerank", query="abc", texts=["z", "abc"], return_text=True)
    assert answer.status == 200
    assert [set(item) for item in answer.json] == [{"index", "score", "text"}] * 2
    assert [item["text"] for item in answer.json] == ["abc", "z"]
    assert [set(item) for item in ask("/rerank", query="a", texts=["z"]).json] == [
        {"index", "score"}
    ]


def test_raw_scores_are_the_heads_logits(ask):
    assert ask("/rerank", query="abc", texts=["abca"], raw_scores=True).json[0]["score"] == 4.0


def test_raw_scores_of_a_model_without_a_head_are_refused(api, ask):
    api.pool.become(num_labels=0, labels=())
    answer = ask("/rerank", query="a", texts=["b"], raw_scores=True)
    assert answer.status == 413 and answer.json["error_type"] == "Validation"


def test_tei_hears_of_errors_in_its_own_words(api, ask):
    long = ask("/rerank", query="q", texts=["d" * 100])
    assert (long.status, set(long.json)) == (413, {"error", "error_type"})
    assert long.json["error_type"] == "Validation" and "64" in long.json["error"]
    assert ask("/rerank", query="q", texts=["d" * 100], truncate=True).status == 200
    for code, status, kind in (
        ("queue_full", 429, "Overloaded"),
        ("engine_restarting", 503, "Unhealthy"),
        ("internal_error", 424, "Backend"),
    ):
        api.pool.errors = {ord("!"): LoradError(code, "why")}
        answer = ask("/rerank", query="q", texts=["!"])
        assert (answer.status, answer.json) == (status, {"error": "why", "error_type": kind})


def test_tei_gets_bare_vectors_for_a_text_texts_and_token_ids(api, ask):
    one, two = vectors(ask("/v1/embeddings", input=["ab", "c"]))
    for path in ("/embed", "/"):
        assert ask(path, inputs=["ab", "c"]).json == [one, two]
        assert ask(path, inputs="ab").json == [one]
        assert ask(path, inputs=[[CLS, 97, 98, SEP]]).json == [one]
    assert [len(v) for v in ask("/embed", inputs="abc", dimensions=3).json] == [3]
    assert max(ask("/embed", inputs="abb", normalize=False).json[0]) == 2.0


def test_tei_is_told_how_alike_texts_are_whatever_head_the_model_has(api, ask):
    compared = {"source_sentence": "ab", "sentences": ["ab", "hh"]}
    same, other = ask("/similarity", inputs=compared, parameters={"truncate": True}).json
    assert same == pytest.approx(1.0) and other < same
    assert ask("/", inputs=compared, parameters={}).json == [same, other]
    assert {r.task for r in api.pool.requests} == {"embed"}


def test_teis_clients_name_a_model_in_the_address(api, ask):
    assert ask("/embed?model=acme/sql", inputs="x").headers["x-lorad-rev"] != "base"
    assert ask("/embed", inputs="x").headers["x-lorad-rev"] == "base"
    assert ask("/rerank?model=nobody", query="x", texts=["y"]).status == 404
    assert ask("/embed?model=nobody", inputs="x", model="tiny").status == 200


@pytest.mark.parametrize(
    ("path", "body", "word"),
    [
        ("/embed", {"inputs": "a", "encoding_format": "base64"}, "/v1/embeddings"),
        ("/embed", {"inputs": "a", "truncation_direction": "Left"}, "at their end"),
        ("/embed", {"inputs": []}, "inputs"),
        ("/embed", {"inputs": ["a", 3]}, "inputs"),
        ("/embed", {"inputs": ["a", ""]}, "inputs[1]"),
        ("/embed", {"inputs": "a" * 99}, "inputs"),
        ("/embed", {"inputs": [1, 2], "prompt_name": "q"}, "token ids"),
        ("/similarity", {"inputs": {"source_sentence": "", "sentences": ["a"]}}, "source_sentence"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": []}}, "sentences"),
        (
            "/similarity",
            {
                "inputs": {"source_sentence": "a", "sentences": ["a"]},
                "parameters": {"prompt_name": "q"},
            },
            "prompt",
        ),
    ],
    ids=["base64", "left", "none", "mixed", "empty", "long", "ids", "nothing", "alone", "prompt"],
)
def test_what_tei_is_refused_is_named(ask, path, body, word):
    answer = ask(path, **body)
    assert (answer.status, answer.json["error_type"]) == (413, "Validation")
    assert word in answer.json["error"]


def test_sparse_vectors_are_refused_by_name(ask):
    answer = ask("/embed_sparse", inputs="a")
    assert answer.status == 404
    assert "sparse vectors are not served" in answer.json["error"]["message"]


# ----------------------------------------------------------------- score, classify, pooling
def test_one_against_several_and_each_against_its_own(ask):
    answer = ask("/v1/score", text_1="abc", text_2=["z", "abc"])
    low, high = (item["score"] for item in answer.json["data"])
    assert low < high
    assert answer.json["object"] == "list"
    assert [(d["index"], d["object"]) for d in answer.json["data"]] == [(0, "score"), (1, "score")]
    answer = ask("/v1/score", text_1=["abc", "z"], text_2=["abc", "z"])
    assert len(answer.json["data"]) == 2
    answer = ask("/v1/score", text_1=["a", "b"], text_2=["a", "b", "c"])
    assert (answer.status, answer.json["error"]["param"]) == (400, "text_1")


def test_vectors_are_scored_in_pairs_too(api, ask):
    api.pool.become(num_labels=0, labels=())
    answer = ask("/v1/score", text_1=["abc", "z"], text_2=["abc", "z"])
    assert [round(item["score"], 6) for item in answer.json["data"]] == [1.0, 1.0]
    assert len(api.pool.requests) == 4


def test_classes_have_their_names_and_all_probabilities(api, ask):
    api.pool.become(num_labels=3, labels=("no", "maybe", "yes"))
    answer = ask("/classify", input=["a", "b", "c"])
    told = answer.json["data"]
    assert [item["label"] for item in told] == ["maybe", "yes", "no"]
    assert all(item["num_classes"] == len(item["probs"]) == 3 for item in told)
    assert answer.json["usage"]["total_tokens"] == 9


def test_a_model_without_a_head_classifies_nothing_and_says_what_it_does(api, ask):
    api.pool.become(num_labels=0, labels=())
    told = ask("/classify", input="x").json["error"]
    assert (told["code"], told["param"]) == ("unsupported_parameter", "model")
    assert "/v1/embeddings" in told["details"]["hint"]


def test_a_vector_for_each_token(ask):
    answer = ask("/pooling", input=["ab", "c"])
    one, two = answer.json["data"]
    assert one["object"] == "pooling" and one["shape"] == [4, 8] and two["shape"] == [3, 8]
    assert len(one["data"]) == 4 and len(one["data"][0]) == 8
    [coded] = ask("/pooling", input="ab", encoding_format="base64").json["data"]
    numbers = struct.unpack("<32f", base64.b64decode(coded["data"]))
    assert list(numbers) == [n for row in one["data"] for n in row]


def test_pooling_has_whole_vectors_and_scores_too(ask):
    [embedded] = ask("/pooling", input="ab", task="embed").json["data"]
    assert [embedded["data"]] == vectors(ask("/v1/embeddings", input="ab"))
    assert ask("/pooling", input="ab", task="classify").json["data"][0]["shape"] == [1]
    assert ask("/pooling", input="ab", task="token_classify").status == 400


# ----------------------------------------------------------------- bounds and ends
def test_more_inputs_or_token_vectors_than_the_limits_are_refused(make_api, call):
    api = make_api(msgspec.structs.replace(Limits(), inputs=3, token_vectors=400))

    def ask(path, **body):
        return call(api.inference, "POST", path, {"model": "tiny"} | body)

    assert ask("/v1/embeddings", input=["a"] * 3).status == 200
    told = ask("/v1/embeddings", input=["a"] * 4).json["error"]
    assert told["param"] == "input" and "limits.inputs = 3" in told["message"]
    told = ask("/v1/rerank", query="q", documents=["a"] * 4).json["error"]
    assert told["param"] == "documents"
    assert ask("/pooling", input="x" * 10).status == 200  # 12 vectors of 8 numbers
    told = ask("/pooling", input="x" * 11).json["error"]
    assert "limits.token_vectors = 400" in told["message"]
    # Of a rerank only the query's are held: each document's are compared when they come.
    api.pool.become(PoolingSpec(similarity="MaxSim"), num_labels=0, labels=())
    assert ask("/v1/rerank", query="x" * 10, documents=["y" * 60] * 2).status == 200
    told = ask("/v1/rerank", query="x" * 11, documents=["y"]).json["error"]
    assert told["param"] == "query" and "limits.token_vectors = 400" in told["message"]


def test_an_answer_does_not_depend_on_the_order_of_inputs(ask):
    texts = ["a", "bb", "a longer one", "ccc"]
    forth = vectors(ask("/v1/embeddings", input=texts))
    back = vectors(ask("/v1/embeddings", input=texts[::-1]))
    assert forth == back[::-1] == [vectors(ask("/v1/embeddings", input=t))[0] for t in texts]


def test_one_input_that_fails_ends_all_of_them(api, ask):
    api.pool.errors = {ord("!"): LoradError("invalid_value", "why")}
    answer = ask("/v1/embeddings", input=["a", "!", "b"])
    told = answer.json["error"]
    assert (answer.status, told["message"], told["param"]) == (400, "why", "input[1]")
    assert api.requests.active == 0 and api.requests.waiting == 0


def test_a_client_that_leaves_takes_all_its_inputs_back(api, connect):
    api.pool.gate = api.run(asyncio.Event)
    body = {"model": "acme/sql", "query": "q", "documents": ["d"] * 20}
    content = json.dumps(body).encode()
    head = f"POST /v1/rerank HTTP/1.1\r\nhost: l\r\ncontent-length: {len(content)}\r\n\r\n"
    raw = connect(api.inference).send(head.encode() + content)
    api.until(lambda: len(api.pool.requests) == 20)
    assert api.requests.running("acme/sql") == 1 and api.requests.waiting == 1
    assert api.adapters.leases["b2" * 32] == 0 and sum(api.adapters.leases.values()) == 1
    [(unit, live)] = api.requests.crowd
    assert (live.name, unit.endpoint, unit.begun) == ("acme/sql", "rerank", False)
    raw.close()
    api.until(lambda: api.requests.active == 0)
    assert not len(api.requests.crowd)
    assert set(api.pool.aborted) == {r.request_id for r in api.pool.requests}
    assert not +api.adapters.leases and api.requests.waiting == 0


def test_a_drain_ends_what_runs_and_keeps_out_what_comes(api, call, connect):
    api.pool.gate = api.run(asyncio.Event)
    content = json.dumps({"model": "bible", "input": ["a", "b"]}).encode()
    head = (
        "POST /v1/embeddings HTTP/1.1\r\nhost: l\r\nconnection: close\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    raw = connect(api.inference).send(head.encode() + content)
    api.until(lambda: len(api.pool.requests) == 2)
    assert api.run(api.requests.cancel, "draining", "bye", "bible") == 1
    assert b'"code":"draining"' in raw.answer().body
    assert len(api.pool.aborted) == 2
    api.requests.drain()
    try:
        answer = call(api.inference, "POST", "/v1/embeddings", {"model": "tiny", "input": "x"})
        assert (answer.status, answer.code) == (503, "draining")
    finally:
        api.requests.reception._gate.closed = ""


def test_a_deadline_is_the_clients_if_it_is_less(api, ask):
    assert ask("/v1/embeddings", "x-request-timeout: 5\r\n", input="x").status == 200
    assert 0 < api.pool.requests[0].deadline_seconds <= 5


def test_who_comes_later_waits_behind_four_steps_of_a_large_request_and_no_more(api, ask, connect):
    api.pool.become(max_batch_tokens=15)  # five inputs of three tokens a step
    api.pool.gate = api.run(asyncio.Event)
    content = json.dumps({"model": "tiny", "input": ["a"] * 50}).encode()
    head = (
        "POST /v1/embeddings HTTP/1.1\r\nhost: l\r\nconnection: close\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    raw = connect(api.inference).send(head.encode() + content)
    api.until(lambda: len(api.pool.requests) == 20)
    api.run(api.pool.gate.set)
    assert len(raw.answer().json["data"]) == 50


def test_a_failure_in_a_large_request_keeps_the_rest_of_it_from_the_engine(api, ask):
    api.pool.become(max_batch_tokens=15)
    api.pool.errors = {ord("!"): LoradError("invalid_value", "why")}
    answer = ask("/v1/embeddings", input=["!", *["a"] * 300])
    assert answer.json["error"]["param"] == "input[0]"
    assert len(api.pool.requests) < 100 and api.requests.active == 0


def test_one_input_that_is_longer_than_the_engines_steps_goes_alone(api, ask):
    api.pool.become(max_batch_tokens=1)
    assert len(vectors(ask("/v1/embeddings", input=["x" * 60, "y" * 60]))) == 2


def test_a_request_that_runs_into_its_deadline_is_a_504_and_leaves_the_engine(
    api, ask, monkeypatch
):
    monkeypatch.setattr("lorad.service.pooling.DEADLINE_GRACE_SECONDS", 0.0)
    api.pool.gate = api.run(asyncio.Event)
    answer = ask("/v1/embeddings", "x-request-timeout: 0.05\r\n", input=["a", "b"])
    assert (answer.status, answer.code) == (504, "deadline_exceeded")
    assert len(api.pool.aborted) == 2 and api.requests.active == 0


def test_a_unit_waits_as_one_and_a_full_queue_turns_the_next_away(make_api, call, connect):
    api = make_api(msgspec.structs.replace(Limits(), queue=1))
    api.pool.gate = api.run(asyncio.Event)
    content = json.dumps({"model": "tiny", "input": ["a"] * 30}).encode()
    head = (
        "POST /v1/embeddings HTTP/1.1\r\nhost: l\r\nconnection: close\r\n"
        f"content-length: {len(content)}\r\n\r\n"
    )
    raw = connect(api.inference).send(head.encode() + content)
    api.until(lambda: len(api.pool.requests) == 30)
    body = {"query": "a", "texts": ["b"]}
    answer = call(api.inference, "POST", "/rerank", body)
    assert (answer.status, answer.json["error_type"]) == (429, "Overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    api.run(api.pool.gate.set)
    assert raw.answer().status == 200


# ----------------------------------------------------------------- who, and what
def test_a_model_that_generates_says_where_it_does(api, ask):
    api.pool.facts = None
    for path, body in (
        ("/v1/embeddings", {"input": "x"}),
        ("/v1/rerank", {"query": "x", "documents": ["y"]}),
        ("/classify", {"input": "x"}),
    ):
        answer = ask(path, **body)
        told = answer.json["error"]
        assert (answer.status, told["code"]) == (400, "unsupported_parameter")
        assert told["param"] == "model" and "/v1/chat/completions" in told["details"]["hint"]
        assert ask(path, **body | {"model": "nobody"}).status == 404


def test_an_adapter_answers_by_its_name_with_its_priority(api, ask):
    api.adapters.priority = 30
    answer = ask("/v1/embeddings", model="acme/sql", input="x", priority=99)
    assert answer.headers["x-lorad-rev"] == "a1" * 32
    [request] = api.pool.requests
    assert (request.rev, request.priority) == ("a1" * 32, 30)


def test_what_was_used_is_counted(api, ask):
    before = api.requests.meter.names["__base__"].prompt_tokens
    assert ask("/v1/embeddings", input=["ab", "c"]).status == 200
    assert api.requests.meter.names["__base__"].prompt_tokens == before + 7
    assert api.requests.meter.kinds("")["base"].duration_seconds["embeddings"].total > 0
