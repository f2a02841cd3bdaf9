"""Tenants in the registry: kept, checked, audited, and back after a lost database."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from lorad.errors import LoradError
from lorad.registry.records import KeyRecord, TenantRecord
from lorad.registry.registry import Registry

ACME = TenantRecord(name="acme", adapters=("acme/*", "shared"), uids=(1001,), rpm=60, weight=2.0)
KEY = KeyRecord(id="abcdefgh", digest="1" * 64)
NEW = KeyRecord(id="ijklmnop", digest="2" * 64)


def code(future) -> str:
    with pytest.raises(LoradError) as refused:
        future.result()
    return refused.value.code


def test_a_tenant_comes_back_as_it_was_made(registry: Registry) -> None:
    made = registry.tenants.add(ACME, KEY, actor="uid 0 pid 1").result()
    assert registry.tenants.all() == (made,)
    key = replace(KEY, created_at=made.created_at)
    assert made == replace(ACME, created_at=made.created_at, keys=(key,))
    [row, *_] = registry.audit_log()
    told = (row.actor, row.action, row.name, row.result)
    assert told == ("uid 0 pid 1", "tenant.added", "tenant:acme", "ok")
    assert registry.events()[0].type == "tenant.added"


def test_names_and_uids_mean_one_tenant(registry: Registry) -> None:
    registry.tenants.add(ACME, None).result()
    assert code(registry.tenants.add(replace(ACME, uids=()), None)) == "name_taken"
    other = replace(ACME, name="rival", uids=(7, 1001))
    assert code(registry.tenants.add(other, None)) == "conflict"
    registry.tenants.add(replace(other, uids=(7,)), None).result()
    assert code(registry.tenants.set("rival", {"uids": (1001,)})) == "conflict"
    registry.tenants.set("acme", {"uids": (1001, 8)}).result()  # its own is no conflict
    for lost in (registry.tenants.set("x", {}), registry.tenants.remove("x")):
        assert code(lost) == "not_found"
    assert code(registry.tenants.set_key("x", KEY)) == "not_found"


def test_a_change_says_what_was_changed_and_one_that_changes_nothing_says_so(registry) -> None:
    registry.tenants.add(ACME, None).result()
    after = registry.tenants.set("acme", {"rpm": 5, "weight": 2.0}).result()
    assert (after.rpm, registry.tenants.all()) == (5, (after,))
    registry.tenants.set("acme", {"rpm": 5}).result()
    told = [(row.result, row.message) for row in registry.audit_log(2)]
    assert told == [("unchanged", ""), ("ok", "rpm")]


def test_a_rotated_key_ends_at_once_or_after_its_grace(registry: Registry) -> None:
    registry.tenants.add(ACME, KEY).result()
    both = registry.tenants.set_key("acme", NEW, grace_seconds=60.0).result()
    new, old = both.keys
    assert (new.id, new.expires_at, old.id) == (NEW.id, 0.0, KEY.id)
    assert old.expires_at == pytest.approx(new.created_at + 60.0)
    last = KeyRecord(id="qrstuvwx", digest="3" * 64)
    alone = registry.tenants.set_key("acme", last).result()
    assert [key.id for key in alone.keys] == [last.id]


def test_a_removed_tenant_takes_its_keys_along(registry: Registry) -> None:
    registry.tenants.add(ACME, KEY).result()
    registry.tenants.add(TenantRecord(name="b", adapters=()), None).result()
    assert registry.tenants.remove("acme").result() == 1
    assert registry.tenants.remove("b").result() == 0
    again = registry.tenants.add(ACME, KEY).result()  # the id is free
    assert again.keys[0].id == KEY.id


def test_times_of_last_use_only_rise(registry: Registry) -> None:
    registry.tenants.add(ACME, KEY).result()
    registry.touch_tenants({"acme": 50.0, "gone": 1.0}, {KEY.id: 50.0}).result()
    registry.touch_tenants({"acme": 40.0}, {KEY.id: 40.0}).result()
    [tenant] = registry.tenants.all()
    assert (tenant.last_used_at, tenant.keys[0].last_used_at) == (50.0, 50.0)


@pytest.mark.parametrize("backups", ["kept", "lost"])
def test_tenants_come_back_when_the_database_is_lost(
    registry: Registry, tmp_path: Path, backups: str
) -> None:
    """Else everybody might use everything."""
    registry.tenants.add(ACME, KEY).result()
    registry.tenants.add(TenantRecord(name="b", adapters=()), None).result()
    registry.tenants.remove("b").result()
    before = registry.tenants.all()
    card = registry.store.directory / ".cards" / "tenants.json"
    assert card.stat().st_mode & 0o777 == 0o600
    registry.close()
    registry.path.write_bytes(b"\x7f" * 4096)
    if backups == "lost":
        shutil.rmtree(registry.path.parent / "backups", ignore_errors=True)
    again = Registry.open(registry.path.parent, store=registry.store)
    assert again.tenants.all() == before
    assert any("tenants" in text for _, text in again.report.messages())
    again.tenants.set("acme", {"rpm": 1}).result()
    again.close()


def test_a_card_that_lags_behind_is_written_at_the_next_start(registry: Registry) -> None:
    registry.tenants.add(ACME, KEY).result()
    before = registry.tenants.all()
    cards = registry.store.directory / ".cards"
    registry.close()
    (cards / "tenants.json").unlink()
    (cards / "generation").write_text("0")
    again = Registry.open(registry.path.parent, store=registry.store)
    again.close()
    registry.path.write_bytes(b"\x7f" * 4096)
    shutil.rmtree(registry.path.parent / "backups", ignore_errors=True)
    rebuilt = Registry.open(registry.path.parent, store=registry.store)
    assert rebuilt.tenants.all() == before
    rebuilt.close()
