"""Vocabularies of adapters' own; what was registered before has the base's."""

from alembic import op

revision = "0005"
down_revision = "0004"


def upgrade() -> None:
    op.execute("ALTER TABLE revisions ADD COLUMN num_tokens INTEGER DEFAULT 0 NOT NULL")
    op.execute("ALTER TABLE revisions ADD COLUMN own_tokenizer BOOLEAN DEFAULT 0 NOT NULL")
