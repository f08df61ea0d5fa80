"""The decode worker: hand-offs in, the rest of the tokens out."""
