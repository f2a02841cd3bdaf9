"""The invocation tokens of activated LoRAs; what was registered before has none."""

from alembic import op

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """As SQL, since alembic leaves the CHECK of an added column out."""
    op.execute(
        "ALTER TABLE revisions ADD COLUMN alora_tokens TEXT DEFAULT '[]' NOT NULL "
        "CHECK (json_valid(alora_tokens))"
    )
