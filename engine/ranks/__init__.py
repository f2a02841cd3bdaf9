"""The processes of one engine that shares its model among several ranks, one a GPU."""
