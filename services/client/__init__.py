"""A small client for jobs over NATS: submit, stream, resume, cancel. Light: no torch, no tokenizer."""

from services.client.client import Client
from services.client.place import Place

__all__ = ["Client", "Place"]
