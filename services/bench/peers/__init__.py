"""Other engines, each run by the Python of its own environment: nothing here imports anything of ours."""
