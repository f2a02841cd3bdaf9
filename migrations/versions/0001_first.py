"""The first schema: names, revisions, packed files, history, tombstones, events, audit."""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None


def upgrade() -> None:
    """Written out, not taken from the models: they move on, this step does not."""
    op.create_table(
        "facts",
        sa.Column("key", sa.String, primary_key=True),
        sa.Column("value", sa.Integer, nullable=False),
    )
    op.execute("INSERT INTO facts (key, value) VALUES ('generation', 0)")
    op.create_table(
        "revisions",
        sa.Column("rev", sa.String, sa.CheckConstraint("length(rev) = 64"), primary_key=True),
        sa.Column("rank", sa.Integer, nullable=False),
        _json("ranks"),
        sa.Column("alpha", sa.Float, nullable=False),
        sa.Column("rslora", sa.Boolean, nullable=False),
        _json("targets"),
        sa.Column("num_layers", sa.Integer, nullable=False),
        sa.Column("dtype", sa.String, nullable=False),
        sa.Column("file_bytes", sa.Integer, nullable=False),
        sa.Column("changes_kv", sa.Boolean, nullable=False),
        _json("warnings"),
        _json("modules"),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    op.create_table(
        "packed",
        sa.Column(
            "rev", sa.String, sa.ForeignKey("revisions.rev", ondelete="CASCADE"), primary_key=True
        ),
        sa.Column("layout", sa.String, primary_key=True),
        sa.Column("num_blocks", sa.Integer, nullable=False),
        sa.Column("true_bytes", sa.Integer, nullable=False),
        sa.Column("created_at", sa.Float, nullable=False),
    )
    _adapters()
    op.create_table(
        "history",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column(
            "name", sa.String, sa.ForeignKey("adapters.name", ondelete="CASCADE"), nullable=False
        ),
        sa.Column("rev", sa.String, nullable=False),
        sa.Column("replaced_at", sa.Float, nullable=False),
    )
    op.create_index("history_by_name", "history", ["name", "id"])
    op.create_table(
        "tombstones",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("digest", sa.String, nullable=False),
        sa.Column("removed_at", sa.Float, nullable=False),
    )
    _logs()


def _adapters() -> None:
    op.create_table(
        "adapters",
        sa.Column("name", sa.String, primary_key=True),
        sa.Column("tenant", sa.String, nullable=False, server_default=""),
        sa.Column("model", sa.String, nullable=False),
        sa.Column("state", sa.String, nullable=False),
        sa.Column("pinned", sa.Boolean, nullable=False),
        sa.Column(
            "priority",
            sa.Integer,
            sa.CheckConstraint("priority BETWEEN 0 AND 100"),
            nullable=False,
        ),
        _json("labels"),
        sa.Column("source", sa.String, nullable=False),
        sa.Column("serving_rev", sa.String, sa.ForeignKey("revisions.rev")),
        sa.Column("candidate_rev", sa.String, sa.ForeignKey("revisions.rev")),
        sa.Column("reason", sa.String),
        sa.Column("reason_message", sa.Text),
        sa.Column("display_name", sa.Text),
        sa.Column("created_at", sa.Float, nullable=False),
        sa.Column("last_used_at", sa.Float, nullable=False, server_default="0"),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.CheckConstraint("state IN ('registered', 'quarantined', 'missing')", name="known_state"),
        sa.CheckConstraint(
            "state <> 'registered' OR serving_rev IS NOT NULL OR candidate_rev IS NOT NULL",
            name="registered_points_somewhere",
        ),
    )
    for column in ("tenant", "state", "pinned", "priority", "created_at", "last_used_at"):
        op.create_index(f"adapters_by_{column}", "adapters", [column, "name"])
    for column in ("serving_rev", "candidate_rev", "generation"):
        op.create_index(f"adapters_by_{column}", "adapters", [column])


def _logs() -> None:
    op.create_table(
        "events",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("level", sa.String, nullable=False),
        sa.Column("type", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("rev", sa.String, nullable=False),
        sa.Column("cause", sa.String, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )
    op.create_index("events_by_name", "events", ["name", "id"])
    op.create_table(
        "audit",
        sa.Column("id", sa.Integer, primary_key=True),
        sa.Column("time", sa.Float, nullable=False),
        sa.Column("actor", sa.String, nullable=False),
        sa.Column("action", sa.String, nullable=False),
        sa.Column("name", sa.String, nullable=False),
        sa.Column("rev", sa.String, nullable=False),
        sa.Column("result", sa.String, nullable=False),
        sa.Column("message", sa.Text, nullable=False),
        sqlite_autoincrement=True,
    )


def _json(name: str) -> "sa.Column[str]":
    return sa.Column(name, sa.Text, sa.CheckConstraint(f"json_valid({name})"), nullable=False)
