"""One codec per file; see `base.Codec` for what they share."""
