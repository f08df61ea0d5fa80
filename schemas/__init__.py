"""What crosses a process boundary: jobs, events, subjects, HTTP bodies, the blob header, the error tree.

Nothing here imports from the other packages, and nothing here does I/O.
"""
