"""The bundle format: manifest, typed artifacts, page-aligned safetensors, verification."""
