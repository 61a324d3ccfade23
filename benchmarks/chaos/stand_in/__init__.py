"""A stand-in for bugs of engines, which `sitecustomize` has."""
