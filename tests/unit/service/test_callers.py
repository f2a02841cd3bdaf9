"""Callers: whose a connection or a key is, in every mode, and what it may ask for."""

import itertools
import logging

import pytest

from lorad.errors import LoradError
from lorad.registry.records import KeyRecord, TenantRecord
from lorad.service import keys
from lorad.service.callers import Callers
from lorad.service.tenants import ANYBODY, Caller, Tenant, account_of

ACME = keys.new_key()
OLD = keys.new_key()
RECORDS = (
    TenantRecord(
        name="acme",
        adapters=("acme/*",),
        uids=(1001,),
        keys=(
            KeyRecord(id=ACME.id, digest=ACME.digest),
            KeyRecord(id=OLD.id, digest=OLD.digest, expires_at=500.0),
        ),
    ),
    TenantRecord(name="rival", adapters=("rival/*", "shared-?"), base=False, uids=(1002, 1003)),
)
MODES = ("peer", "key", "peer+key")


@pytest.fixture
def callers():
    return Callers(("tiny",), operators=(0,), tenants=RECORDS, clock=lambda: 400.0)


def who(callers, uid, key, auth):
    """The tenant's name, "operator", or the code of the refusal."""
    try:
        caller = callers.identify(uid, 7, key, auth)
    except LoradError as error:
        return error.code
    assert caller.tenant is not None
    return caller.tenant.name or "operator"


@pytest.mark.parametrize(
    ("uid", "key", "expected"),
    [
        (1001, "", ("acme", "invalid_api_key", "acme")),
        (1003, "", ("rival", "invalid_api_key", "rival")),
        (9, "", ("permission_denied", "invalid_api_key", "invalid_api_key")),
        (0, "", ("operator", "invalid_api_key", "operator")),
        (None, "", ("permission_denied", "invalid_api_key", "invalid_api_key")),
        (1002, ACME.text, ("rival", "acme", "acme")),
        (9, ACME.text, ("permission_denied", "acme", "acme")),
        (None, ACME.text, ("permission_denied", "acme", "acme")),
        (1001, "unused", ("acme", "invalid_api_key", "acme")),
        (1001, keys.new_key().text, ("acme", "invalid_api_key", "invalid_api_key")),
        (1001, ACME.text[:-1] + "!", ("acme", "invalid_api_key", "invalid_api_key")),
    ],
    ids=itertools.count(),  # keys are drawn anew in every process, and would name the tests
)
def test_the_mode_says_what_counts(callers, uid, key, expected):
    assert tuple(who(callers, uid, key, mode) for mode in MODES) == expected


def test_a_key_with_the_id_of_another_is_not_that_one(callers):
    forged = f"lorad_{ACME.id}_{keys.new_key().text[-43:]}"
    assert who(callers, 1001, forged, "key") == "invalid_api_key"


def test_an_older_key_is_good_until_its_time_is_over():
    moment = [499.0]
    callers = Callers(("tiny",), tenants=RECORDS, clock=lambda: moment[0])
    assert who(callers, None, OLD.text, "key") == "acme"
    moment[0] = 500.0
    assert who(callers, None, OLD.text, "key") == "invalid_api_key"
    assert who(callers, None, ACME.text, "key") == "acme"


def test_without_tenants_the_socket_alone_decides():
    callers = Callers(("tiny",), operators=(0,))
    for auth in ("peer", "peer+key"):
        assert callers.identify(1234, 7, "", auth).tenant is None
    for auth in ("key", "peer+key"):
        assert who(callers, 1234, ACME.text, auth) == "invalid_api_key"
    assert who(callers, 1234, "", "key") == "invalid_api_key"
    with pytest.raises(LoradError):
        callers.identify(None, None, "", "peer+key")


def test_the_audit_hears_who_by_uid_pid_and_the_keys_id(callers):
    assert callers.identify(1001, 7, "", "peer").who == "uid 1001 pid 7"
    assert callers.identify(1, 8, ACME.text, "key").who == f"uid 1 pid 8 key {ACME.id}"


def test_a_key_is_in_no_repr_and_no_log(callers, caplog):
    with caplog.at_level(logging.DEBUG):
        caller = callers.identify(1, 8, ACME.text, "key")
        said = f"{ACME!r} {RECORDS!r} {caller!r}"
        with pytest.raises(LoradError) as refused:
            callers.identify(1, 8, ACME.text + "x", "key")
    secret = ACME.text[-43:]
    assert secret not in said + caplog.text + str(refused.value) and ACME.digest not in said


def test_times_of_last_use_are_told_once(callers):
    callers.identify(1001, 7, "", "peer")
    callers.identify(1, 7, ACME.text, "key")
    callers.identify(1002, 7, "", "peer")
    assert callers.take_used() == ({"acme": 400.0, "rival": 400.0}, {ACME.id: 400.0})
    assert callers.take_used() == ({}, {})


@pytest.mark.parametrize(
    ("model", "may"),
    [
        ("rival/a", True),
        ("rival/a@0123456789ab", True),
        ("shared-1", True),
        ("shared-10", False),
        ("acme/a", False),
        ("tiny", False),  # the base model
        ("Rival/a", False),
        ("", False),
        ("rival", False),
        ("hf:rival/a", False),
    ],
)
def test_a_tenant_may_what_its_patterns_say(callers, model, may):
    assert callers.identify(1002, 7, "", "peer").may(model) is may


def test_references_are_matched_without_what_they_are_pinned_to():
    tenant = Tenant(adapters=("hf:acme/one", "s3://b/*"))
    assert tenant.may("hf:acme/one") and tenant.may(f"hf:acme/one@{'a' * 40}")
    assert not tenant.may("hf:acme/two@one") and tenant.may("s3://b/x#etags=1")


def test_the_account_is_the_callers_and_never_the_names_where_there_are_tenants(callers):
    caller = callers.identify(1001, 7, "", "peer")
    assert account_of("shared", 99, 70, caller).tenant.name == "acme"
    assert account_of("other/x", None, 70, ANYBODY).tenant.name == "other"
    strict = Caller(Tenant("slow", max_priority=20, weight=0.5))
    assert account_of("x", None, 70, strict).priority == 20
    assert account_of("x", 10, 70, strict).priority == 10
    assert account_of(None, 90, None, strict).priority == 20


def test_no_two_tenants_can_come_to_the_same_salt(callers):
    acme, rival = (callers.identify(uid, 7, "", "peer") for uid in (1001, 1002))
    operator = callers.identify(0, 7, "", "peer")
    salts = {c.salt(s) for c in (acme, rival, operator) for s in ("", "acme/", "/", "rival")}
    assert len(salts) == 12
    assert ANYBODY.salt("mine") == "mine"


def test_a_base_is_met_by_its_very_name_alone():
    bases = ("llama", "minilm")
    open_to_all = Tenant(adapters=("acme/*",), models=bases)
    assert open_to_all.may("llama") and open_to_all.may("minilm")
    one = Tenant(adapters=("acme/*", "minilm"), base=False, models=bases)
    assert [one.may(name) for name in ("llama", "minilm", "acme/a")] == [False, True, True]
    assert (one.may_base("llama"), one.may_base("minilm")) == (False, True)
    none = Tenant(adapters=("*", "mini*"), base=False, models=bases)
    assert not none.may("llama") and not none.may("minilm") and none.may("other")
