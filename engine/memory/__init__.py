"""One paged arena for KV cache and adapter weights, and who may use which block of it."""
