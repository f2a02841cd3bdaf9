"""Keys for TCP: who may read their file, what a line is, and what is never said."""

import os

import pytest

from lorad import key_file
from lorad.errors import BadConfig

KEY = "k" * 40


@pytest.fixture
def write(tmp_path):
    def write(text, mode=0o600):
        path = tmp_path / "keys"
        path.write_text(text)
        path.chmod(mode)
        return str(path)

    return write


def read(path):
    return key_file.read(path, "tcp.api_keys_file")


def test_keys_have_names_and_comments(write):
    keys = read(write(f"# ours\n\nci {KEY}\n{KEY[1:]}  # the old one\n"))
    assert (keys.name_of(KEY), keys.name_of(KEY[1:])) == ("ci", "line 4")
    assert keys.name_of("") is keys.name_of(KEY + "x") is keys.name_of("ci") is None
    assert KEY not in repr(keys)


def test_no_path_is_no_keys():
    assert not read("")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o700])
def test_a_file_that_others_may_read_is_refused(write, mode):
    with pytest.raises(BadConfig, match="others may read") as caught:
        read(write(KEY, mode))
    assert caught.value.hint.startswith("chmod 600")
    assert read(write(KEY, 0o400))


def test_a_credential_of_systemd_may_be_read_by_its_group(write, monkeypatch, tmp_path):
    monkeypatch.setattr(key_file, "CREDENTIALS", tmp_path)
    assert read(write(KEY, 0o440))
    with pytest.raises(BadConfig):
        read(write(KEY, 0o444))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_a_file_of_somebody_else_is_refused(write):
    path = write(KEY)
    os.chown(path, 12345, -1)
    with pytest.raises(BadConfig, match="belongs to uid 12345"):
        read(path)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("short\n", "line 1 of .* is shorter than 20"),
        (f"{KEY}\na b {KEY}\n", "line 2 of .* is no key"),
        ("# nothing\n", "holds no key"),
        (f"{KEY}é\n", "ASCII"),
    ],
)
def test_a_bad_line_is_named_and_its_key_is_not_told(write, text, why):
    with pytest.raises(BadConfig, match=why) as caught:
        read(write(text))
    assert KEY not in caught.value.message + caught.value.hint


def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "keys", 0o600)
    with pytest.raises(BadConfig, match="is not a file"):
        key_file.read(str(tmp_path / "keys"), "tcp.api_keys_file")


def test_what_cannot_be_read_says_so(tmp_path):
    with pytest.raises(BadConfig, match="No such file"):
        read(str(tmp_path / "none"))
    with pytest.raises(BadConfig, match="Is a directory"):
        read(str(tmp_path))
