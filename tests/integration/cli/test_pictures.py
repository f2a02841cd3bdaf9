"""status ping version ls ps show: every form, in order, and inert."""

import json

import msgspec
import pytest

from lorad import wire
from lorad.cli import daemon
from lorad.wire_status import DraftPicture, ModelStatus, PoolPicture, PrefixPicture, ReplicaStatus

HOSTILE = "x\x1b]0;pwn\x07\x9b2J\u202e[/bold]\n\r"


def revision(rev, **fields):
    return wire.Revision(
        rev=rev,
        rank=16,
        ranks={"q_proj": 16, "down_proj": 8},
        alpha=32.0,
        rslora=True,
        targets=("down_proj", "q_proj"),
        num_layers=2,
        dtype="bfloat16",
        file_bytes=1 << 20,
        packed_bytes=2 << 20,
        num_blocks=4,
        changes_kv=False,
        **fields,
    )


def test_ls_lists_by_name_under_the_promised_headings(server, loractl, make_row):
    server.rows["acme/sql"] = make_row("acme/sql", pinned=True, priority=80, state="active")
    done = loractl("ls")
    head, *rows = (line.split() for line in done.out.splitlines())
    assert head == ["NAME", "TENANT", "STATE", "PIN", "PRIO", "RANK", "SIZE", "REV", "LAST-USED"]
    assert rows[0] == ["acme/sql", "acme", "active", "P", "80", "8", "3M", "a1a1a1a1", "-"]
    assert [row[0] for row in rows] == ["acme/sql", "bible"]
    assert (done.exit, done.err) == (0, "")
    wide = loractl("-o", "wide", "ls").out.splitlines()[0].split()
    assert wide[2:4] == ["STATE", "REASON"]  # what a narrow terminal must not cut away
    assert wide[-4:] == ["TARGETS", "SOURCE", "LOADS", "EVICTIONS"]


@pytest.mark.parametrize("command", [["ls"], ["ps"], ["events"], ["load", "bible", "acme/sql"]])
def test_every_list_comes_in_every_form(server, loractl, make_row, command):
    server.rows = {n: make_row(n, slot=i) for i, n in enumerate(("acme/sql", "bible"))}
    server.api.run(lambda: [server.api.events.publish("slot.load", name=n) for n in server.rows])
    table = loractl(*command).out.splitlines()
    rows = [line for line in table if "bible" in line or "acme/sql" in line]
    assert len(rows) >= 2
    bare = loractl(*command, "--no-headers").out.splitlines()
    assert [line.split() for line in bare] == [line.split() for line in table[1:]]
    for form in (["-o", "json"], ["--json"], ["--output=json"]):
        document = loractl(*command, *form).json
        assert document["schema"].startswith("lorad/")
        assert document["schema"].endswith(".v1")
        assert {item["name"] for item in document["items"]} >= {"acme/sql", "bible"}
    lines = loractl(*command, "-o", "jsonl").out.splitlines()
    assert [json.loads(line) for line in lines] == document["items"]
    names = loractl(*command, "-o", "name").out.splitlines()
    assert len(names) == len(lines)
    assert loractl(*command, "-o", "wide").exit == 0


def test_ls_reads_every_page_and_stops_at_its_limit(server, loractl, make_row):
    server.rows = {f"n{i:04}": make_row(f"n{i:04}") for i in range(1203)}
    assert len(loractl("ls", "-o", "name").out.splitlines()) == 1203
    assert server.pages == 3
    few = loractl("ls", "--limit", "700", "-q", "--json")
    assert len(few.json["items"]) == 700
    assert few.json["total"] == 1203
    said = loractl("ls", "--limit", "2")
    assert said.err == "2 of 1203 shown\n"
    assert loractl("ls", "--limit", "2", "--quiet").err == ""


def test_ls_says_what_waits_in_the_inbox_beside_its_rows(server, loractl):
    server.inbox_waits = ("big", "huge")
    done = loractl("ls")
    said = "2 more in the inbox could not be taken yet: loractl show big says why\n"
    assert done.err == said and "big" not in done.out
    assert loractl("ls", "--json").json["inbox_waits"] == ["big", "huge"]


def test_ls_and_show_tell_of_an_adapter_in_anothers_folder(server, loractl):
    server.inbox_nested = ("bible",)
    done = loractl("ls")
    assert done.err == (
        "1 with another adapter's folder in theirs, which is not served: loractl show bible\n"
    )
    assert loractl("ls", "--json").json["inbox_nested"] == ["bible"]
    line = "bible.new in its folder is not served"
    server.details["bible"] = wire.AdapterDetail(
        adapter=server.rows["bible"], serving=None, candidate=None, inbox_nested=line
    )
    assert f"inbox     {line}\n" in loractl("show", "bible").out


def test_ls_filters(server, loractl, make_row):
    server.rows["bible"] = make_row("bible", labels={"env": "prod", "team": "a"})
    picked = loractl("ls", "--label", "env=prod", "--label", "team=a", "--json").json
    assert [a["name"] for a in picked["items"]] == ["bible"]
    assert picked["total"] == 1
    loractl("ls", "--state", "idle", "--tenant", "acme", "--sort", "-LAST-USED")
    told = {"state": "idle", "tenant": "acme", "model": None, "q": None, "sort": "-last_used"}
    assert server.filters == told
    assert loractl("ls", "--label", "env").exit == 2


def test_ps_shows_what_is_resident_by_name_whatever_its_slot(server, loractl, make_row):
    server.rows = {
        "cold": make_row("cold"),
        "bible": make_row("bible", slot=3, running=2, waiting=1, idle_seconds=90.0),
        "acme/sql": make_row("acme/sql", slot=7, prefix_query_tokens=4, prefix_hit_tokens=3),
    }
    done = loractl("ps")
    head, *rows = (line.split() for line in done.out.splitlines())
    assert " ".join(head) == "SLOT NAME REV STATE PIN PRIO RANK VRAM RUN WAIT HIT% IDLE"
    assert [row[:2] for row in rows] == [["7", "acme/sql"], ["3", "bible"]]
    assert rows[0][-2:] == ["75%", "-"]
    assert rows[1][-4:] == ["2", "1", "--", "1m"]
    assert done.err == "2 of 8 slots used\n"
    server.rows["bible"] = make_row(
        "bible", slot=3, generated_tokens=150, draft_tokens=80, accepted_tokens=50
    )
    head, *rows = (line.split() for line in loractl("ps", "--wide").out.splitlines())
    assert head[-3:] == ["EVICTIONS", "ACCEPT%", "TOK/DRAW"]
    assert [row[-2:] for row in rows] == [["--", "--"], ["62%", "1.50"]]
    assert loractl("ps", "--wide", "--json").json["slots_used"] == 2


def test_show_says_why_an_adapter_is_quarantined(server, loractl, make_row):
    row = make_row(
        "inbox:0123456789ab",
        state="quarantined",
        rev=None,
        reason="E_RANK_LIMIT",
        reason_message="rank 600, allowed 512; raise lora.max_rank",
        display_name="My Adapter",
    )
    server.rows["inbox:0123456789ab"] = row
    said = loractl("show", "inbox:0123456789ab").out
    assert "state     quarantined\n" in said
    assert "reason    E_RANK_LIMIT: rank 600, allowed 512; raise lora.max_rank\n" in said
    assert "(folder My Adapter)" in said
    assert loractl("show", "inbox:0123456789ab", "-o", "name").out == "inbox:0123456789ab\n"


@pytest.fixture
def detailed(server, make_row):
    """`bible` serves b2, has a candidate c3, and served d4 before."""
    server.details["bible"] = wire.AdapterDetail(
        adapter=make_row("bible", rev="b2" * 32, candidate_rev="c3" * 32),
        serving=revision("b2" * 32, warnings=("the base's name differs",)),
        candidate=revision("c3" * 32),
        history=("b2" * 32, "d4" * 32),
        events=(wire.EventItem(id=1, time="2025-03-01T09:30:00Z", type="adapter.added"),),
    )


def test_show_tells_revisions_history_and_events(loractl, detailed):
    said = loractl("show", "bible").out
    assert f"serving\n  rev      {'b2' * 32}\n" in said
    assert "  scaling  alpha/sqrt(r), alpha 32\n" in said
    assert "  rank     16  (down_proj:8 q_proj:16)\n" in said
    assert "  warning  the base's name differs\n" in said
    assert "candidate\n" in said
    assert "earlier  d4d4d4d4\n" in said
    assert said.endswith("events\n  2025-03-01T09:30:00Z  adapter.added\n")


def test_show_tells_what_an_activated_lora_is_invoked_by(server, loractl, detailed):
    before = loractl("show", "bible").out
    assert "kind" not in before and "shares the base model's prefixes" in before
    detail = server.details["bible"]
    called = msgspec.structs.replace(
        detail.serving, kinds=("aLoRA", "head"), alora_tokens=(128_000, 9), changes_kv=True
    )
    server.details["bible"] = msgspec.structs.replace(detail, serving=called)
    said = loractl("show", "bible").out
    assert "  kind     aLoRA, invoked by tokens 128000 9, head\n" in said
    assert "the base model's prefixes up to its invocation, its own from there on\n" in said


def test_show_tells_of_rows_that_an_adapter_replaces(server, loractl, detailed):
    assert "replaces" not in loractl("show", "bible").out
    detail = server.details["bible"]
    changed = msgspec.structs.replace(
        detail.serving, targets=("q_proj", "embed_tokens.rows", "lm_head.rows")
    )
    server.details["bible"] = msgspec.structs.replace(detail, serving=changed)
    assert "  replaces  rows of embed_tokens, lm_head\n" in loractl("show", "bible").out


def test_show_tells_the_kind_and_the_number_that_an_mlx_adapter_is_scaled_by(
    server, loractl, detailed
):
    detail = server.details["bible"]
    mlx = msgspec.structs.replace(
        detail.serving, kinds=("MLX", "DoRA"), alpha=None, rslora=False, scalings=(2.0,)
    )
    server.details["bible"] = msgspec.structs.replace(detail, serving=mlx)
    said = loractl("show", "bible@" + "b2" * 32).out
    assert "  kind     MLX, DoRA\n" in said
    assert "  scaling  scale 2\n" in said
    assert "alpha" not in said
    document = loractl("show", "bible", "--json").json["serving"]
    assert document["kinds"] == ["MLX", "DoRA"]
    assert (document["alpha"], document["scalings"]) == (None, [2.0])


def test_show_of_a_revision_shows_that_one_alone(loractl, detailed):
    document = loractl("show", "bible@" + "c3" * 4, "--json").json
    assert document["serving"] is None
    assert document["candidate"]["rev"] == "c3" * 32
    assert "candidate\n" not in loractl("show", "bible@" + "b2" * 32).out


@pytest.mark.parametrize(
    ("asked", "exit", "words"),
    [
        ("bible@eeeeeeee", 4, "there is no revision eeeeeeee of 'bible'; it serves b2b2b2b2"),
        ("bible@d4d4d4d4", 4, "d4d4d4d4 is an earlier revision of 'bible'; it serves b2b2b2b2"),
        ("bible@b2", 2, "a revision is 8 or more hex digits after @"),
        ("bible@../../x", 2, "a revision is 8 or more hex digits after @"),
        ("nope", 4, "no adapter named 'nope'"),
        ("../status", 4, "no adapter named '../status'"),
        ("", 4, "no adapter named ''"),
    ],
)
def test_show_of_what_is_not_there_is_an_error(loractl, detailed, asked, exit, words):
    done = loractl("show", asked)
    assert (done.exit, done.out) == (exit, "")
    assert words in done.err.splitlines()[0]
    assert done.err.splitlines()[1].startswith("  try: loractl ")


def test_nothing_from_an_adapter_can_drive_the_terminal(server, loractl, make_row):
    server.rows["bible"] = row = make_row(
        "bible",
        labels={HOSTILE: HOSTILE},
        source=HOSTILE,
        reason="E_X",
        reason_message=HOSTILE,
        display_name=HOSTILE,
        slot=0,
    )
    event = wire.EventItem(id=1, time=HOSTILE, type=HOSTILE, name=HOSTILE, message=HOSTILE)
    server.details["bible"] = wire.AdapterDetail(
        adapter=row,
        serving=revision("b2" * 32, warnings=(HOSTILE,)),
        candidate=None,
        events=(event,),
    )
    for argv in (["ls", "-o", "wide"], ["ps", "-o", "wide"], ["show", "bible"], ["ls", "--json"]):
        said = loractl(*argv)
        assert "[/bold]" in said.out
        assert all(c.isprintable() for c in said.out.replace("\n", "")), argv
    assert loractl("show", "bible", "--json").json["adapter"]["source"] == HOSTILE
    shown = loractl("show", HOSTILE)
    assert shown.exit == 4
    assert all(c.isprintable() for c in shown.err.replace("\n", ""))


def test_status_says_what_there_is(server, loractl):
    said = loractl("status").out
    assert "lorad       0.1.0  ready\n" in said
    assert "adapters    2 idle, 1 quarantined\n" in said
    assert f"inference   unix://{server.inference}\n" in said
    assert "store dir   -\n" in said, "a daemon that does not tell"
    assert loractl("status", "--json").json["schema"] == "lorad/status.v1"
    assert len(loractl("status", "-o", "jsonl").out.splitlines()) == 1


def test_status_says_what_a_model_is_for_and_how_its_guesses_went(server, loractl, monkeypatch):
    drafts = DraftPicture(
        kind="ngram", longest=4, base_draft_tokens=40, base_accepted_tokens=30, lora_draft_tokens=0
    )
    one = ModelStatus(name="tiny", base="/m", state="ready", tasks=("generate",), drafts=drafts)
    whole = msgspec.structs.replace(server._status(), models=(one,), tasks=one.tasks)
    monkeypatch.setattr(server.api.listing, "status", lambda: whole)
    said = loractl("status").out
    assert "tasks       generate\n" in said
    told = "ngram, up to 4 tokens a step: 30 of 40 right for the base (75%); none for adapters\n"
    assert f"guesses     {told}" in said
    pools = ModelStatus(name="minilm", base="/v", state="ready", tasks=("embed",))
    whole = msgspec.structs.replace(whole, models=(one, pools))
    said = loractl("status").out
    assert f"  guesses   {told}" in said and said.count("guesses") == 1
    whole = msgspec.structs.replace(whole, models=(pools,))
    assert "guesses" not in loractl("status").out


def test_status_says_how_much_room_for_own_tokens_is_used(server, loractl, monkeypatch):
    one = ModelStatus(name="tiny", base="/m", state="ready", tasks=("generate",))
    room = msgspec.structs.replace(one, extra_vocab=256, most_extra_tokens=2, own_tokenizers=3)
    wanted = "adapters use 2 of 256 ids behind the base's; own tokenizers: 3"
    for models, shown in (((one,), 0), ((room,), 1), ((one, room), 1)):
        status = msgspec.structs.replace(server._status(), models=models)
        monkeypatch.setattr(server.api.listing, "status", lambda status=status: status)
        lines = [line for line in loractl("status").out.splitlines() if "vocabulary" in line]
        assert len(lines) == shown and all(line.endswith(wanted) for line in lines)


def test_status_of_several_models_has_figures_of_each(server, loractl, monkeypatch):
    pool = PoolPicture(total=8, free=8, block_bytes=1 << 20, block_size=0)
    models = (
        ModelStatus(name="llama", base="/m/llama", state="ready", tasks=("generate",)),
        ModelStatus(
            name="minilm",
            base="/m/minilm",
            state="engine_restarting",
            reason="again",
            tasks=("embed", "rerank"),
            pool=pool,
            num_adapters=2,
            engine_restarts=1,
            device_share=0.2,
        ),
    )
    whole = msgspec.structs.replace(server._status(), models=models, pool=pool)
    monkeypatch.setattr(server.api.listing, "status", lambda: whole)
    said = loractl("status").out
    assert "  kv        0 active, 0 cached\n" in said, "blocks of all hold nobody knows how much"
    assert said.count("model       ") == 2 and "/m/llama" in said and "/m/minilm" in said
    assert "engine_restarting (again)" in said and "embed, rerank" in said
    assert "8 blocks of 1M, adapters 0 active and 0 idle" in said
    assert said.count("  share ") == 1 and "20% of the device's time" in said
    assert "no engine" in said, "of the first, which tells of no pool"
    llama, minilm = models
    writes = msgspec.structs.replace(llama, pool=msgspec.structs.replace(pool, block_size=16))
    whole = msgspec.structs.replace(whole, models=(writes, minilm))
    assert "8 blocks of 1M or 16 tokens, kv 0 active and 0 cached" in loractl("status").out


def test_status_of_replicas_has_a_line_of_each(server, loractl, monkeypatch):
    each = (
        ReplicaStatus(name="0", state="ready", device_name="H200", slots_used=3, engine_pid=7),
        ReplicaStatus(name="1", state="engine_restarting", reason="it died", running=1),
    )
    model = ModelStatus(name="tiny", base="/m", state="ready", replicas=each)
    whole = msgspec.structs.replace(server._status(), models=(model,))
    monkeypatch.setattr(server.api.listing, "status", lambda: whole)
    said = loractl("status").out
    assert "engines pid 7, -\n" in said
    assert "  replica 0  ready, H200, 3 of 0 slots used, 0 running, 0 waiting, pid 7" in said
    assert "  replica 1  engine_restarting (it died), -, 0 of 0 slots used, 1 running" in said


def test_lists_say_on_which_replicas_an_adapter_is_where_any_is(server, loractl, make_row):
    assert "REPLICA" not in loractl("ls").out + loractl("ps").out + loractl("show", "bible").out
    server.rows["bible"] = make_row("bible", slot=1, replicas=("0", "2"))
    server.rows["acme/sql"] = make_row("acme/sql", slot=0)
    for command in ("ls", "ps"):
        heading, *rows = loractl(command).out.splitlines()
        at = heading.index("REPLICA")
        assert {row[at:].split()[0] for row in rows} == {"0,2", "-"}
    assert "replica   0, 2\n" in loractl("show", "bible").out


def test_lists_say_whose_an_adapter_is_where_that_is_not_the_same_for_all(
    server, loractl, make_row
):
    assert "MODEL" not in loractl("ls").out
    server.rows["bible"] = make_row("bible", model="vectors", slot=1)
    server.rows["acme/sql"] = make_row("acme/sql", slot=0)
    for command in ("ls", "ps"):
        heading, *rows = loractl(command).out.splitlines()
        at = heading.index("MODEL")
        assert {row[at:].split()[0] for row in rows} == {"tiny", "vectors"}
    loractl("ls", "--model", "vectors")
    assert server.filters["model"] == "vectors"


def test_ping_is_0_when_ready_and_10_when_not(server, loractl):
    assert (loractl("ping").exit, loractl("ping").out) == (0, "ready\n")
    server.api.listing.not_ready = "loading_base"
    done = loractl("ping")
    assert (done.exit, done.out) == (10, "not ready: loading_base\n")
    done = loractl("ping", "--json")
    assert (done.exit, done.json["ready"], done.json["reason"]) == (10, False, "loading_base")


def test_version_tells_both_ends_and_ours_even_alone(loractl):
    assert loractl("version").out == "client  0.1.0\nserver  0.1.0\napi     v1\n"
    assert loractl("version", "--json").json["server"]["api"] == "v1"
    alone = loractl("-H", "/nowhere/admin.sock", "version")
    assert (alone.exit, alone.out) == (3, "client  0.1.0\n")
    assert loractl("-V").out == loractl("ls", "--version").out == "loractl 0.1.0\n"


def test_show_and_status_say_what_the_prefix_cache_did(server, loractl, make_row):
    counts = {"prefix_query_tokens": 400, "prefix_hit_tokens": 300, "prefix_lost_tokens": 20}
    server.rows["bible"] = make_row("bible", prefix_saved_seconds=1.25, **counts)
    told = "75% of 400 tokens hit, 1.2s of prefill saved, 5% lost to evictions\n"
    assert f"prefix    {told}" in loractl("show", "bible").out
    assert "drafts" not in loractl("show", "bible").out
    server.rows["bible"] = make_row("bible", draft_tokens=400, accepted_tokens=300)
    assert "drafts    75% of 400 tokens right\n" in loractl("show", "bible").out
    guessed = {"draft_tokens": 400, "accepted_tokens": 300, "generated_tokens": 500}
    server.rows["bible"] = make_row("bible", **guessed)
    told = "drafts    75% of 400 tokens right, 2.50 tokens a draw\n"
    assert told in loractl("show", "bible").out
    said = loractl("status").out
    assert "prefix      --\n" in said, "nothing was asked: that is no share of nothing"
    assert "  reuse     no block was asked for twice\n" in said


@pytest.mark.parametrize(
    ("found", "lost", "said"),
    [
        ((8,), (), "9 of 10 blocks with no other between"),
        ((1, 0, 6, 2, 1), (), "half of the blocks within 3, 9 of 10 within 7 others"),
        ((1, 0, 6), (0, 0, 0, 2, 1), "half of the blocks within 3, 9 of 10 within 7 others"),
        ((), (0, 0, 0, 0, 0, 10), "half of the blocks within 31, 9 of 10 within 31 others"),
        ((5, 0, 0, 5), (), "half of the blocks with no other between, 9 of 10 within 7 others"),
    ],
)
def test_a_reuse_distance_is_told_as_the_blocks_that_a_cache_needs(found, lost, said):
    assert daemon._reuse(PrefixPicture(found_blocks=found, lost_blocks=lost)) == said


def test_show_of_what_was_refused_at_once_says_why_and_nothing_of_a_life_it_never_had(
    server, loractl, make_row
):
    reason = {"reason": "E_TRUNCATED", "reason_message": "size 3,\n\n\theader says 9"}
    server.rows["bible"] = make_row("bible", state="quarantined", rev=None, rank=None, **reason)
    said = loractl("show", "bible").out
    assert "reason    E_TRUNCATED: size 3, header says 9\n" in said
    assert [line.split()[0] for line in said.splitlines()] == [
        *("name", "state", "reason", "model", "tenant", "source", "pinned", "priority", "labels")
    ]
