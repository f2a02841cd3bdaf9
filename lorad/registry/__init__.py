"""SQLite registry and the content-addressed store: what adapters exist, and their bytes."""
