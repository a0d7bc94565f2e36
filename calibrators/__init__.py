"""Calibrators: activations in, artifacts out. Offline; never imported by the loader or a cache."""
