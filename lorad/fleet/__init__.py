"""Many daemons behind one gateway: one catalog of adapters, one API, one picture for operators."""
