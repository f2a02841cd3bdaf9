"""Tenants and their keys."""

from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    """As SQL, for the CHECKs."""
    op.execute(
        """
        CREATE TABLE tenants (
            name VARCHAR NOT NULL,
            adapters TEXT NOT NULL CHECK (json_valid(adapters)),
            base BOOLEAN NOT NULL,
            uids TEXT NOT NULL CHECK (json_valid(uids)),
            rpm INTEGER NOT NULL,
            tokens_per_minute INTEGER NOT NULL,
            queue INTEGER NOT NULL,
            max_priority INTEGER NOT NULL CHECK (max_priority BETWEEN 0 AND 100),
            weight FLOAT NOT NULL CHECK (weight > 0),
            created_at FLOAT NOT NULL,
            last_used_at FLOAT DEFAULT '0' NOT NULL,
            PRIMARY KEY (name)
        )
        """
    )
    op.execute(
        """
        CREATE TABLE tenant_keys (
            id VARCHAR NOT NULL,
            tenant VARCHAR NOT NULL,
            digest VARCHAR NOT NULL CHECK (length(digest) = 64),
            created_at FLOAT NOT NULL,
            expires_at FLOAT NOT NULL,
            last_used_at FLOAT DEFAULT '0' NOT NULL,
            PRIMARY KEY (id),
            FOREIGN KEY(tenant) REFERENCES tenants (name) ON DELETE CASCADE
        )
        """
    )
    op.create_index("tenant_keys_by_tenant", "tenant_keys", ["tenant"])
