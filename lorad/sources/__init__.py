"""Where adapter files come from."""
