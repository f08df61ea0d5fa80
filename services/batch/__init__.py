"""Batches: many requests in a file, run on the batch lane by whoever holds the file; each answer lands whole on the
results stream, once, so that whoever runs a batch may die at any moment and another goes on.
"""
