"""Models on disk: found, checked, converted once into a cache keyed by content, and identified by what they contain."""
