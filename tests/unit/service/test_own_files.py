"""A tokenizer of an adapter's own is read at its registration, and packed files say where it is."""

import json
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from engine.errors import AdapterInvalid
from engine.messages import PackedModule
from lorad.config import Settings
from lorad.config_sections import Model
from lorad.service import files as files_module
from lorad.service.files import AdapterFiles
from lorad.service.packed_files import PackedFiles
from lorad.text.own_tokenizer import OwnTokenizers
from lorad.text.tokenizer import Tokenizer
from tests.unit.service.test_own_text import write


@pytest.fixture
def inspected(tmp_path, monkeypatch, world_manifest):
    """Inspect a folder whose manifest says so many tokens, and a tokenizer of its own or not."""
    base = write(tmp_path / "base")
    tokenizers = OwnTokenizers(Tokenizer.load(base), base)
    settings = Settings(models=(Model(base=str(base)),))
    files = AdapterFiles(settings, base, None, None, tokenizers=tokenizers)
    monkeypatch.setattr(files_module, "revision_digest", lambda folder, manifest: "d" * 64)

    def inspect(folder, num_tokens, own=True):
        found = msgspec.structs.replace(world_manifest, num_tokens=num_tokens, own_tokenizer=own)
        monkeypatch.setattr(files_module, "inspect", lambda *_, **more: found)
        return files.inspect(folder)

    inspect.tokenizers, inspect.files = tokenizers, files
    return inspect


@pytest.fixture
def world_manifest(memory_dir):
    """Of an adapter without tensors."""
    from tests.unit.service.conftest import World

    folder = memory_dir / "one"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"n": 1}))
    face = SimpleNamespace(rev=lambda n: "d" * 64, modules=lambda rev: ())
    return World.inspect(face, folder)[0]


def test_it_is_there_when_the_first_request_comes(inspected, tmp_path):
    folder = write(tmp_path / "a", "<tool>")
    inspected(folder, 259)
    [kept] = inspected.tokenizers._kept.values()
    assert kept[0] is inspected.tokenizers.read(folder)[0]


@pytest.mark.parametrize("own", [True, False])
def test_one_that_cannot_be_read_is_refused_where_it_counts(inspected, tmp_path, own):
    folder = write(tmp_path / "a", "<tool>")
    (folder / "tokenizer.json").write_text('{"model": 3}')
    if not own:
        inspected(folder, 0, own)
        return
    with pytest.raises(AdapterInvalid, match=r"^tokenizer\.json is not a tokenizer") as caught:
        inspected(folder, 259)
    assert caught.value.reason == "E_TOKENIZER_INVALID"
    assert "remove the tokenizer files" in caught.value.hint
    assert str(tmp_path) not in caught.value.message, "a name of ours says nothing to anybody"


@pytest.mark.parametrize("template", [b"{% if %}", b"\xff"])
def test_a_chat_template_that_cannot_be_used_is_refused_with_what_to_do(
    inspected, tmp_path, template
):
    folder = write(tmp_path / "a", "<tool>")
    (folder / "chat_template.jinja").write_bytes(template)
    with pytest.raises(AdapterInvalid, match=r"^chat template: ") as caught:
        inspected(folder, 259)
    assert "remove it to use the base's" in caught.value.hint
    assert str(tmp_path) not in caught.value.message


@pytest.mark.parametrize(
    ("changed", "hint"),
    [
        ({"id": 5}, files_module.RESAVE),
        ({"content": "  ", "lstrip": True}, "save the tokenizer without these flags"),
        ({"content": "x" * 513}, "remove the tokenizer files to use the base's"),
    ],
)
def test_what_to_do_about_a_refused_tokenizer_is_said_once(inspected, tmp_path, changed, hint):
    folder = write(tmp_path / "a", "<tool>")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["added_tokens"][-1].update(changed)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(AdapterInvalid) as caught:
        inspected(folder, 259)
    assert caught.value.hint == hint
    assert "save" not in caught.value.message and "remove" not in caught.value.message


def test_ids_beyond_those_that_were_found_are_refused(inspected, tmp_path):
    folder = write(tmp_path / "a", "<tool>", "<more>")
    with pytest.raises(AdapterInvalid, match="ids up to 259, and 259 were found"):
        inspected(folder, 259)


def test_special_tokens_that_cannot_be_read_are_refused(inspected, tmp_path):
    folder = write(tmp_path / "a", template="hi")
    (folder / "special_tokens_map.json").write_text("[")
    with pytest.raises(AdapterInvalid, match="special_tokens_map") as caught:
        inspected(folder, 0, own=False)
    assert caught.value.reason == "E_TOKENIZER_INVALID"


def test_the_engine_hears_of_a_vocabulary_as_it_was_registered(world):
    own = {"num_tokens": 259, "own_tokenizer": True}

    async def scenario(w):
        inspect, pack, packed = w.inspect, w.pack, []

        def other(folder, /):
            found, rev = inspect(folder)
            return msgspec.structs.replace(found, **own), rev

        async def rows(folder, out):
            # Which rows are its own is told by the base, whose id is in the file's name, then.
            modules = (PackedModule(1, "lm_head.rows", 1, 1.0, tokens=(258,)),)
            w.modules = lambda rev: modules
            packed.append(await pack(folder, out))
            assert packed[-1].layout == f"{w.info.layout}w{w.info.base}"
            return msgspec.structs.replace(packed[-1], num_tokens=7)

        w.intake._inspect, w.intake._pack = other, rows
        added = await w.add("a", 1)
        folder: Path = w.store.path(added.rev)
        files: PackedFiles = w.revisions.files
        for there in (False, True):
            if there:
                folder.chmod(0o750)
                (folder / "tokenizer.json").write_text("{}")
            manifest = await files.packed(added.rev)
            assert manifest.num_tokens == 259
            assert manifest.tokenizer == (str(folder / "tokenizer.json") if there else "")
            assert [m.module for m in manifest.modules] == ["lm_head.rows"], "the packer's word"
        assert len(packed) == 1

    world(scenario)


def test_only_a_chat_template_that_is_not_the_bases_is_told(inspected, tmp_path):
    base = write(tmp_path / "base", template="{{ messages[0].content }}")
    config = {"chat_template": "{{ messages[0].content }}"}
    for copy in (write(tmp_path / "a", template=config["chat_template"]), base):
        assert inspected(copy, 0, False)[0].warnings == ()
    assert inspected(write(tmp_path / "b", config=config), 0, False)[0].warnings == ()
    own = write(tmp_path / "c", template="{{ messages | length }}")
    assert inspected(own, 0, False)[0].warnings == (files_module.OWN_TEMPLATE,)


def test_beside_a_base_whose_tokenizer_was_changed_meanwhile_none_is_taken(
    inspected, tmp_path, world_manifest, monkeypatch
):
    """It was told beside the new files, and requests are read by the former until a restart."""
    told = ["b1"]
    monkeypatch.setattr(files_module, "base_text", lambda spec, base: told[-1])
    said = {"num_tokens": 0, "own_tokenizer": False}
    found = msgspec.structs.replace(world_manifest, **said, base_text="b1")
    files = inspected.files
    monkeypatch.setattr(files_module, "inspect", lambda *_, **more: found)
    folder = write(tmp_path / "a")
    assert files.inspect(folder)[0].base_text == "b1" == files.base_text()
    told.append("b2")
    found = msgspec.structs.replace(found, base_text="b2")
    with pytest.raises(AdapterInvalid, match="changed since lorad started") as caught:
        files.inspect(folder)
    assert caught.value.reason == "E_TOKENIZER_INVALID" and "restart" in caught.value.hint
