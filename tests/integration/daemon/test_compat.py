"""A real daemon takes and gives up adapters as vLLM's routes ask, from where it may."""

import shutil

import httpx
import pytest

from lorad import client_tenants as calls

#: `tests/contract` and `tests/integration/api` say the same of the routes.
pytestmark = pytest.mark.late


@pytest.fixture(scope="module")
def daemon(make_daemon):
    daemon = make_daemon()
    daemon.shared = daemon.root / "shared"
    daemon.shared.mkdir()
    text = daemon.config.read_text()
    allowed = f'[lora]\nallowed_roots = ["{daemon.shared}"]'
    daemon.config.write_text(text.replace("[lora]", allowed))
    return daemon.start()


@pytest.fixture
def post(daemon):
    """One POST on the admin socket."""
    transport = httpx.HTTPTransport(uds=str(daemon.admin), verify=False)
    with httpx.Client(transport=transport, base_url="http://lorad", timeout=60) as http:
        yield lambda path, **body: http.post(path, json=body)


def folder(daemon, make_adapter, name, seed):
    target = daemon.shared / name
    shutil.rmtree(target, ignore_errors=True)
    return str(make_adapter(target, seed))


def test_an_adapter_is_loaded_replaced_and_unloaded(daemon, post, make_adapter):
    path = folder(daemon, make_adapter, "sql", 1)
    answer = post("/v1/load_lora_adapter", lora_name="sql", lora_path=path)
    assert (answer.status_code, answer.text) == (
        200,
        "Success: LoRA adapter 'sql' added successfully.",
    )
    first = daemon.adapter("sql")
    assert first.state == "idle"
    text = daemon.text("sql")
    assert text != daemon.text("tiny")

    assert post("/v1/load_lora_adapter", lora_name="sql", lora_path=path).status_code == 200

    path = folder(daemon, make_adapter, "sql", 2)
    taken = post("/v1/load_lora_adapter", lora_name="sql", lora_path=path)
    assert (taken.status_code, taken.json()["error"]["code"]) == (409, "name_taken")
    assert daemon.adapter("sql").rev == first.rev

    replaced = post("/v1/load_lora_adapter", lora_name="sql", lora_path=path, load_inplace=True)
    assert replaced.status_code == 200, replaced.text
    assert daemon.adapter("sql").rev != first.rev

    gone = post("/v1/unload_lora_adapter", lora_name="sql")
    assert gone.text == "Success: LoRA adapter 'sql' removed successfully."
    assert daemon.ask("sql").status_code == 404
    again = post("/v1/unload_lora_adapter", lora_name="sql")
    assert (again.status_code, again.json()["error"]["code"]) == (404, "model_not_found")


def test_a_folder_elsewhere_is_refused_and_the_refusal_is_in_the_audit(
    daemon, post, make_adapter, poll
):
    path = str(make_adapter(daemon.root / "elsewhere", 3))
    answer = post("/v1/load_lora_adapter", lora_name="other", lora_path=path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
    assert "allowed_roots" in answer.json()["error"]["details"]["hint"]

    def refusals():
        with daemon.client() as client:
            return calls.audit(client, limit=9, seconds=0, actor="", action="", name="other").items

    [row] = poll(refusals, lambda: "the refusal in the audit")
    assert (row.action, row.result) == ("add", "permission_denied")


def test_a_folder_that_holds_no_adapter_is_a_422_with_its_reason(daemon, post):
    (daemon.shared / "empty").mkdir()
    path = str(daemon.shared / "empty")
    answer = post("/v1/load_lora_adapter", lora_name="empty", lora_path=path)
    assert (answer.status_code, answer.json()["error"]["code"]) == (422, "adapter_invalid")
    assert answer.json()["error"]["details"]["reason"].startswith("E_")


def test_tools_go_into_the_adapters_own_template_where_it_takes_them(daemon, post, make_adapter):
    path = folder(daemon, make_adapter, "tooled", 4)
    names = "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    (daemon.shared / "tooled" / "chat_template.jinja").write_text(
        names + "{{ messages[0].content }}"
    )
    assert post("/v1/load_lora_adapter", lora_name="tooled", lora_path=path).status_code == 200
    tools = [{"type": "function", "function": {"name": "look_up"}}]
    chat = {"model": "tooled", "messages": [{"role": "user", "content": "Hi"}], "tools": tools}
    with daemon.http() as http:
        tokens = http.post("/tokenize", json=chat).json()["tokens"]
        back = http.post("/detokenize", json={"model": "tooled", "tokens": tokens}).json()
        assert back == {"prompt": "[look_up]Hi"}
        answer = http.post("/v1/chat/completions", json=chat | {"max_tokens": 4})
        assert answer.status_code == 200, answer.text
        assert answer.json()["usage"]["prompt_tokens"] == len(tokens)
        base = http.post("/v1/chat/completions", json=chat | {"model": "tiny"})
    assert (base.status_code, base.json()["error"]["param"]) == (400, "tools")
