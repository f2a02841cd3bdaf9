"""`speculation.py`: answers with drafts beside the same without, and a way that fails."""

import json
from argparse import Namespace

import speculation
from speculation import Case, Told, beside, ways


def test_rates_and_texts_are_held_against_those_without_drafts() -> None:
    off = Told([[1, 2, 3, 4], [5, 6]], seconds=3.0)
    told = beside(Told([[1, 2, 9, 9], [5, 6]], seconds=1.0), off)
    assert told == {"over_off": 3.0, "same": 1, "of": 2, "shared": round(4 / 6, 4)}
    shorter = beside(Told([[1, 2], [5, 6]], seconds=1.0), off)
    assert (shorter["over_off"], shorter["same"]) == (2.0, 1)


def test_a_model_drafts_only_where_one_is_given() -> None:
    asked = Namespace(longest=[4, 8], draft=None)
    assert list(ways(asked)) == [("off", 0), ("ngram", 4), ("ngram", 8)]
    asked.draft = "short"
    assert ("draft", 8) in list(ways(asked))


def test_a_way_that_fails_is_told_and_the_others_go_on(monkeypatch, capsys, tmp_path) -> None:
    def run(options, way, longest, prompts):
        if way == "off":
            raise MemoryError("no room")
        yield Case(1, "ask", "base"), Told([[1]], 0.5), {"drafted": 0, "accepted": 0}

    monkeypatch.setattr(speculation, "read_prompts", lambda model: {})
    monkeypatch.setattr(speculation, "run", run)
    assert speculation.main(["--model", str(tmp_path), "--longest", "4"]) == 1
    failed, went_on = map(json.loads, capsys.readouterr().out.splitlines())
    assert "no room" in failed["error"] and went_on["tokens_per_s"] == 2.0
    assert "over_off" not in went_on
