"""Tenants: on whose account a request runs, and what that account may.

Goes in: who asks, and for what.  Comes out: a `Tenant` and the `Account` of the request.  Where
nobody has set up tenants, an adapter's name begins with the one whose account it is, and everybody
may use everything.
"""

from dataclasses import dataclass
from fnmatch import fnmatchcase

from lorad.errors import LoradError
from lorad.service.names import tenant_of
from lorad.spelling import is_reference, split_digest

#: Of requests for the base model, which no operator gave a priority.
BASE_PRIORITY = 50


@dataclass(frozen=True, slots=True)
class Tenant:
    """`weight`: of two that always wait, 2.0 is served twice the tokens of 1.0.

    `adapters` are globs of names and references, `models` are the bases' names, which are asked
    for only if `base`, or if `adapters` has the very name: no base is met by a pattern.  0 is no
    limit, and for `queue` limits.queue_per_tenant.
    """

    name: str = ""
    weight: float = 1.0
    max_priority: int = 100
    adapters: tuple[str, ...] = ("*",)
    base: bool = True
    models: tuple[str, ...] = ()
    rpm: int = 0
    tokens_per_minute: int = 0
    queue: int = 0

    @property
    def limited(self) -> bool:
        """Is anything counted?"""
        return bool(self.rpm or self.tokens_per_minute)

    def may(self, model: str) -> bool:
        """Use what a request calls `model`?  Asks nobody whether there is such a thing, so that
        the answer takes as long for what there is as for what there is not."""
        if model in self.models:
            return self.may_base(model)
        name, _ = split_digest(model)
        if is_reference(name):  # without the commit or the etags that it may be pinned to
            name = name.partition("@" if name.startswith("hf:") else "#")[0]
        return any(fnmatchcase(name, glob) for glob in self.adapters)

    def may_base(self, model: str) -> bool:
        """Use that base itself?"""
        return self.base or model in self.adapters


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request.  `tenant` None: there are no tenants, and the name that is asked for
    says whose account it is.  `who` is for the audit: uid, pid, id of the key.  `rev`: the revision
    that a name means to it, as a gateway says that has several daemons."""

    tenant: Tenant | None = None
    who: str = ""
    rev: str = ""

    def may(self, model: str) -> bool:
        return self.tenant is None or self.tenant.may(model)

    def account_for(self, name: str | None) -> Tenant:
        """For a resolved name; None is the base model."""
        return self.tenant or Tenant(tenant_of(name or "") or "")

    def salt(self, asked: str) -> str:
        """Of the prefix cache: what one tenant computes, no other can tell by its speed."""
        return asked if self.tenant is None else f"{self.tenant.name}/{asked}"


class Forbidden(LoradError):
    """What exists or not, and is in any case not for who asks: answered as unknown.  `model` and
    `who` are for the audit."""

    def __init__(self, model: str, who: str) -> None:
        super().__init__("model_not_found", _unknown(model), param="model")
        self.model, self.who = model, who


def unknown(model: str) -> LoradError:
    """What does not exist; for a client the same as Forbidden."""
    return LoradError("model_not_found", _unknown(model), param="model")


def _unknown(model: str) -> str:
    return f"The model {model[:200]!r} does not exist"


#: Where there are no tenants.
ANYBODY = Caller()


@dataclass(frozen=True, slots=True)
class Account:
    """What a request runs with."""

    tenant: Tenant
    priority: int
    caller: Caller = ANYBODY


def account_of(
    name: str | None, asked: int | None, adapter: int | None, caller: Caller = ANYBODY
) -> Account:
    """For a resolved name (None: the base), the priority that was asked for, and the adapter's.

    A request has its adapter's priority, or less if it asks for less: a client cannot put itself
    before others, since the adapter's is the operator's word and the tenant's maximum above that.
    """
    tenant = caller.account_for(name)
    most = min(BASE_PRIORITY if adapter is None else adapter, tenant.max_priority)
    return Account(tenant, most if asked is None else min(asked, most), caller)
