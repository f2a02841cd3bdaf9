"""Callers: whose a connection or a key is.

Goes in: the tenants as the registry holds them, and of each request the peer's uid and the key that
it sent.  Comes out: a `Caller`, or why there is none.  In memory, since every request asks; only
`Tenancy` changes it.  Times of last use are collected here and written with those of adapters.
"""

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Literal

from lorad.errors import LoradError
from lorad.registry.records import KeyRecord, TenantRecord
from lorad.service import keys
from lorad.service.tenants import Caller, Tenant

Auth = Literal["peer", "key", "peer+key"]

_HOW = "authorization: Bearer KEY; loractl tenant rotate-key NAME makes a new one"


def operator(callers: "Callers", who: str) -> Caller:
    """Who may use everything: where there are no tenants, nobody in particular."""
    return Caller(Tenant(models=callers.models) if callers.names else None, who)


class Callers:
    """`models` are the bases' names; `operators` are the uids that may use the admin socket: on
    the inference socket they need be no tenant, so that `loractl run` works."""

    def __init__(
        self,
        models: Sequence[str],
        *,
        operators: Collection[int] = (),
        tenants: Iterable[TenantRecord] = (),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.models, self._clock = tuple(models), clock
        self.operators = frozenset(operators)
        self._used: dict[str, float] = {}  # tenant -> when
        self._used_keys: dict[str, float] = {}
        self.replace(tenants)

    def replace(self, tenants: Iterable[TenantRecord]) -> None:
        """These are all tenants now."""
        records = tuple(tenants)
        self._by_name = {record.name: self._tenant(record) for record in records}
        self._by_uid = {uid: self._by_name[r.name] for r in records for uid in r.uids}
        self._by_key = {key.id: (key, self._by_name[r.name]) for r in records for key in r.keys}

    @property
    def names(self) -> set[str]:
        return set(self._by_name)

    def identify(self, uid: int | None, pid: int | None, key: str, auth: Auth) -> Caller:
        """`uid` None: not of this machine.  `auth` says what counts: the uid, a key, or a key where
        there is one and else the uid.  Raises invalid_api_key or permission_denied.
        """
        who = "unknown peer" if uid is None else f"uid {uid} pid {pid}"
        if auth == "peer+key" and not key.startswith(keys.BEGINNING):
            key = ""  # OpenAI's clients send something even where there is nothing to send
        if auth != "peer" and (key or auth == "key" or uid is None):
            return self._of_key(key, who)
        if not self._by_name:
            return Caller(None, who)
        tenant = self._by_uid.get(-1 if uid is None else uid)
        if tenant is None and uid in self.operators:
            return Caller(Tenant(models=self.models), who)
        if tenant is None and auth == "peer":
            message = f"{who.partition(' pid')[0]} is no tenant of this daemon"
            raise LoradError("permission_denied", message, hint="loractl tenant set NAME --uid UID")
        if tenant is None:
            raise LoradError("invalid_api_key", "an API key is needed here", hint=_HOW)
        self._used[tenant.name] = self._clock()
        return Caller(tenant, who)

    def take_used(self) -> tuple[dict[str, float], dict[str, float]]:
        """Times of last use since the last call: of tenants, and of key ids."""
        used = self._used, self._used_keys
        self._used, self._used_keys = {}, {}
        return used

    # ------------------------------------------------------------- pieces
    def _of_key(self, key: str, who: str) -> Caller:
        if not key:
            raise LoradError("invalid_api_key", "an API key is needed here", hint=_HOW)
        now, nobody = self._clock(), (KeyRecord(id="", digest=keys.NOTHING), None)
        record, tenant = self._by_key.get(keys.id_of(key), nobody)
        right = keys.same(record.digest, keys.digest_of(key))
        if tenant is None or not right or 0 < record.expires_at <= now:
            raise LoradError("invalid_api_key", "this API key is not valid here", hint=_HOW)
        self._used[tenant.name] = self._used_keys[record.id] = now
        return Caller(tenant, f"{who} key {record.id}")

    def _tenant(self, record: TenantRecord) -> Tenant:
        return Tenant(
            name=record.name,
            weight=record.weight,
            max_priority=record.max_priority,
            adapters=record.adapters,
            base=record.base,
            models=self.models,
            rpm=record.rpm,
            tokens_per_minute=record.tokens_per_minute,
            queue=record.queue,
        )
