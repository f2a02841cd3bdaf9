"""The tables.  The migrations build them; a test compares both.

JSON columns are checked by the database itself, so that `PRAGMA quick_check` at start sees a
scrambled row too.  `generation` counts write transactions; a row carries the one that changed it.
"""

from sqlalchemy import (
    Boolean,
    CheckConstraint,
    Column,
    Float,
    ForeignKey,
    Index,
    Integer,
    MetaData,
    String,
    Table,
    Text,
)

#: `PRAGMA application_id`: "lora".
APPLICATION_ID = 0x6C6F7261
#: `PRAGMA user_version`: the number of the newest migration.
SCHEMA_VERSION = 6

metadata = MetaData()

facts = Table(
    "facts",
    metadata,
    Column("key", String, primary_key=True),
    Column("value", Integer, nullable=False),
)

revisions = Table(
    "revisions",
    metadata,
    Column("rev", String, CheckConstraint("length(rev) = 64"), primary_key=True),
    Column("rank", Integer, nullable=False),
    Column("ranks", Text, CheckConstraint("json_valid(ranks)"), nullable=False),
    Column("alpha", Float, nullable=False),
    Column("rslora", Boolean, nullable=False),
    Column("targets", Text, CheckConstraint("json_valid(targets)"), nullable=False),
    Column("num_layers", Integer, nullable=False),
    Column("dtype", String, nullable=False),
    Column("file_bytes", Integer, nullable=False),
    Column("changes_kv", Boolean, nullable=False),
    Column("warnings", Text, CheckConstraint("json_valid(warnings)"), nullable=False),
    # [[layer, module, rank, scaling], ...]; about 5 KB for all modules of 32 layers.  Where there
    # is either, [..., bias, gain].
    Column("modules", Text, CheckConstraint("json_valid(modules)"), nullable=False),
    Column("created_at", Float, nullable=False),
    Column(
        "alora_tokens",
        Text,
        CheckConstraint("json_valid(alora_tokens)"),
        nullable=False,
        server_default="[]",
    ),
    Column("num_tokens", Integer, nullable=False, server_default="0"),
    Column("own_tokenizer", Boolean, nullable=False, server_default="0"),
    # what these two were told beside; "" = before anybody asked
    Column("base_text", String, nullable=False, server_default=""),
)

packed = Table(
    "packed",
    metadata,
    Column("rev", String, ForeignKey("revisions.rev", ondelete="CASCADE"), primary_key=True),
    Column("layout", String, primary_key=True),
    Column("num_blocks", Integer, nullable=False),
    Column("true_bytes", Integer, nullable=False),
    Column("created_at", Float, nullable=False),
)

adapters = Table(
    "adapters",
    metadata,
    Column("name", String, primary_key=True),
    Column("tenant", String, nullable=False, server_default=""),  # "" = none
    Column("model", String, nullable=False),
    Column("state", String, nullable=False),
    Column("pinned", Boolean, nullable=False),
    Column("priority", Integer, CheckConstraint("priority BETWEEN 0 AND 100"), nullable=False),
    Column("labels", Text, CheckConstraint("json_valid(labels)"), nullable=False),
    Column("source", String, nullable=False),
    Column("serving_rev", String, ForeignKey("revisions.rev")),
    Column("candidate_rev", String, ForeignKey("revisions.rev")),
    Column("reason", String),
    Column("reason_message", Text),
    Column("display_name", Text),
    Column("created_at", Float, nullable=False),
    Column("last_used_at", Float, nullable=False, server_default="0"),  # 0 = never
    Column("generation", Integer, nullable=False),
    CheckConstraint("state IN ('registered', 'quarantined', 'missing')", name="known_state"),
    # a registered name points somewhere: a row that says otherwise is half a write
    CheckConstraint(
        "state <> 'registered' OR serving_rev IS NOT NULL OR candidate_rev IS NOT NULL",
        name="registered_points_somewhere",
    ),
)
for _column in ("tenant", "state", "pinned", "priority", "created_at", "last_used_at"):
    Index(f"adapters_by_{_column}", adapters.c[_column], adapters.c.name)
for _column in ("serving_rev", "candidate_rev", "generation"):
    Index(f"adapters_by_{_column}", adapters.c[_column])

history = Table(
    "history",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("name", String, ForeignKey("adapters.name", ondelete="CASCADE"), nullable=False),
    Column("rev", String, nullable=False),  # no foreign key: it may be collected meanwhile
    Column("replaced_at", Float, nullable=False),
    Index("history_by_name", "name", "id"),
)

tombstones = Table(
    "tombstones",
    metadata,
    Column("name", String, primary_key=True),
    Column("source", String, nullable=False),
    Column("digest", String, nullable=False),
    Column("removed_at", Float, nullable=False),
)

events = Table(
    "events",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("time", Float, nullable=False),
    Column("level", String, nullable=False),
    Column("type", String, nullable=False),
    Column("name", String, nullable=False),
    Column("rev", String, nullable=False),
    Column("cause", String, nullable=False),
    Column("message", Text, nullable=False),
    Index("events_by_name", "name", "id"),
    sqlite_autoincrement=True,
)

audit = Table(
    "audit",
    metadata,
    Column("id", Integer, primary_key=True),
    Column("time", Float, nullable=False),
    Column("actor", String, nullable=False),
    Column("action", String, nullable=False),
    Column("name", String, nullable=False),
    Column("rev", String, nullable=False),
    Column("result", String, nullable=False),
    Column("message", Text, nullable=False),
    sqlite_autoincrement=True,
)

operations = Table(
    "operations",
    metadata,
    Column("id", String, primary_key=True),  # rises with time
    Column("kind", String, nullable=False),
    Column("target", String, nullable=False),
    Column("state", String, nullable=False),
    Column("done_bytes", Integer, nullable=False),
    Column("total_bytes", Integer, nullable=False),  # 0 = not known yet
    Column("wish", Text, CheckConstraint("json_valid(wish)"), nullable=False),
    Column("commit", String, nullable=False),  # what the target was resolved to, "" before
    Column("staging", String, nullable=False),  # the folder that it fills, "" for none
    Column("name", String, nullable=False),
    Column("rev", String, nullable=False),
    Column("code", String, nullable=False),
    Column("reason", String, nullable=False),
    Column("message", Text, nullable=False),
    Column("hint", Text, nullable=False),
    Column("actor", String, nullable=False),
    Column("created_at", Float, nullable=False),
    Column("updated_at", Float, nullable=False),
    CheckConstraint(
        "state IN ('queued', 'running', 'done', 'failed', 'cancelled')",
        name="known_operation_state",
    ),
    Index("operations_by_state", "state", "id"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("name", String, primary_key=True),
    Column("adapters", Text, CheckConstraint("json_valid(adapters)"), nullable=False),  # globs
    Column("base", Boolean, nullable=False),
    Column("uids", Text, CheckConstraint("json_valid(uids)"), nullable=False),
    Column("rpm", Integer, nullable=False),  # 0 = as many as there are, here and below
    Column("tokens_per_minute", Integer, nullable=False),
    Column("queue", Integer, nullable=False),
    Column(
        "max_priority",
        Integer,
        CheckConstraint("max_priority BETWEEN 0 AND 100"),
        nullable=False,
    ),
    Column("weight", Float, CheckConstraint("weight > 0"), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("last_used_at", Float, nullable=False, server_default="0"),  # 0 = never
)

tenant_keys = Table(
    "tenant_keys",
    metadata,
    Column("id", String, primary_key=True),
    Column("tenant", String, ForeignKey("tenants.name", ondelete="CASCADE"), nullable=False),
    # of the whole key, in hex: the key itself is nowhere
    Column("digest", String, CheckConstraint("length(digest) = 64"), nullable=False),
    Column("created_at", Float, nullable=False),
    Column("expires_at", Float, nullable=False),  # 0 = never
    Column("last_used_at", Float, nullable=False, server_default="0"),
    Index("tenant_keys_by_tenant", "tenant"),
)
