"""Models made here: the small transformers that isolate one phenomenon each, and the makers of the bundled checkpoints."""
