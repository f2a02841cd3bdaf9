"""Tenants: on whose account a request runs, and what that account may.

Goes in: the name that a request asks for.  Comes out: its `Tenant`.  Until requests carry an
identity of their own, the tenant is the one that the adapter's name begins with: `who_asks` is the
one place that says so.
"""

from dataclasses import dataclass

from lorad.service.names import tenant_of

#: Of requests for the base model, which no operator gave a priority.
BASE_PRIORITY = 50


@dataclass(frozen=True, slots=True)
class Tenant:
    """`weight`: of two that always wait, 2.0 is served twice the tokens of 1.0."""

    name: str = ""
    weight: float = 1.0
    max_priority: int = 100


def who_asks(model: str) -> Tenant:
    """The account of a request for `model`, a resolved name; "" is everybody without a tenant."""
    return Tenant(tenant_of(model) or "")


@dataclass(frozen=True, slots=True)
class Account:
    """What a request runs with."""

    tenant: Tenant
    priority: int


def account_of(name: str | None, asked: int | None, adapter: int | None) -> Account:
    """For a resolved name (None: the base), the priority that was asked for, and the adapter's.

    A request has its adapter's priority, or less if it asks for less: a client cannot put itself
    before others, since the adapter's is the operator's word and the tenant's maximum above that.
    """
    tenant = who_asks(name or "")
    most = min(BASE_PRIORITY if adapter is None else adapter, tenant.max_priority)
    return Account(tenant, most if asked is None else min(asked, most))
