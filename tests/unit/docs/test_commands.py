"""Every command, option, setting and error code that a page of docs/ names is one that there is."""

import re
import shlex
import subprocess
import tomllib
from pathlib import Path

import pytest
import typer.main

from engine.adapters import reasons
from lorad import config_sections, errors
from lorad.cli.app import app as loractl
from lorad.cli.serve import app as lorad

DOCS = Path(__file__).parents[3] / "docs"
PAGES = sorted([DOCS.parent / "README.md", *DOCS.glob("*.md"), *DOCS.glob("howto/*.md")])
PAGES = [page for page in PAGES if page.name not in ("bench-log.md", "changelog.md")]
PROGRAMS = {"loractl": typer.main.get_command(loractl), "lorad": typer.main.get_command(lorad)}

#: Of the lorad.toml in an adapter's folder.
ADAPTERS_OWN = ("pin", "priority", "model", "labels")


def lines(text: str) -> list[str]:
    """What is to be typed: lines of shell blocks, and code in sentences."""
    shell = "".join(re.findall(r"^```sh\n(.*?)^```", text, flags=re.M | re.S))
    prose = re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S)
    typed = shell.replace("\\\n", " ").splitlines()
    return [*typed, *re.findall(r"`([^`\n]+)`", prose)]


def calls(text: str) -> list[list[str]]:
    """The words of each call of one of our programs, up to what ends a command of the shell."""
    found: list[list[str]] = []
    for line in lines(text):
        line = re.sub(r"^(sudo -u \w+|until) ", "", line.replace("...", ""))
        if not re.search(r"(^|[|&;(] *)(lorad|loractl) ", line):
            continue
        reader = shlex.shlex(line, posix=True, punctuation_chars=True)
        reader.wordchars += "{}@:,%+$#"
        reader.commenters = ""
        call: list[str] = []
        for word in reader:
            if word == "#":
                break
            if set(word) <= set("|&;()<>"):
                call = []
            elif not call and word in PROGRAMS:
                found.append(call := [word])
            else:
                call.append(word)
    return found


def wrong(words: list[str]) -> str:
    """What no program of ours takes, or nothing."""
    command = PROGRAMS[words[0]]
    options = {}
    rest = iter(words[1:])
    for word in rest:
        options |= {name: p for p in command.params for name in (*p.opts, *p.secondary_opts)}
        if re.match(r"--?[a-zA-Z]", word):
            name, equals, _ = word.partition("=")
            if name not in options:
                return word
            if not equals and not options[name].is_flag:
                next(rest, "")
        elif below := getattr(command, "commands", None):
            if word not in below and re.fullmatch(r"[a-z-]+", word):
                return word
            command = below.get(word, command)
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_command_that_a_page_shows_is_one_that_there_is(page):
    found = calls(page.read_text(encoding="utf-8"))
    assert [" ".join(words) for words in found if wrong(words)] == []


def test_a_slip_is_noticed():
    assert wrong(["loractl", "evitc", "a"]) == "evitc"
    assert wrong(["loractl", "evict", "a", "--forse"]) == "--forse"
    assert wrong(["loractl", "registry", "backup", "x"]) == ""
    assert calls("`loractl ps` and\n```sh\nlorad --check | loractl rm x # y\n```\n") == [
        ["lorad", "--check"],
        ["loractl", "rm", "x"],
        ["loractl", "ps"],
    ]


def settings() -> set[str]:
    kinds = {"models": config_sections.Model, **config_sections.SECTIONS}
    return {f"{name}.{key}" for name, kind in kinds.items() for key in kind.__struct_fields__}


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_setting_that_a_page_names_is_one_that_there_is(page):
    known = settings()
    sections = "|".join({key.split(".")[0] for key in known} - {"registry"})
    text = page.read_text(encoding="utf-8")
    named = re.findall(rf"`((?:{sections})\.[a-z_]+)(?: =[^`]*)?`", text)
    assert [
        key for key in named if key not in known and not key.endswith((".sock", ".toml", ".py"))
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_toml_that_a_page_shows_is_of_settings_that_there_are(page):
    text = page.read_text(encoding="utf-8")
    known = settings()
    for block in re.findall(r"^```toml\n(.*?)^```", text, flags=re.M | re.S):
        for section, table in tomllib.loads(block).items():
            if section in ADAPTERS_OWN:
                continue
            for keys in table if isinstance(table, list) else (table,):
                assert [key for key in keys if f"{section}.{key}" not in known] == [], block


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_shell_block_is_one_that_bash_can_read(page):
    text = page.read_text(encoding="utf-8")
    shell = "".join(re.findall(r"^```sh\n(.*?)^```", text, flags=re.M | re.S))
    done = subprocess.run(["bash", "-n"], input=shell, capture_output=True, text=True)
    assert not done.stderr


def test_troubleshooting_names_no_other_codes_and_none_of_ours_is_missing():
    text = (DOCS / "troubleshooting.md").read_text(encoding="utf-8")
    reason_codes = set(re.findall(r"`(E_[A-Z_]+)`", text))
    assert reason_codes <= set(reasons.REASONS)
    page = (DOCS / "reference/errors.md").read_text(encoding="utf-8")
    codes = dict(re.findall(r"^\| `(\w+)` \| (\d+) \| \d", page, flags=re.M))
    assert codes.keys() == set(errors.TABLE)
    for status, code in re.findall(r"^\| (\d{3}) `(\w+)`", text, flags=re.M):
        assert codes[code] == status, code
    later = {code for code, status in codes.items() if status[0] == "5" or status == "429"}
    pulls = {code for code in codes if code.startswith("source_")}
    assert {code for code in later - pulls if f"`{code}`" not in text} == set()
