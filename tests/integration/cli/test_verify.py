"""verify: what is sent, what is printed, and what a red line costs."""

from lorad import wire

WELL = wire.Verification(
    name="bible",
    ok=True,
    rev="a1" * 32,
    modules=210,
    worst_error=2.4e-7,
    worst_module="layer 3 k_proj",
    tolerance=1e-4,
    bytes_checked=3 << 20,
    also=("rows", "tokenizer"),
)
ILL = wire.Verification(
    name="devil",
    ok=False,
    rev="b2" * 32,
    code="adapter_damaged",
    message="its bytes on the GPU were changed: layer 7 o_proj: 2 bytes of B differ",
    hint="loractl evict devil --to disk",
    modules=210,
    worst_error=0.25,
    worst_module="layer 7 o_proj",
    tolerance=1e-4,
    bytes_checked=3 << 20,
    bytes_different=2,
    findings=(
        wire.VerifyFinding(what="resident", layer=7, module="o_proj", message="2 bytes of B"),
        wire.VerifyFinding(what="packed", message="block 0 of 2 is not what was packed"),
    ),
)


def test_a_healthy_one_is_a_line_that_says_ok(server, loractl):
    server.api.adapters.verifications = (WELL,)
    done = loractl("verify", "bible")
    assert (done.exit, done.err) == (0, "")
    heading, line = done.out.splitlines()
    headings = ["NAME", "RESULT", "MODULES", "WORST", "BYTES", "ALSO", "DIFFER", "REV"]
    assert heading.split() == headings
    own = ["rows,tokenizer", "0", "a1a1a1a1"]
    assert line.split() == ["bible", "ok", "210", "2.4e-07", "3M", *own]
    ((verb, names, wish),) = server.calls
    assert (verb, names, wish.full, wish.all) == ("verify", ("bible",), False, False)


def test_damage_is_named_on_stderr_and_exits_8(server, loractl):
    server.api.adapters.verifications = (ILL,)
    done = loractl("verify", "devil", "--full")
    assert done.exit == 8
    assert done.out.splitlines()[1].split()[:2] == ["devil", "adapter_damaged"]
    lines = done.err.splitlines()
    assert lines[0] == "devil: resident layer 7 o_proj: 2 bytes of B"
    assert lines[1] == "devil: packed: block 0 of 2 is not what was packed"
    assert lines[2].startswith("error: its bytes on the GPU were changed: layer 7 o_proj")
    assert lines[3] == "  try: loractl evict devil --to disk"
    assert server.calls[0][2].full


def test_among_several_one_failure_is_1_and_json_has_them_all(server, loractl):
    server.api.adapters.verifications = (WELL, ILL)
    done = loractl("verify", "--all")
    assert done.exit == 1 and "1 of 2 failed" in done.err
    assert server.calls[0][2].all
    document = loractl("verify", "bible", "devil", "--json").json
    assert document["schema"] == "lorad/verifications.v1"
    assert [item["ok"] for item in document["items"]] == [True, False]
    assert document["items"][1]["findings"][0]["layer"] == 7


def test_names_and_all_are_one_or_the_other(server, loractl):
    for words in ((), ("bible", "--all")):
        assert loractl("verify", *words).exit == 2
    assert not server.calls
