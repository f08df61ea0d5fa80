"""`kvrelay up`: runs the processes of a pipeline on this machine, and starts again what dies."""
