"""`loractl top`: the dashboard.  It knows the wire and nothing behind it."""
