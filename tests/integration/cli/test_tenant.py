"""`loractl tenant` and `loractl audit`, against a real registry."""

import json
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lorad.cli.app import invoke
from lorad.registry.registry import Registry
from lorad.wire_operate import RunningConfig

KEY = re.compile(r"lorad_[a-z2-7]{8}_[A-Za-z0-9_-]{43}\n")
ME = f"uid {os.getuid()}"


@pytest.fixture
def registry() -> Iterator[Registry]:
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        opened = Registry.open(Path(folder))
        yield opened
        opened.close()


@pytest.fixture
def house(make_server: Any, registry: Registry) -> Any:
    return make_server(registry=registry)


@pytest.fixture
def loractl(house: Any, server: Any, loractl: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("LORAD_HOST", f"unix://{house.admin}")
    monkeypatch.delenv("LORAD_API_KEY", raising=False)
    return loractl


def test_a_key_is_on_stdout_alone_and_what_is_said_of_it_is_not(loractl: Any) -> None:
    made = loractl("tenant", "add", "acme")
    assert made.exit == 0 and KEY.fullmatch(made.out)
    id = made.out.split("_")[1]
    assert f"the key {id} of acme: it is shown once" in made.err
    assert "who is no tenant is refused from now on" in made.err
    assert made.out.strip() not in made.err
    second = loractl("-q", "tenant", "add", "rival")
    assert KEY.fullmatch(second.out) and second.err == ""


def test_who_gets_a_key_hears_that_nobody_looks_at_it(loractl: Any, house: Any) -> None:
    assert "nobody looks at keys" not in loractl("tenant", "add", "first").err
    operator = house.api.operator
    operator.config = RunningConfig(settings={"inference": {"auth": "peer"}}, origins={})
    made = loractl("tenant", "add", "acme")
    assert KEY.fullmatch(made.out) and '[inference] auth is "peer"' in made.err
    assert "nobody looks at keys" in loractl("tenant", "rotate-key", "acme").err
    assert "nobody looks" not in loractl("tenant", "add", "ci", "--no-key", "--uid", "1").err
    operator.config = RunningConfig(settings={"inference": {"auth": "peer+key"}}, origins={})
    assert "nobody looks at keys" not in loractl("tenant", "rotate-key", "acme").err


def test_tenants_are_listed_in_columns_and_as_json(loractl: Any) -> None:
    loractl("tenant", "add", "rival", "--no-key", "--uid", "1002", "--uid", "root", "--no-base")
    options = ["--rpm", "60", "--tpm", "9000", "--adapters", "acme/*", "--adapters", "shared"]
    key = loractl("tenant", "add", "acme", *options).out
    table = [line.split() for line in loractl("tenant", "ls").out.splitlines()]
    assert table == [
        ["NAME", "KEY-ID", "ADAPTERS", "RPM", "LAST-USED"],
        ["acme", key.split("_")[1], "acme/*,shared", "60", "-"],
        ["rival", "-", "rival/*", "-", "-"],
    ]
    wide = loractl("tenant", "ls", "-o", "wide").out.splitlines()
    assert wide[0].split()[5:] == ["UIDS", "BASE", "TPM", "QUEUE", "MAX-PRIO", "WEIGHT"]
    assert wide[2].split()[5:] == ["1002,0", "no", "-", "-", "100", "1"]
    listed = loractl("tenant", "ls", "--json").json
    assert listed["schema"] == "lorad/tenants.v1"
    assert listed["items"][0]["tokens_per_minute"] == 9000
    assert loractl("tenant", "ls", "-o", "name").out == "acme\nrival\n"
    assert key.strip() not in loractl("tenant", "ls", "--json").out


def test_what_is_set_is_what_was_given_and_a_list_can_be_emptied(loractl: Any) -> None:
    loractl("tenant", "add", "acme", "--uid", "1001", "--rpm", "60")
    changed = loractl("tenant", "set", "acme", "--uid", "", "--weight", "2.5", "--json").json
    assert (changed["uids"], changed["weight"], changed["rpm"]) == ([], 2.5, 60)
    assert loractl("tenant", "set", "acme").exit == 2
    unknown = loractl("tenant", "set", "acme", "--uid", "no-such-user")
    assert unknown.exit == 2 and "no user 'no-such-user'" in unknown.err


@pytest.mark.parametrize(
    ("argv", "exit"),
    [
        (("tenant", "add", "acme"), 6),
        (("tenant", "add", "other", "--uid", "1001"), 6),
        (("tenant", "add", "A/b"), 2),
        (("tenant", "add", "x", "--weight", "0"), 2),
        (("tenant", "set", "acme", "--weight", "nan"), 2),
        (("tenant", "set", "acme", "--weight", "inf"), 2),
        (("tenant", "set", "nobody", "--rpm", "1"), 4),
        (("tenant", "rotate-key", "nobody"), 4),
        (("tenant", "rotate-key", "acme", "--grace", "soon"), 2),
        (("-y", "tenant", "rm", "nobody"), 4),
        (("tenant", "rm", "acme"), 2),  # nobody to ask
        (("audit", "--since", "soon"), 2),
    ],
)
def test_refusals_end_in_their_exit_status(loractl: Any, argv: tuple[str, ...], exit: int) -> None:
    loractl("tenant", "add", "acme", "--uid", "1001")
    refused = loractl(*argv)
    assert (refused.exit, refused.out) == (exit, "")
    assert refused.err.startswith("error: ")
    assert [t["name"] for t in loractl("tenant", "ls", "--json").json["items"]] == ["acme"]


def test_a_rotated_key_is_printed_and_the_old_one_listed_while_it_is_good(loractl: Any) -> None:
    first = loractl("tenant", "add", "acme").out.split("_")[1]
    second = loractl("tenant", "rotate-key", "acme", "--grace", "10m").out.split("_")[1]
    keys = loractl("tenant", "ls", "--json").json["items"][0]["keys"]
    assert [key["id"] for key in keys] == [second, first]
    assert [bool(key["expires_at"]) for key in keys] == [False, True]
    made = loractl("tenant", "rotate-key", "acme", "--json").json
    assert made["schema"] == "lorad/tenant-key.v1" and KEY.fullmatch(made["key"] + "\n")
    assert len(made["tenant"]["keys"]) == 1


def test_removing_asks_and_says_what_the_last_one_means(
    loractl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("a", "b", "c"):
        loractl("tenant", "add", name)
    asked: list[str] = []

    def confirm(question: str, **options: Any) -> bool:
        asked.append(question)
        return len(asked) > 1

    monkeypatch.setattr("lorad.cli.session.typer.confirm", confirm)
    monkeypatch.setattr("lorad.cli.app.may_ask", lambda: True)
    assert loractl("tenant", "rm", "a").exit == 1
    assert loractl("tenant", "rm", "a").exit == 0
    some = loractl("-y", "tenant", "rm", "b", "nobody")
    assert (some.exit, some.out.split()[2:]) == (1, ["b", "removed", "nobody", "not_found"])
    assert loractl("tenant", "rm", "c").exit == 0
    assert "then whom the socket lets in may use everything" in asked[-1]
    assert "everything" not in asked[0]


def test_the_audit_says_who_did_what(loractl: Any, house: Any) -> None:
    loractl("tenant", "add", "acme")
    loractl("load", "acme/sql")
    loractl("tenant", "set", "nobody", "--rpm", "1")
    house.api.run(house.api.audit.flush)
    lines = [line.split() for line in loractl("audit", "--no-headers").out.splitlines()]
    told = [(" ".join(words[2:4]), words[6], words[7], words[-1]) for words in lines]
    assert told == [
        (ME, "tenant.added", "tenant:acme", "ok"),
        (ME, "load", "acme/sql", "ok"),
        (ME, "tenant.set", "tenant:nobody", "not_found"),
    ]
    assert loractl("audit", "--action", "load", "--since", "10m", "-o", "name").out == "2\n"
    assert len(loractl("audit", "--who", ME, "-n", "2", "-o", "jsonl").out.splitlines()) == 2
    assert loractl("audit", "--name", "tenant:acme", "--json").json["items"][0]["result"] == "ok"


def test_run_sends_the_key_of_the_environment(
    make_server: Any,
    registry: Registry,
    loractl: Any,
    capsys: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "k").mkdir()
    house = make_server(tmp_path / "k", registry=registry, auth="key")
    monkeypatch.setenv("LORAD_HOST", f"unix://{house.admin}")
    capsys.readouterr()
    assert invoke(["tenant", "add", "ci", "--json"]) == 0
    key = json.loads(capsys.readouterr().out)["key"]
    refused = loractl("run", "tiny", "hi")
    assert refused.exit == 5 and "API key" in refused.err
    monkeypatch.setenv("LORAD_API_KEY", key)
    assert loractl("run", "tiny", "hi").out == "Hello world\n"
