"""Adapter revisions inside the engine: inspection, packing, tiers, slots, step plans."""
