"""What may be written for an adapter elsewhere, and that its secrets are never shown."""

import pytest

from lorad.sources.fetch import FetchError, parse_reference

COMMIT = "0123456789abcdef0123456789abcdef01234567"
SHA256 = "ab" * 32


def refusal(text: str, revision: str = "") -> FetchError:
    with pytest.raises(FetchError) as raised:
        parse_reference(text, revision)
    error = raised.value
    assert error.code == "bad_reference"
    assert error.hint
    assert "\n" not in error.message
    return error


def test_a_hub_reference_names_a_repository_and_perhaps_a_revision() -> None:
    plain = parse_reference("hf:acme/sql-lora")
    assert (plain.scheme, plain.repo, plain.revision) == ("hf", "acme/sql-lora", "")
    assert plain.text == "hf:acme/sql-lora"
    assert not plain.pinned
    pinned = parse_reference(f"hf:acme/sql-lora@{COMMIT}")
    assert (pinned.repo, pinned.revision) == ("acme/sql-lora", COMMIT)
    assert pinned.pinned
    assert parse_reference("hf:acme/sql-lora@refs/pr/3").revision == "refs/pr/3"
    assert parse_reference("hf://acme/sql-lora") == plain


def test_the_revision_may_be_given_beside_the_reference() -> None:
    beside = parse_reference("hf:acme/sql", "v2")
    assert beside == parse_reference("hf:acme/sql@v2") == parse_reference("hf:acme/sql@v2", "v2")
    assert beside.text == "hf:acme/sql@v2"
    assert "v1" in refusal("hf:acme/sql@v1", "v2").message
    refusal("s3://bucket/prefix", "v2")
    refusal("https://host/a.zip", "v2")


@pytest.mark.parametrize(
    "text",
    [
        "",
        "acme/sql",
        "hf:",
        "hf:sql",
        "hf:acme/sql/checkpoint-4",
        "hf:acme/../x",
        "hf:a--b/c",
        "hf:acme/sql.git",
        "hf:acme/sql@",
        "hf:acme/sql@../../etc",
        "hf:acme/sql@a b",
        "hf:acme/sql\n",
        "hf:acme/sql\x1b[0m",
        "hf:acme/sq\u202el",
        "s3:bucket/prefix",
        "s3://",
        "s3://b/prefix",
        "s3://buck..et/prefix",
        "https://",
        "https:///path",
        "https://host/a/../../b",
        "https://host/a/%2e%2e/b",
        "https://host:port/a",
        "https://[::1/a",
        "https://host/a.zip#md5=00",
        "https://host/a.zip#sha256=00",
        "ftp://host/a.zip",
        "file:///etc/passwd",
        "https://host/" + "a" * 5000,
    ],
)
def test_what_is_none_is_refused_in_one_line(text: str) -> None:
    assert len(refusal(text).message) < 300


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("./sql", "'./sql' is a path", "loractl add"),
        ("s3://b/prefix", "'b' cannot be a bucket's name", "s3://BUCKET"),
        ("s3://", "names no bucket", "s3://BUCKET"),
    ],
)
def test_what_is_nearly_one_is_told_what_it_lacks(text: str, message: str, hint: str) -> None:
    assert message in refusal(text).message
    assert hint in refusal(text).hint


def test_a_page_of_the_hub_is_pointed_at_its_reference() -> None:
    assert "hf:acme/sql" in refusal("https://huggingface.co/acme/sql").hint


def test_an_s3_reference_is_a_bucket_and_a_prefix() -> None:
    reference = parse_reference("s3://models/lora/sql/")
    assert (reference.bucket, reference.prefix) == ("models", "lora/sql")
    assert reference.text == "s3://models/lora/sql"
    assert parse_reference("s3://models").prefix == ""


def test_a_url_keeps_its_secrets_to_itself() -> None:
    reference = parse_reference(
        f"https://bob:hunter2@host:8443/a.tar.gz?X-Sig=verysecret#sha256={SHA256.upper()}"
    )
    assert reference.text == f"https://host:8443/a.tar.gz#sha256={SHA256}"
    assert reference.url == "https://bob:hunter2@host:8443/a.tar.gz?X-Sig=verysecret"
    assert reference.sha256 == SHA256
    assert reference.private
    for shown in (reference.text, repr(reference), f"{reference}"):
        assert "hunter2" not in shown
        assert "verysecret" not in shown
    bad = refusal("https://bob:hunter2@host/a?X-Sig=verysecret#nonsense")
    assert "hunter2" not in bad.message + bad.hint
    assert "verysecret" not in bad.message + bad.hint


def test_a_url_without_secrets_says_all_that_fetching_needs() -> None:
    assert not parse_reference("https://host/sql/").private
    assert not parse_reference(f"https://host/sql.zip#sha256={SHA256}").private
    assert parse_reference("http://[::1]:8000/sql/").text == "http://[::1]:8000/sql/"
