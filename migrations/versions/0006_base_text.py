"""Beside which base a revision's tokenizer was told; what was registered before is looked at."""

from alembic import op

revision = "0006"
down_revision = "0005"


def upgrade() -> None:
    op.execute("ALTER TABLE revisions ADD COLUMN base_text VARCHAR DEFAULT '' NOT NULL")
