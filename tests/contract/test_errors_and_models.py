"""Errors, retries and models as openai-python sees them."""

import httpx2
import openai
import pytest

from lorad.errors import LoradError

ASK = [{"role": "user", "content": "Say it."}]


def attempts(api, client, **options):
    """How many requests one call makes."""
    seen = []
    hook = {"request": [lambda request: seen.append(request)]}
    transport = httpx2.HTTPTransport(uds=str(api.inference), verify=False)
    http = openai.DefaultHttpx2Client(transport=transport, event_hooks=hook)
    counting = openai.OpenAI(base_url="http://lorad/v1", api_key="x", http_client=http)
    with counting, pytest.raises(openai.APIStatusError) as caught:
        counting.chat.completions.create(model="tiny", messages=ASK, **options)
    return len(seen), caught.value


@pytest.mark.parametrize("model", ["nobody", "acme/other", "TINY", "acme/sql/x", "broken"])
def test_an_unknown_model_is_404_everywhere_and_never_the_base(api, client, model):
    errors = []
    for call in (
        lambda: client.chat.completions.create(model=model, messages=ASK),
        lambda: client.completions.create(model=model, prompt="p"),
        lambda: client.models.retrieve(model),
    ):
        with pytest.raises(openai.NotFoundError) as caught:
            call()
        errors.append((caught.value.code, caught.value.message))
    assert len(set(errors)) == 1
    assert errors[0][0] == "model_not_found"
    assert not api.engine.submits


def test_a_conflict_is_tried_once(api, client):
    api.engine.not_ready = LoradError("conflict", "no")
    count, error = attempts(api, client)
    assert (count, error.status_code) == (1, 409)


def test_an_internal_error_is_tried_once_and_tells_nothing(api, client, caplog):
    api.engine.not_ready = ZeroDivisionError("secret detail")
    count, error = attempts(api, client)
    assert (count, error.status_code, error.code) == (1, 500, "internal_error")
    assert "secret" not in str(error)
    assert "secret detail" in caplog.text


def test_a_busy_server_is_tried_again_after_the_time_that_it_names(api, client, monkeypatch):
    waits = []
    monkeypatch.setattr("time.sleep", waits.append)
    api.engine.not_ready = LoradError("engine_restarting", "soon", retry_after=3)
    count, error = attempts(api, client)
    assert (count, error.status_code) == (3, 503)
    assert waits == [3.0, 3.0]


def test_a_failure_in_mid_stream_is_an_error_and_not_an_end(api, client):
    api.engine.error = ("engine_restarting", "the engine died")
    stream = client.chat.completions.create(model="tiny", messages=ASK, stream=True)
    text = ""
    with pytest.raises(openai.APIError, match="the engine died") as caught:
        for chunk in stream:
            text += chunk.choices[0].delta.content or ""
    assert text == "Hello world"
    assert caught.value.code == "engine_restarting"


def test_a_failure_before_the_first_token_has_its_status_in_a_stream_too(api, client):
    api.engine.reply = b""
    api.engine.error = ("no_room", "nothing can be evicted")
    with pytest.raises(openai.InternalServerError) as caught:
        client.chat.completions.create(model="tiny", messages=ASK, stream=True)
    assert (caught.value.status_code, caught.value.code) == (503, "no_room")


def test_models_list_what_can_be_asked_for(api, client):
    api.adapters.revs["broken"] = "d4" * 32
    listed = {model.id: model for model in client.models.list()}
    assert set(listed) == {"tiny", "acme/sql", "bible"}
    card = listed["acme/sql"]
    assert (card.object, card.owned_by, card.root) == ("model", "lorad", "a1" * 32)
    assert (card.parent, card.max_model_len) == ("tiny", 512)
    assert card.created == 1740821400
    assert card.lorad["state"] == "idle"
    assert "/models/" not in str(listed["tiny"])


def test_a_name_with_a_slash_is_retrieved(api, client):
    assert client.models.retrieve("acme/sql").id == "acme/sql"
    assert client.models.retrieve("tiny").parent is None
