"""Runs migrations inside the transaction that `lorad.registry.migrate` has opened.

The caller hands its connection over, commits, and sets `user_version`; nothing here does either.
"""

from alembic import context

context.configure(connection=context.config.attributes["connection"], render_as_batch=True)
context.run_migrations()
