"""Operations: what was begun for an operator, and what became of it."""

from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    """As SQL: the CHECKs are easier to read so, and alembic leaves some of them out."""
    op.execute(
        """
        CREATE TABLE operations (
            id VARCHAR NOT NULL,
            kind VARCHAR NOT NULL,
            target VARCHAR NOT NULL,
            state VARCHAR NOT NULL,
            done_bytes INTEGER NOT NULL,
            total_bytes INTEGER NOT NULL,
            wish TEXT NOT NULL CHECK (json_valid(wish)),
            "commit" VARCHAR NOT NULL,
            staging VARCHAR NOT NULL,
            name VARCHAR NOT NULL,
            rev VARCHAR NOT NULL,
            code VARCHAR NOT NULL,
            reason VARCHAR NOT NULL,
            message TEXT NOT NULL,
            hint TEXT NOT NULL,
            actor VARCHAR NOT NULL,
            created_at FLOAT NOT NULL,
            updated_at FLOAT NOT NULL,
            PRIMARY KEY (id),
            CONSTRAINT known_operation_state
                CHECK (state IN ('queued', 'running', 'done', 'failed', 'cancelled'))
        )
        """
    )
    op.create_index("operations_by_state", "operations", ["state", "id"])
