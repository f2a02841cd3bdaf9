"""The migrations build exactly the tables of the models, from a checkout and from a wheel."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from lorad.registry import migrate, models, sqlite
from lorad.registry.registry import Registry


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """Migrated here, and no copy."""
    registry = Registry.open(tmp_path)
    yield registry
    registry.close()


def test_the_migrations_build_what_the_models_say(registry: Registry) -> None:
    engine = sqlite.reader_engine(registry.path)
    with engine.connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True})
        assert compare_metadata(context, models.metadata) == []
    engine.dispose()


def test_checks_of_the_models_are_in_the_database_too(registry: Registry, tmp_path: Path) -> None:
    """Alembic does not compare CHECKs; an engine of the models' own says what they should be."""
    fresh = sqlite.migration_engine(tmp_path / "fresh.db")
    models.metadata.create_all(fresh)
    fresh.dispose()

    def checks(path: Path) -> dict[str, int]:
        connection = sqlite3.connect(path)
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE type = 'table'")
        found = {name: sql.count("CHECK") for name, sql in rows if name != "alembic_version"}
        connection.close()
        return found

    assert checks(registry.path) == checks(tmp_path / "fresh.db")


def test_the_schema_version_is_the_newest_migration(registry: Registry) -> None:
    config = Config()
    config.set_main_option("script_location", str(migrate.migrations_dir()))
    assert ScriptDirectory.from_config(config).get_current_head() == (
        f"{models.SCHEMA_VERSION:04d}"
    )
    found = migrate.inspect(registry.path)
    assert (found.kind, found.version) == (migrate.Kind.REGISTRY, models.SCHEMA_VERSION)


def test_a_fresh_registry_is_marked_as_ours_and_uses_wal(registry: Registry) -> None:
    connection = sqlite3.connect(registry.path)
    asked = [
        connection.execute(f"PRAGMA {word}").fetchone()[0]
        for word in ("application_id", "user_version", "journal_mode")
    ]
    connection.close()
    assert asked == [models.APPLICATION_ID, models.SCHEMA_VERSION, "wal"]


def test_the_build_ships_the_migrations_as_a_package_of_lorad() -> None:
    """`lorad._migrations` in a wheel is the folder that a checkout falls back to."""
    import tomllib

    root = Path(__file__).resolve().parents[3]
    tool = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert {"lorad._migrations", "lorad._migrations.versions"} <= set(tool["packages"])
    assert tool["package-dir"]["lorad._migrations"] == "migrations"
    assert (migrate.migrations_dir() / "env.py").is_file()
    assert (root / "migrations" / "versions" / "__init__.py").is_file()


def test_what_was_registered_before_there_were_activated_loras_is_none(tmp_path: Path) -> None:
    path = tmp_path / "registry.db"
    migrate.upgrade(path, 0, target=1)
    connection = sqlite3.connect(path)
    values = ("a" * 64, 8, "{}", 1.0, 0, "[]", 1, "float32", 1, 1, "[]", "[]", 1.0)
    marks = ", ".join("?" * len(values))
    connection.execute(f"INSERT INTO revisions VALUES ({marks})", values)
    connection.commit()
    connection.close()
    migrate.upgrade(path, 1, target=2)
    connection = sqlite3.connect(path)
    assert connection.execute("SELECT alora_tokens FROM revisions").fetchall() == [("[]",)]
    connection.close()
    migrate.upgrade(path, 2, target=5)
    connection = sqlite3.connect(path)
    own = "SELECT num_tokens, own_tokenizer FROM revisions"
    assert connection.execute(own).fetchall() == [(0, 0)], "the base's vocabulary"
    connection.close()
