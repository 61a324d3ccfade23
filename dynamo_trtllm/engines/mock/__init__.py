"""An engine with no weights: fixed step time, deterministic tokens, bounded blocks, real tickets. A stand-in."""
