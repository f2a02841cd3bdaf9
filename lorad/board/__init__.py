"""The board: all that a dashboard shows, kept cheaply, and streamed to who looks."""
