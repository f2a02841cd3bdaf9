"""Alembic's folder: in the wheel `lorad._migrations`; `lorad.registry.migrate` runs it."""
