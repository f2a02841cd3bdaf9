"""Archives: the adapter's files come out, and nothing that the archive's maker planned."""

import gzip
import io
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lorad.sources import archive
from lorad.sources.fetch import Cancelled, FetchError
from lorad.sources.patience import Meter, silent_meter

ADAPTER = {
    "adapter_config.json": b'{"peft_type": "LORA"}',
    "adapter_model.safetensors": bytes(range(256)) * 512,
}
LIMIT = 1 << 20


def tar(
    files: dict[str, bytes], *, extra: tuple[tarfile.TarInfo, ...] = (), **options: Any
) -> bytes:
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode=options.pop("mode", "w:gz"), **options) as made:
        for info in extra:
            made.addfile(info)
        for name, body in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(body)
            made.addfile(info, io.BytesIO(body))
    return out.getvalue()


def zipped(
    files: dict[str, bytes], change: Callable[[zipfile.ZipInfo], None] | None = None
) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as made:
        for name, body in files.items():
            info = zipfile.ZipInfo(name)
            info.compress_type = zipfile.ZIP_DEFLATED
            if change:
                change(info)
            made.writestr(info, body)
    return out.getvalue()


def entry(name: str, kind: bytes = tarfile.REGTYPE, **fields: Any) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type = kind
    for field, value in fields.items():
        setattr(info, field, value)
    return info


def unpack(packed: bytes, folder: Path, limit: int = LIMIT) -> dict[str, bytes]:
    archive.unpack(io.BytesIO(packed), folder, limit, silent_meter())
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def refusal(packed: bytes, folder: Path, limit: int = LIMIT) -> FetchError:
    with pytest.raises(FetchError) as raised:
        unpack(packed, folder, limit)
    assert "\n" not in raised.value.message
    return raised.value


@pytest.mark.parametrize("mode", ["w", "w:gz"])
@pytest.mark.parametrize("form", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_tar_in_every_usual_form(tmp_path: Path, mode: str, form: int) -> None:
    long = {"x" * 90 + "/" + "y" * 80: b"far down"}
    assert unpack(tar({**ADAPTER, **long}, mode=mode, format=form), tmp_path) == ADAPTER


def test_the_only_folder_is_stripped_and_litter_does_not_count(tmp_path: Path) -> None:
    files = {f"sql/{name}": body for name, body in ADAPTER.items()}
    litter = {"__MACOSX/sql/._adapter_config.json": b"x", "._sql": b"x", "sql/.DS_Store": b"x"}
    assert unpack(zipped({**litter, **files}), tmp_path) == ADAPTER


def test_files_of_two_folders_are_no_adapter(tmp_path: Path) -> None:
    files = {f"one/{name}": body for name, body in ADAPTER.items()}
    error = refusal(tar({**files, "two/adapter_config.json": b"{}"}), tmp_path)
    assert (error.code, error.details["reason"]) == ("adapter_invalid", "E_NESTED")


def test_a_pickle_in_an_archive_is_called_one(tmp_path: Path) -> None:
    files = {"adapter_config.json": b"{}", "adapter_model.bin": b"pickle"}
    assert refusal(tar(files), tmp_path).details["reason"] == "E_PICKLE"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name",
    [
        "/etc/cron.d/lorad",
        "../adapter_config.json",
        "sql/../../x",
        "a\\..\\..\\x",
        "C:/x",
        "a\x1b[0m",
        "a\u202eb",
    ],
)
@pytest.mark.parametrize("pack", [tar, zipped])
def test_a_name_that_leads_elsewhere_spoils_the_whole_archive(
    tmp_path: Path, name: str, pack: Callable[..., bytes]
) -> None:
    folder = tmp_path / "in" / "side"
    folder.mkdir(parents=True)
    error = refusal(pack({**ADAPTER, name: b"x"}), folder)
    assert error.code == "source_corrupt"
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize(
    "bad",
    [
        entry("adapter_model.safetensors", tarfile.SYMTYPE, linkname="/etc/passwd"),
        entry("adapter_model.safetensors", tarfile.LNKTYPE, linkname="adapter_config.json"),
        entry("null", tarfile.CHRTYPE, devmajor=1, devminor=3),
        entry("disk", tarfile.BLKTYPE),
        entry("pipe", tarfile.FIFOTYPE),
        entry("sql", tarfile.SYMTYPE, linkname="."),
    ],
    ids=["symlink", "hardlink", "device", "disk", "fifo", "folder-link"],
)
def test_links_and_devices_spoil_a_tar(tmp_path: Path, bad: tarfile.TarInfo) -> None:
    error = refusal(tar(ADAPTER, extra=(bad,)), tmp_path)
    assert error.code == "source_corrupt"
    assert "link" in error.message
    assert list(tmp_path.iterdir()) == []


def test_links_and_ciphers_spoil_a_zip(tmp_path: Path) -> None:
    def link(info: zipfile.ZipInfo) -> None:
        info.create_system = 3
        info.external_attr = 0o120777 << 16

    assert "link" in refusal(zipped(ADAPTER, link), tmp_path).message
    packed = bytearray(zipped(ADAPTER))
    at = packed.index(b"PK\1\2")
    packed[at + 8] |= 1  # general purpose bit 0, of the first entry of the list
    assert "which is encrypted" in refusal(bytes(packed), tmp_path).message
    assert list(tmp_path.iterdir()) == []


def test_two_entries_of_one_name_spoil_the_archive(tmp_path: Path) -> None:
    twice = io.BytesIO()
    with tarfile.open(fileobj=twice, mode="w") as made:
        for name, body in (*ADAPTER.items(), ("adapter_config.json", b"other")):
            made.addfile(entry(name, size=len(body)), io.BytesIO(body))
    assert "two entries" in refusal(twice.getvalue(), tmp_path).message


def test_a_bomb_is_refused_by_what_it_says_of_itself(tmp_path: Path) -> None:
    bomb = tar({**ADAPTER, "optimizer.pt": bytes(8 << 20)})
    assert len(bomb) < LIMIT
    assert refusal(bomb, tmp_path).code == "source_too_big"
    assert refusal(zipped({**ADAPTER, "x": bytes(8 << 20)}), tmp_path).code == "source_too_big"
    assert list(tmp_path.iterdir()) == []


def test_a_tar_that_claims_exabytes_is_refused_at_its_header(tmp_path: Path) -> None:
    header = entry("adapter_model.safetensors", size=1 << 60).tobuf(tarfile.GNU_FORMAT)
    assert refusal(gzip.compress(header + bytes(1024)), tmp_path).code == "source_too_big"


def test_a_header_of_absurd_size_is_not_read_into_memory(tmp_path: Path) -> None:
    huge = entry("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=1 << 30)
    packed = gzip.compress(huge.tobuf(tarfile.GNU_FORMAT) + bytes(16 << 20))
    assert "allowed are" in refusal(packed, tmp_path).message
    pax = entry("./PaxHeaders/x", tarfile.XHDTYPE, size=1 << 30)
    packed = gzip.compress(pax.tobuf(tarfile.PAX_FORMAT) + bytes(16 << 20))
    assert "allowed are" in refusal(packed, tmp_path).message


def test_long_names_one_upon_the_other_end_in_a_refusal(tmp_path: Path) -> None:
    link = entry("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=1).tobuf(tarfile.GNU_FORMAT)
    packed = gzip.compress((link + b"a" + bytes(511)) * 5000)
    assert refusal(packed, tmp_path).code == "source_corrupt"


def test_headers_that_are_absurd_together_are_not_read_into_memory(tmp_path: Path) -> None:
    said = entry("x", pax_headers={"comment": "x" * (6 << 20)}).tobuf(tarfile.PAX_FORMAT)
    spread = gzip.compress(said * 8, 1)
    assert len(spread) < 1 << 20
    assert "bytes of headers" in refusal(spread, tmp_path).message
    piled = entry("././@LongLink", tarfile.GNUTYPE_LONGNAME, size=6 << 20).tobuf(tarfile.GNU_FORMAT)
    stack = gzip.compress((piled + bytes(6 << 20)) * 8, 1)
    assert "bytes of headers" in refusal(stack, tmp_path).message


def test_looking_through_an_archive_can_be_cancelled(tmp_path: Path) -> None:
    meter = Meter(lambda done, total: None, lambda: True, None)
    with pytest.raises(Cancelled):
        archive.unpack(io.BytesIO(tar({f"f{n}": b"" for n in range(9)})), tmp_path, LIMIT, meter)


def test_too_many_entries_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(archive, "MAX_ENTRIES", 10)
    many = {f"f{number}": b"" for number in range(11)}
    assert "more than 10" in refusal(tar({**ADAPTER, **many}), tmp_path).message
    assert "more than 10" in refusal(zipped({**ADAPTER, **many}), tmp_path).message


@pytest.mark.parametrize("said", [1000, 200_000])
def test_a_zip_whose_entry_has_another_size_than_it_says_is_refused(
    tmp_path: Path, said: int
) -> None:
    body = bytes(range(256)) * 512
    packed = zipped({**ADAPTER, "adapter_model.safetensors": body})
    size = len(body).to_bytes(4, "little")
    lying = packed.replace(size, said.to_bytes(4, "little"))
    assert lying != packed
    assert refusal(lying, tmp_path).code == "source_corrupt"
    assert "adapter_model.safetensors" not in {path.name for path in tmp_path.iterdir()}


@pytest.mark.parametrize("share", [0.02, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("pack", [tar, zipped])
def test_half_an_archive_is_refused(
    tmp_path: Path, share: float, pack: Callable[..., bytes]
) -> None:
    whole = pack(ADAPTER)
    assert refusal(whole[: int(len(whole) * share)], tmp_path).code in (
        "source_corrupt",
        "adapter_invalid",
    )


def test_what_is_no_archive_is_called_so(tmp_path: Path) -> None:
    for content in (b"", b"<html>sign in</html>", b"\x1f\x8b", bytes(1000), b"PK\3\4"):
        assert refusal(content, tmp_path).code == "source_corrupt"


def test_a_flipped_byte_anywhere_is_an_error_or_harmless(tmp_path: Path) -> None:
    for whole in (tar(ADAPTER, mode="w"), tar(ADAPTER), zipped(ADAPTER)):
        for at in range(0, len(whole), max(1, len(whole) // 60)):
            broken = bytearray(whole)
            broken[at] ^= 0xFF
            folder = tmp_path / f"{len(whole)}-{at}"
            folder.mkdir()
            try:
                found = unpack(bytes(broken), folder)
            except FetchError:
                continue
            assert set(found) == set(ADAPTER)
            if whole[257:262] != b"ustar":  # a plain tar has no checksum: inspection's to judge
                assert found == ADAPTER, f"byte {at}"


def test_a_flipped_bit_is_found_where_nothing_was_compressed(tmp_path: Path) -> None:
    whole = bytearray(gzip.compress(tar(ADAPTER, mode="w"), 0))
    whole[len(whole) // 2] ^= 1
    refused = refusal(bytes(whole), tmp_path)
    assert (refused.code, "CRC" in refused.message) == ("source_corrupt", True)
    joined = bytearray(gzip.compress(tar(ADAPTER, mode="w")[:60_000]))
    joined[-8] ^= 1  # the checksum of a part that ends within a file
    joined += gzip.compress(tar(ADAPTER, mode="w")[60_000:])
    assert refusal(bytes(joined), tmp_path).code == "source_corrupt"


def test_what_lies_behind_the_last_entry_is_no_bomb(tmp_path: Path) -> None:
    packed = gzip.compress(tar(ADAPTER, mode="w") + bytes(4 << 20), 1)
    assert "behind its last entry" in refusal(packed, tmp_path).message
