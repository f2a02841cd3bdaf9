"""What `lorad gateway` is told: members, and who may come."""

import os
import signal
import tempfile
from pathlib import Path

import pytest

from lorad.config import Settings
from lorad.errors import BadConfig
from lorad.fleet.gateway import Gateway
from lorad.fleet.line import Site
from lorad.fleet.serving import Wanted, member_key, run, site_of, sites_of


def test_a_member_is_a_folder_of_sockets_or_two_urls():
    sockets = Site("a", "/run/lorad/inference.sock", "/run/lorad/admin.sock")
    assert site_of("a=/run/lorad", "key") == sockets
    assert site_of("b=http://h:1,http://h:2", "key") == Site("b", "http://h:1", "http://h:2", "key")
    odd = ("a=http://h:1", "a=http://h:99999,http://h:1", "a=http://[::1,http://x", "a=x,y")
    for word in ("", "a", "=x", "a=", "a/b=/x", "a=/x,", "a=ftp://h,http://h", *odd):
        with pytest.raises(BadConfig, match="is no member"):
            site_of(word)
    with pytest.raises(BadConfig, match="same name"):
        sites_of(["a=/x", "a=/y"])


def test_members_that_ask_for_no_key_are_not_opened_to_other_machines(tmp_path):
    wanted = Wanted(
        sites=sites_of([f"a={tmp_path}"]),
        catalog=str(tmp_path / "c"),
        folder=tmp_path / "g",
        bind="0.0.0.0:0",
    )
    with pytest.raises(BadConfig, match="without --api-keys"):
        run(wanted, Settings())
    assert not (tmp_path / "g").exists()


def test_a_bind_or_a_folder_that_is_none_is_one_line(tmp_path):
    def wanted(**more):
        given = {"catalog": str(tmp_path / "c"), "folder": tmp_path / "g"} | more
        return Wanted(sites=sites_of([f"a={tmp_path}"]), **given)

    for bind in ("nonsense", "127.0.0.1:99999", "127.0.0.1:x", "localhost:1"):
        with pytest.raises(BadConfig, match="--bind"):
            run(wanted(bind=bind), Settings())
    assert not (tmp_path / "g").exists()
    (tmp_path / "file").touch()
    for folder in (tmp_path / "file", tmp_path / "file" / "g"):
        with pytest.raises(BadConfig, match="--folder"):
            run(wanted(folder=folder), Settings())


def test_the_key_of_members_is_the_first_of_its_file(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# of ours\nops sk-1 # the new one\nold sk-0\n# end\n")
    assert (member_key(file), member_key(None)) == ("sk-1", "")
    for data in (b"", b"# none\n", b"\xff\xfe", "schl\u00fcssel".encode()):
        file.write_bytes(data)
        with pytest.raises(BadConfig, match="--member-key"):
            member_key(file)
    for path in (tmp_path, tmp_path / "none"):
        with pytest.raises(BadConfig, match="--member-key"):
            member_key(path)


@pytest.fixture
def interrupts():
    """A SIGTERM that nobody hears ends the test, and not all of them."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_signal_while_it_begins_ends_it_as_one_later_would(monkeypatch, interrupts):
    """Others would wait a minute for one that had said that it comes, and not that it goes."""
    begin = Gateway.start

    async def told_to_end(gateway):
        await begin(gateway)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(Gateway, "start", told_to_end)
    with tempfile.TemporaryDirectory(dir="/tmp") as short:  # paths of sockets have to be
        folder = Path(short)
        catalog = str(folder / "c")
        wanted = Wanted(sites=sites_of([f"a={folder}"]), catalog=catalog, folder=folder / "g")
        assert run(wanted, Settings()) == 0
        assert [path.name for path in (folder / "g").iterdir()] == ["uploads"]
        assert not (folder / "c" / "gateways").exists()
