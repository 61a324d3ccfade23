"""The fuzz targets. Each module has a mapping TARGETS, by the names of `tests.fuzz.registry`."""
