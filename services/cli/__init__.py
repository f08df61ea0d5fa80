"""The `kvrelay` command. Each command is a module, imported when it is asked for; only the workers' import torch."""
