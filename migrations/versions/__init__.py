"""One file a schema version; its revision is the number that `user_version` gets."""
